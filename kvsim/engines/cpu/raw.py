"""Raw top-B sets: what the full cache's current scores would keep, and how a retained set compares."""

import numba
import numpy as np

from kvsim.engines.cpu.half import load
from kvsim.engines.cpu.select import kth_smallest

__all__ = ["compare", "raw_sets"]


@numba.njit(cache=True, nogil=True, fastmath={"reassoc"})
def _total(data, start, count):
    total = 0.0
    for e in range(count):
        total += load(data, start + e)
    return total


@numba.njit(cache=True, nogil=True)
def raw_sets(data, bases, stride, scale, span, budget, prompt, sets):
    """Write the bitmap of each step's `budget` highest mean scores into `sets`, [T, ceil(L / 8)] uint8."""
    steps = bases.size
    keys, scratch = np.empty(prompt + steps, np.float32), np.empty(prompt + steps, np.float32)
    for t in range(steps):
        n = prompt + t + 1
        for i in range(n):
            keys[i] = np.float32(_total(data, bases[t] + i * stride, span) * scale / span)
            scratch[i] = keys[i]
        excess = n - budget
        cut, quota = np.float32(-np.inf), 0
        if excess > 0:
            cut = kth_smallest(scratch[:n], excess - 1)
            quota = excess
            for i in range(n):
                quota -= keys[i] < cut
        for i in range(n):
            if keys[i] < cut:
                continue
            if keys[i] == cut and quota > 0:
                quota -= 1
                continue
            sets[t, i >> 3] |= np.uint8(1 << (i & 7))


@numba.njit(cache=True, nogil=True)
def compare(sets, evicted_at, history, prompt, agreement, missed, wronged):
    """Compare raw sets with retained ones, step by step: those of `evicted_at` [L], or of `history` [T, L] if any."""
    shadow = history.size > 0
    for t in range(sets.shape[0]):
        both, raw, kept = 0, 0, 0
        for i in range(prompt + t + 1):
            in_raw = (sets[t, i >> 3] >> (i & 7)) & 1
            in_kept = history[t, i] if shadow else evicted_at[i] < 0 or evicted_at[i] > t + 1
            raw += in_raw
            kept += in_kept
            both += in_raw and in_kept
        agreement[t] = both / (raw + kept - both)
        missed[t] = 1.0 - both / raw
        # The last position looked at is the step's own.
        wronged[t] = in_raw and not in_kept
