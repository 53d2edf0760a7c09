"""Redundancy of the visible keys, kept up to date as positions come and go; see `kvsim.plan.Redundancy`.

For every (layer, KV head) of a group, `sums[c, i]` is the sum over the other visible keys of their cosine with key i,
without the pairs that are spared; `last[c, i]` is the most recent key similar to key i, -1 if there is none, and
`spared[c, i]` its cosine. Arrays are indexed by position.
"""

import numba
import numpy as np

__all__ = ["forget", "include", "recompute", "redundancy"]


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _cosine(units, i, j):
    total = 0.0
    for d in range(units.shape[1]):
        total += units[i, d] * units[j, d]
    return total


@numba.njit(cache=True, nogil=True)
def include(units, threshold, pos, n, p, sums, last, spared):
    """Add position p, later than all of pos[:n], for every (layer, KV head) of `units` [C, L, d]."""
    for c in range(units.shape[0]):
        own, recent, close = 0.0, -1, 0.0
        for k in range(n):
            i = pos[k]
            s = _cosine(units[c], i, p)
            sums[c, i] += s
            if s > threshold:
                if last[c, i] >= 0:
                    sums[c, last[c, i]] += spared[c, i]
                last[c, i] = p
                spared[c, i] = s
                recent, close = i, s
            else:
                own += s
        if recent >= 0:
            sums[c, recent] -= close
        sums[c, p], last[c, p], spared[c, p] = own, recent, close


@numba.njit(cache=True, nogil=True)
def _remove(units, threshold, pos, n, x, sums, last, spared):
    """Take out position x, which is not among pos[:n] any more."""
    for c in range(units.shape[0]):
        for k in range(n):
            i = pos[k]
            if last[c, x] != i:
                sums[c, i] -= _cosine(units[c], i, x)
            if last[c, i] != x:
                continue
            # Keys after x are not similar to key i, or one of them would be its most recent.
            last[c, i] = -1
            for back in range(n - 1, -1, -1):
                j = pos[back]
                if j > x or j == i:
                    continue
                s = _cosine(units[c], i, j)
                if s > threshold:
                    last[c, i] = j
                    spared[c, i] = s
                    sums[c, j] -= s
                    break


@numba.njit(cache=True, nogil=True)
def recompute(units, threshold, pos, n, sums, last, spared):
    """Start anew from pos[:n]."""
    for k in range(n):
        include(units, threshold, pos, k, pos[k], sums, last, spared)


@numba.njit(cache=True, nogil=True)
def forget(units, threshold, pos, n, lost, sums, last, spared):
    """Take out positions that are not among pos[:n] any more, one by one or, if they are many, by starting anew."""
    if 2 * lost.size > n:
        recompute(units, threshold, pos, n, sums, last, spared)
    else:
        for k in range(lost.size):
            _remove(units, threshold, pos, n, lost[k], sums, last, spared)


@numba.njit(cache=True, nogil=True)
def redundancy(sums, pos, n, out):
    """Set out[:n] to the softmax of the mean cosines over pos[:n], averaged over (layer, KV head)."""
    out[:n] = 0
    for c in range(sums.shape[0]):
        highest = -np.inf
        for k in range(n):
            highest = max(highest, sums[c, pos[k]] / n)
        total = 0.0
        for k in range(n):
            total += np.exp(sums[c, pos[k]] / n - highest)
        for k in range(n):
            out[k] += np.exp(sums[c, pos[k]] / n - highest) / total / sums.shape[0]
