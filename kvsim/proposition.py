"""Proposition 1 of InertiaKV (section 5.3, Appendix A), with the form it has after finitely many updates.

Scores x_1, x_2, … of a token are independent over time with mean u and variance v; its state starts at 0 and takes
``mu_t = A mu_(t-1) + (1 - A) x_t``. Then mu_t has mean ``mean_factor * u`` and variance ``variance_factor * v``, and by
Chebyshev two independent tokens whose means differ by delta > 0 are in the wrong order with a probability of at most
``finite_factor * (v_i + v_j) / delta^2``. A = 1 stands for the running mean of the scores, the ranking of `cumulative`.
"""

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray

__all__ = ["ema_states", "ema_update", "finite_factor", "limit_factor", "mean_factor", "variance_factor"]


def ema_states(scores: npt.ArrayLike, decay: float, scored: npt.ArrayLike | None = None) -> FloatArray:
    """Run the recurrence from 0; with a decay of 1, give the running mean.

    Parameters
    ----------
    scores : array_like
        [T, …] scores of each step.
    decay : float
        A, the factor on the state of the step before, in [0, 1].
    scored : array_like of bool, optional
        [T]; the other steps leave the state as it is. All by default.

    Returns
    -------
    array
        [T, …] states after each step.
    """
    x = np.asarray(scores, dtype=np.float64)
    updates = np.ones(len(x), dtype=np.bool_) if scored is None else np.asarray(scored, dtype=np.bool_)
    states = np.zeros_like(x)
    state, count = np.zeros(x.shape[1:]), 0
    for t, update in enumerate(updates):
        if update:
            count += 1
            state = ema_update(state, x[t], decay, count)
        states[t] = state
    return states


def ema_update(state: FloatArray, scores: FloatArray, decay: float, updates: int) -> FloatArray:
    """Take the `updates`-th update (from 1) of a state: ``A mu + (1 - A) x``, or the running mean if A = 1."""
    weight = 1 / updates if decay == 1 else 1 - decay
    return (1 - weight) * state + weight * scores


def mean_factor(decay: float, updates: npt.ArrayLike) -> FloatArray:
    """Give ``1 - A^t``, the share of the mean that the state has reached after `updates` of them (1 for A = 1)."""
    t = np.asarray(updates, dtype=np.float64)
    return np.ones_like(t) if decay == 1 else 1 - decay**t


def variance_factor(decay: float, updates: npt.ArrayLike) -> FloatArray:
    """Give ``(1 - A)(1 - A^(2t)) / (1 + A)``, the variance of the state over that of the scores (1/t for A = 1)."""
    t = np.asarray(updates, dtype=np.float64)
    return 1 / t if decay == 1 else (1 - decay) * (1 - decay ** (2 * t)) / (1 + decay)


def finite_factor(decay: float, updates: npt.ArrayLike) -> FloatArray:
    """Give ``(1 - A)(1 + A^t) / ((1 + A)(1 - A^t))``: the variance over the squared mean (1/t for A = 1)."""
    t = np.asarray(updates, dtype=np.float64)
    return 1 / t if decay == 1 else (1 - decay) * (1 + decay**t) / ((1 + decay) * (1 - decay**t))


def limit_factor(decay: float) -> float | None:
    """Give ``(1 - A) / (1 + A)``, the limit of `finite_factor`; None for A = 1, which has no stationary limit."""
    return None if decay == 1 else (1 - decay) / (1 + decay)
