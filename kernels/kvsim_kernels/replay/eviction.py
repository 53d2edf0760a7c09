"""Choosing whom to evict, for the general kernel: keys in memory, the cut among them, what follows from it."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvsim_kernels.replay.common import NEVER, eviction_key, kth_key, kth_stored_key

__all__ = ["count_tied", "cut_of", "evict", "guard_highest", "let_go", "mark", "write_keys"]


@triton.jit
def cut_of(keys, n, k, position_bits, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr):
    """Give the k-th smallest (from 0) of n keys."""
    if ONE_BLOCK:
        j = tl.arange(0, BLOCK)
        cut = kth_key(tl.load(keys + j, mask=j < n, other=NEVER), k, position_bits)
    else:
        cut = kth_stored_key(keys, n, k, position_bits, BLOCK)
    return cut


@triton.jit
def write_keys(m, pos, guard, keys, n, pool, n_sink, n_recent, RESCUED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the key of each of the n states, pooled over neighbours; give how many may be evicted."""
    newest = tl.load(pos + n - 1)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        here = j < n
        i = tl.load(pos + j, mask=here, other=0)
        rank = tl.load(m + j, mask=here, other=0.0)
        for shift in range(1, pool // 2 + 1):
            rank = tl.maximum(rank, tl.load(m + j - shift, mask=here & (j >= shift), other=float("-inf")))
            rank = tl.maximum(rank, tl.load(m + j + shift, mask=j + shift < n, other=float("-inf")))
        free = here & (i >= n_sink) & (i <= newest - n_recent)
        if RESCUED:
            free = free & (tl.load(guard + i, mask=here, other=0) == 0)
        tl.store(keys + j, eviction_key(rank, i, free), mask=here)
        count += free.to(tl.int32)
    tl.debug_barrier()
    return tl.sum(count, axis=0)


@triton.jit
def guard_highest(
    due, peak, pos, guard, keys, n, count, n_sink, n_recent, position_bits, BLOCK: tl.constexpr, ONE_BLOCK: tl.constexpr
):
    """Guard the `count` unprotected positions with the highest peaks, if that is due."""
    if due:
        newest = tl.load(pos + n - 1)
        number = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            here = j < n
            i = tl.load(pos + j, mask=here, other=0)
            free = here & (i >= n_sink) & (i <= newest - n_recent)
            tl.store(keys + j, eviction_key(tl.load(peak + i, mask=here, other=0.0), i, free), mask=here)
            number += free.to(tl.int32)
        tl.debug_barrier()
        lost = tl.sum(number, axis=0) - count
        cut = tl.full([], -1, tl.int64)
        if lost > 0:
            cut = cut_of(keys, n, lost - 1, position_bits, BLOCK, ONE_BLOCK)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            key = tl.load(keys + j, mask=j < n, other=NEVER)
            i = tl.load(pos + j, mask=j < n, other=0)
            tl.store(guard + i, (key > cut).to(tl.uint8), mask=(key < NEVER) & (j < n))
        tl.debug_barrier()


@triton.jit
def count_tied(keys, n, cut, BLOCK: tl.constexpr):
    """Count the positions with the float32 state of the cut, 0 unless some of them stay."""
    equal, stay = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        key = tl.load(keys + j, mask=j < n, other=NEVER)
        same = (key >> 31) == (cut >> 31)
        equal += same.to(tl.int32)
        stay += (same & (key > cut)).to(tl.int32)
    return tl.where(tl.sum(stay, axis=0) > 0, tl.sum(equal, axis=0), 0)


@triton.jit
def evict(m, pos, keys, n, cut, evicted_at, step, BLOCK: tl.constexpr):
    """Evict what is not above the cut, and close the gaps that it leaves."""
    kept = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        here = j < n
        gone = tl.load(keys + j, mask=here, other=NEVER) <= cut
        i = tl.load(pos + j, mask=here, other=0)
        v = tl.load(m + j, mask=here, other=0.0)
        tl.store(evicted_at + i, step, mask=gone)
        stays = (here & (gone == 0)).to(tl.int32)
        place = kept + tl.cumsum(stays, axis=0) - 1
        kept += tl.sum(stays, axis=0)
        tl.debug_barrier()
        tl.store(pos + place, i, mask=stays != 0)
        tl.store(m + place, v, mask=stays != 0)
    tl.debug_barrier()
    return kept


@triton.jit
def let_go(m, pos, n, local, BLOCK: tl.constexpr):
    """Take out the first of the last `local` of n positions; give how many are left."""
    for start in range(n - local, n - 1, BLOCK):
        j = start + tl.arange(0, BLOCK)
        i = tl.load(pos + j + 1, mask=j < n - 1, other=0)
        v = tl.load(m + j + 1, mask=j < n - 1, other=0.0)
        tl.debug_barrier()
        tl.store(pos + j, i, mask=j < n - 1)
        tl.store(m + j, v, mask=j < n - 1)
        tl.debug_barrier()
    return n - 1


@triton.jit
def mark(keys, n, cut, member, history, BLOCK: tl.constexpr):
    """Mark the set of a shadow step; give how many it has, and how many of them the set before had."""
    now, both = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        here = j < n
        stays = here & (tl.load(keys + j, mask=here, other=0) > cut)
        # The newest position is marked as a member, but was none.
        before = tl.load(member + j, mask=here & (j < n - 1), other=0)
        tl.debug_barrier()
        now += stays.to(tl.int32)
        both += (stays & (before != 0)).to(tl.int32)
        tl.store(member + j, stays.to(tl.uint8), mask=here)
        tl.store(history + j, stays.to(tl.uint8), mask=here)
    tl.debug_barrier()
    return tl.sum(now, axis=0), tl.sum(both, axis=0)
