"""Which positions a result holds after a step, and which of them the next query sees, group by group."""

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["held", "held_counts", "seen"]

BoolArray = npt.NDArray[np.bool_]


def held(result: Result, step: int) -> BoolArray:
    """Mark the retained sets R_t of all groups after a step.

    Parameters
    ----------
    result : Result
        Of either mode; before the first step of the shadow mode everything is held.
    step : int
        0 (before the first step) to T.

    Returns
    -------
    array of bool
        [G, L0+T].
    """
    end, retained = result.prompt_length + step, result.outcome.retained
    marks: BoolArray
    if retained is not None:
        marks = retained[step - 1].copy() if step else np.ones(retained[0].shape, dtype=np.bool_)
    else:
        marks = (result.evicted_at < 0) | (result.evicted_at > step)
    marks[:, end:] = False
    return marks


def seen(result: Result, step: int) -> BoolArray:
    """Mark the visible sets ``V_t = R_(t-1) U {p_t}`` of all groups at a step from 1 to T, [G, L0+T]."""
    marks = held(result, step - 1)
    marks[:, result.prompt_length + step - 1] = True
    return marks


def held_counts(result: Result) -> FloatArray:
    """Count the positions that each group retains after each step, [T, G]."""
    steps, prompt = result.num_steps, result.prompt_length
    if result.outcome.retained is not None:
        sizes: FloatArray = result.outcome.retained.sum(axis=2).astype(np.float64)
        return sizes
    counts = np.empty((steps, result.plan.groups.count))
    for column, gone in zip(counts.T, result.evicted_at, strict=True):
        left = np.cumsum(np.bincount(gone[gone >= 0], minlength=steps + 1))
        column[:] = prompt + np.arange(1, steps + 1) - left[1:]
    return counts
