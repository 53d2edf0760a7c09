"""What launches of all kernels share."""

import functools

import torch

__all__ = ["multiprocessors"]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
