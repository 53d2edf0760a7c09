"""What launches of all kernels share."""

import functools
import os
from typing import Any

import torch

__all__ = ["SERIAL", "early_launch", "multiprocessors", "split_count"]

SERIAL = "KVSIM_SERIAL_LAUNCHES"
"""Environment variable: 1 has every kernel wait for the end of the one before it."""

_PROGRAMS_PER_MULTIPROCESSOR = 2
_LEAST_SLOTS = 64
_HOPPER = (9, 0)


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


@functools.cache
def _can_launch_early(device: torch.device) -> bool:
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= _HOPPER)


def early_launch(device: torch.device) -> dict[str, Any]:
    """Give the options of a kernel that may start before the one ahead of it in the stream has ended.

    From Hopper on (programmatic dependent launch). Such a kernel says at once that the next one may start, and waits
    before it reads anything that another kernel writes; since all of them wait, whoever has waited sees what every
    kernel before it wrote. What is read before the wait must be constant.

    Returns
    -------
    dict
        ``EARLY`` for the kernel, and what the launch needs.
    """
    if _can_launch_early(device) and os.environ.get(SERIAL) != "1":
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
