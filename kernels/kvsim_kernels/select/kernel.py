"""Eviction by rank: a radix select for the first cut, an argmin afterwards."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.select.reference import Evicted, Survivors, check

__all__ = ["select_evicted", "select_survivors"]

_FIRST_BLOCK = 4096
_STEP_BLOCK = 4096
_ORDER_BLOCK = 64


@triton.jit
def _ranked(state, positions, slot, length, n_sink, first_recent, VECTOR: tl.constexpr):
    """Rank, position and the marks `visible` and `free` of some slots.

    Ranks order like (state, position): the bits of a float32 as an integer that sorts alike, above the position's.
    """
    # A mask that changes within 16 bytes would split their load.
    near = slot // VECTOR * VECTOR < length
    m = tl.load(state + slot, mask=near, other=0.0)
    # Minus zero equals zero.
    bits = tl.where(m == 0, 0.0, m).to(tl.int32, bitcast=True)
    position = tl.load(positions + slot, mask=near, other=-1).to(tl.int32)
    visible = (position >= 0) & (slot < length)
    free = visible & (position >= n_sink) & (position < first_recent)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) * 4294967296 + position
    return rank, position, visible, free


@triton.jit
def _survivors(
    state,
    positions,
    lengths,
    limits,
    last_positions,
    kept,
    counts,
    ties,
    slots,
    stride_batch,
    stride_group,
    width,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, group = row // GROUPS, row % GROUPS
    state += row * slots
    positions += batch * stride_batch + group * stride_group
    kept += row * width
    length = tl.load(lengths + batch)
    budget, n_sink = tl.load(limits + row * 3), tl.load(limits + row * 3 + 1)
    first_recent = tl.load(last_positions + batch) - tl.load(limits + row * 3 + 2) + 1
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.int32)
    loose = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, length, BLOCK):
        _, _, visible, free = _ranked(state, positions, first + lane, length, n_sink, first_recent, VECTOR)
        seen += visible.to(tl.int32)
        loose += free.to(tl.int32)
    total, unprotected = tl.sum(seen, 0), tl.sum(loose, 0)
    # Of the `left` lowest among those whose rank has the leading bytes found so far, all are lost.
    left = tl.maximum(unprotected - tl.maximum(budget - (total - unprotected), 0), 0)
    sign = tl.full([], -9223372036854775808, tl.int64)
    found = tl.full([], 0, tl.int64)
    known = tl.full([], 0, tl.int64)
    tied = tl.full([], 0, tl.int32)
    shift = tl.full([], 56, tl.int64)
    searching = left > 0
    digits = tl.arange(0, 256)
    while searching:
        histogram = tl.zeros([256], tl.int32)
        for first in tl.range(0, length, BLOCK):
            rank, _, _, free = _ranked(state, positions, first + lane, length, n_sink, first_recent, VECTOR)
            # Unsigned, so that bytes order like numbers.
            rank = rank ^ sign
            alike = free & ((rank & known) == found)
            histogram += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=alike)
        digit = tl.sum((tl.cumsum(histogram, 0) < left).to(tl.int32), 0)
        left -= tl.sum(tl.where(digits < digit, histogram, 0), 0)
        here = tl.sum(tl.where(digits == digit, histogram, 0), 0)
        found = found | (digit.to(tl.int64) << shift)
        known = known | (tl.full([], 255, tl.int64) << shift)
        # The fourth byte ends the state; more bytes tell equal states apart by position.
        tied = tl.where((shift == 32) & (here > left), here, tied)
        searching = (here > left) & (shift > 0)
        shift -= 8
    cut = (found | (known ^ -1)) ^ sign
    cut = tl.where(known == 0, sign, cut)
    count = tl.full([], 0, tl.int32)
    for first in tl.range(0, length, BLOCK):
        rank, _, visible, free = _ranked(state, positions, first + lane, length, n_sink, first_recent, VECTOR)
        stays = visible & ((rank > cut) | (free == 0))
        place = count + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(kept + place, (first + lane).to(tl.int32), mask=stays & (place < width))
        count += tl.sum(stays.to(tl.int32), 0)
    for first in tl.range(count, width, BLOCK):
        tl.store(kept + first + lane, tl.full([BLOCK], -1, tl.int32), mask=first + lane < width)
    tl.store(counts + row, tl.minimum(count, width))
    tl.store(ties + row, tied)


@triton.jit
def _by_position(
    kept, positions, counts, ordered, stride_batch, stride_group, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    positions += row // GROUPS * stride_batch + row % GROUPS * stride_group
    count = tl.load(counts + row)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(kept + row * width + own, mask=own < width, other=-1)
    position = tl.load(positions + slot, mask=own < count, other=-1)
    place = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, count, BLOCK):
        other = first + tl.arange(0, BLOCK)
        its = tl.load(positions + tl.load(kept + row * width + other, mask=other < count, other=0))
        lower = (its[None, :] < position[:, None]) & (other < count)[None, :]
        place += tl.sum(lower.to(tl.int32), 1)
    place = tl.where(own < count, place, own)
    tl.store(ordered + row * width + place, slot, mask=own < width)


@triton.jit
def _evicted(
    state,
    positions,
    lengths,
    limits,
    last_positions,
    gone,
    at,
    ties,
    slots,
    stride_batch,
    stride_group,
    GROUPS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, group = row // GROUPS, row % GROUPS
    state += row * slots
    positions += batch * stride_batch + group * stride_group
    length = tl.load(lengths + batch)
    budget, n_sink = tl.load(limits + row * 3), tl.load(limits + row * 3 + 1)
    first_recent = tl.load(last_positions + batch) - tl.load(limits + row * 3 + 2) + 1
    lane = tl.arange(0, BLOCK)
    seen = tl.zeros([BLOCK], tl.int32)
    lowest = tl.full([BLOCK], 9223372036854775807, tl.int64)
    lowest_slot = tl.full([BLOCK], -1, tl.int32)
    alike = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, length, BLOCK):
        slot = first + lane
        rank, _, visible, free = _ranked(state, positions, slot, length, n_sink, first_recent, VECTOR)
        seen += visible.to(tl.int32)
        lower = free & (rank < lowest)
        same = free & ((rank >> 32) == (lowest >> 32))
        alike = tl.where(same, alike + 1, tl.where(lower, 1, alike))
        lowest = tl.where(lower, rank, lowest)
        lowest_slot = tl.where(lower, slot, lowest_slot)
    least = tl.min(lowest, 0)
    found = (tl.sum(seen, 0) > budget) & (least < 9223372036854775807)
    chosen = tl.max(tl.where(lowest == least, lowest_slot, -1), 0)
    tied = tl.sum(tl.where((lowest >> 32) == (least >> 32), alike, 0), 0)
    tl.store(gone + row, tl.where(found, chosen, -1))
    tl.store(at + row, tl.where(found, least & 0xFFFFFFFF, -1).to(tl.int32))
    tl.store(ties + row, tl.where(found & (tied > 1), tied, 0))


def select_survivors(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
    *,
    width: int,
    ordered: bool = False,
) -> Survivors:
    """Choose what stays; see `kvsim_kernels.select.reference.select_survivors`.

    A radix select finds the rank of the last one lost, a byte at a time, position after state; one program for each
    group reads its states about six times. Lengths, limits and positions are read by the GPU only.

    Parameters
    ----------
    state, positions, lengths, limits, last_positions, width
        As in the reference; float32 states, int32 elsewhere, all contiguous.
    ordered : bool
        The positions of visible slots ascend, as they do after a prefill, so that survivors need not be put in order.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    shape = _check(state, positions, lengths, limits, last_positions)
    rows, device = state.shape[0] * state.shape[1], state.device
    kept = torch.empty(*state.shape[:2], width, dtype=torch.int32, device=device)
    counts, ties = torch.empty(2, *state.shape[:2], dtype=torch.int32, device=device)
    block = min(_FIRST_BLOCK, triton.next_power_of_2(state.shape[2]))
    _survivors[(rows,)](
        state, positions, lengths, limits, last_positions, kept, counts, ties, *shape, width,
        GROUPS=state.shape[1], VECTOR=_vector(state), BLOCK=max(256, block), num_warps=max(1, block // 256),
    )  # fmt: skip
    if not ordered:
        kept, unordered = torch.empty_like(kept), kept
        _by_position[(triton.cdiv(width, _ORDER_BLOCK), rows)](
            unordered, positions, counts, kept, *shape[1:], width,
            GROUPS=state.shape[1], BLOCK=_ORDER_BLOCK, num_warps=4,
        )  # fmt: skip
    return Survivors(kept, counts, ties)


def select_evicted(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
) -> Evicted:
    """Choose the one slot that leaves; see `kvsim_kernels.select.reference.select_evicted`.

    The arguments are those of `select_survivors`. One program for each group reads its states once.
    """
    shape = _check(state, positions, lengths, limits, last_positions)
    gone, at, ties = torch.empty(3, *state.shape[:2], dtype=torch.int32, device=state.device)
    block = min(_STEP_BLOCK, max(256, triton.next_power_of_2(state.shape[2])))
    _evicted[(state.shape[0] * state.shape[1],)](
        state, positions, lengths, limits, last_positions, gone, at, ties, *shape,
        GROUPS=state.shape[1], VECTOR=_vector(state), BLOCK=block, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return Evicted(gone, at, ties)


def _vector(state: torch.Tensor) -> int:
    return 1 if state.shape[2] % 4 else 4


def _check(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
) -> tuple[int, int, int]:
    """Return the number of slots and the strides of positions over batch and group, or raise ValueError."""
    check(state, positions, limits)
    given = (positions, lengths, limits, last_positions)
    if state.dtype != torch.float32 or any(x.dtype != torch.int32 for x in given):
        raise ValueError(f"state must be float32 and the rest int32, got {[x.dtype for x in (state, *given)]}")
    if not all(x.is_contiguous() for x in (state, *given)):
        raise ValueError("state, positions, lengths, limits and last_positions must be contiguous")
    return state.shape[2], positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0
