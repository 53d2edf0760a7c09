"""The end of an eviction step: one program for each group reads its states once."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.seat.reference import check
from kvsim_kernels.select import Evicted

__all__ = ["seat"]

_BLOCK = 4096


@triton.jit
def _seat(
    state,
    positions,
    lengths,
    limits,
    last_positions,
    gone_slots,
    gone_positions,
    step,
    new_slots,
    evicted_at,
    near,
    margin,
    slots,
    total,
    steps,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = place // GROUPS
    state += place * slots
    positions += place * slots
    length, last, now = tl.load(lengths + row), tl.load(last_positions + row), tl.load(step)
    n_sink, n_recent = tl.load(limits + place * 3 + 1), tl.load(limits + place * 3 + 2)
    gone = tl.load(gone_slots + place)
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for first in tl.range(0, length, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        position = tl.load(positions + slot, mask=slot < length, other=-1)
        free = (position >= 0) & (position >= n_sink) & (position <= last - n_recent) & (slot != gone)
        m = tl.load(state + slot, mask=free, other=float("inf"))
        least = tl.minimum(least, m)
    high = tl.min(least, 0)
    if gone >= 0:
        low = tl.load(state + gone)
        size = tl.maximum(tl.abs(low), tl.abs(high))
        is_near = (high < float("inf")) & ((size == 0) | (high - low < margin * size))
        tl.store(near + place * steps + now, is_near.to(tl.int8))
        tl.store(evicted_at + place * total + tl.load(gone_positions + place), now)
    next_slot = tl.where(gone >= 0, gone, length)
    tl.store(new_slots + place, tl.where(next_slot < slots, next_slot, -1))
    # The loads above must come before the position of what left is overwritten.
    tl.debug_barrier()
    tl.store(positions + next_slot, last + 1, mask=next_slot < slots)


def seat(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
    evicted: Evicted,
    step: torch.Tensor,
    *,
    new_slots: torch.Tensor,
    evicted_at: torch.Tensor,
    near: torch.Tensor,
    margin: float,
) -> None:
    """Record an eviction and seat the next position; see `kvsim_kernels.seat.reference.seat`.

    The state is float32, `near` int8 and the rest int32, all contiguous and read by the GPU only.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(state, positions, evicted, new_slots, evicted_at, near)
    whole = (positions, lengths, limits, last_positions, *evicted[:2], step, new_slots, evicted_at)
    if state.dtype != torch.float32 or near.dtype != torch.int8 or any(x.dtype != torch.int32 for x in whole):
        raise ValueError("state must be float32, near int8 and the rest int32")
    if not all(x.is_contiguous() for x in (state, near, *whole)):
        raise ValueError("all tensors must be contiguous")
    batch, groups, slots = state.shape
    block = min(_BLOCK, max(256, triton.next_power_of_2(slots)))
    _seat[(batch * groups,)](
        state, positions, lengths, limits, last_positions, *evicted[:2], step, new_slots, evicted_at, near,
        float(margin), slots, evicted_at.shape[2], near.shape[2],
        GROUPS=groups, BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
