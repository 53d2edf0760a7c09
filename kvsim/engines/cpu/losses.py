"""Kernels of the trade-off: smoothed scores, states of linear rules, and what the top-B of a state loses."""

import numba
import numpy as np
import numpy.typing as npt

from kvsim.engines.cpu.select import drop_lowest

__all__ = ["loss", "smooth", "top_sum", "weigh"]

Floats = npt.NDArray[np.float64]


@numba.njit(cache=True, nogil=True)
def smooth(ring: Floats, first: int, last: int, prompt: int, out: Floats) -> None:
    """Average the steps first..last (from 0) of `ring` over those at which a position is cached.

    Step t lies in ``ring[t % len(ring)]``, [R, L], zero where nothing is cached yet; `out` is [R, n].
    """
    size, rows = ring.shape[0], ring.shape[1]
    n = out.shape[1]
    for r in range(rows):
        for start in range(0, n, 512):
            stop = min(n, start + 512)
            for i in range(start, stop):
                out[r, i] = 0.0
            for t in range(first, last + 1):
                row = ring[t % size, r]
                for i in range(start, stop):
                    out[r, i] += row[i]
            for i in range(start, stop):
                out[r, i] /= last - max(first, i - prompt) + 1


@numba.njit(cache=True, nogil=True)
def weigh(weights: Floats, scores: Floats, out: Floats) -> None:
    """Sum scores [K, n] over layers, in their order, with each of the weights [W, K] into `out` [W, n]."""
    n = scores.shape[1]
    for start in range(0, n, 512):
        stop = min(n, start + 512)
        for w in range(weights.shape[0]):
            for i in range(start, stop):
                out[w, i] = 0.0
            for k in range(weights.shape[1]):
                weight = weights[w, k]
                if weight != 0.0:
                    for i in range(start, stop):
                        out[w, i] += weight * scores[k, i]


@numba.njit(cache=True, nogil=True)
def top_sum(state: Floats, worth: Floats, budget: int, n_sink: int, n_recent: int) -> float:
    """Sum `worth` over the top-B of a state, protected positions first."""
    n = worth.size
    pos = np.arange(n)
    keys, scratch = np.empty(n, np.float32), np.empty(n, np.float32)
    drop = np.empty(n, np.bool_)
    drop_lowest(state, pos, n, budget, n_sink, n_recent, keys, scratch, drop)
    total = 0.0
    for i in range(n):
        if not drop[i]:
            total += worth[i]
    return total


@numba.njit(cache=True, nogil=True)
def loss(state: Floats, worth: Floats, best: float, budget: int, n_sink: int, n_recent: int) -> float:
    """Give the share of `best` that the top-B of a state misses of `worth`; 0 where there is nothing to miss."""
    return 1.0 - top_sum(state, worth, budget, n_sink, n_recent) / best if best > 0.0 else 0.0
