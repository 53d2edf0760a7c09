"""Sets that any eviction of a run's size would give: what a replay must beat to have said something."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvsim.correlation import jaccard
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["at_random", "null_sets", "oldest_first", "overlap", "sets_of"]

BoolArray = npt.NDArray[np.bool_]
Positions = npt.NDArray[np.intp]
Drop = Callable[[Positions, int], Positions]
"""Chooses so many of the positions held."""


def sets_of(result: Result) -> BoolArray:
    """Give the retained sets R_0 to R_T of an irreversible result, [T + 1, G, L0 + T]."""
    steps = np.arange(result.num_steps + 1)[:, None, None]
    there = np.arange(result.evicted_at.shape[1]) < result.prompt_length + steps
    gone = (result.evicted_at >= 0) & (result.evicted_at <= steps)
    sets: BoolArray = there & ~gone
    return sets


def overlap(own: BoolArray, theirs: BoolArray) -> FloatArray:
    """Average over groups the Jaccard index of two histories of sets after steps 1 to T, [T]."""
    means: FloatArray = jaccard(own[1:], theirs[1:]).mean(axis=-1)
    return means


def null_sets(run: Result, drop: Drop) -> BoolArray:
    """Follow each group's sets up to its first eviction; then append each step's position, and drop as many as it does.

    Parameters
    ----------
    run : Result
        Irreversible.
    drop : callable
        `oldest_first` or `at_random`.

    Returns
    -------
    array of bool
        [T + 1, G, L0 + T], of the run's own sizes.
    """
    sets = sets_of(run)
    null = sets.copy()
    first = np.where(run.evicted_at < 0, run.num_steps, run.evicted_at).min(axis=1)
    for g, start in enumerate(first.tolist()):
        for t in range(start + 1, len(sets)):
            null[t, g] = null[t - 1, g]
            null[t, g, run.prompt_length + t - 1] = True
            held = np.flatnonzero(null[t, g])
            null[t, g, drop(held, held.size - int(sets[t, g].sum()))] = False
    return null


def oldest_first(held: Positions, count: int) -> Positions:
    """Drop the lowest positions: first in, first out."""
    return held[:count]


def at_random(seed: int) -> Drop:
    """Drop any positions, each as likely."""
    rng = np.random.default_rng(seed)
    return lambda held, count: rng.choice(held, count, replace=False)
