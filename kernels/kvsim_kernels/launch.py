"""What launches of all kernels share."""

import functools

import torch

__all__ = ["multiprocessors", "split_count"]

_PROGRAMS_PER_MULTIPROCESSOR = 2
_LEAST_SLOTS = 64


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def split_count(rows: int, slots: int, device: torch.device) -> int:
    """Choose how many programs share each of some rows: two for each multiprocessor in all, 64 slots each at least."""
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device) // rows
    return max(1, min(wanted, -(-slots // _LEAST_SLOTS)))
