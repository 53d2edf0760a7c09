"""What sets that were kept without eviction lose of the local utility, whatever rule chose them."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.plan import FloatArray, Plan
from kvsim.shadow import full_scores
from kvsim.tradeoff import Utility, true_utilities

__all__ = ["shadow_losses"]


def shadow_losses(
    trace: Trace,
    plans: Sequence[Plan],
    retained: Sequence[npt.NDArray[np.bool_]],
    *,
    h: int = 8,
    utility: Utility | None = None,
) -> FloatArray:
    """Give ``1 - sum of ubar over R_t / sum of ubar over its own top-B`` of shadow sets, averaged over groups.

    ubar is the layer mean of the local utility. For a linear rule the average over steps is the total of
    `kvsim.tradeoff.decompose`.

    Parameters
    ----------
    trace : Trace
        The recording.
    plans : sequence of Plan
        P plans with one source of scores and one kind of group; what is read of the others are budgets.
    retained : sequence of array of bool
        [T, G, L0+T] each plan's sets, from a shadow replay.
    h : int
        Half width of the moving average of the scores that stands for the local utility.
    utility : callable, optional
        True utilities, instead of moving averages.

    Returns
    -------
    array
        [P, T].

    Raises
    ------
    KvsimError
        If a utility has the wrong shape or is not finite.
    """
    from kvsim.engines.cpu.losses import top_sum

    groups = plans[0].groups
    worth_of = _smoothed(trace, plans[0], h) if utility is None else _true(trace, plans[0], utility)
    losses = np.zeros((len(plans), trace.num_steps))
    for t in range(trace.num_steps):
        n = trace.prompt_length + t + 1
        for g, worth in enumerate(worth_of(t)):
            best: dict[int, float] = {}
            for p, plan in enumerate(plans):
                budget = int(plan.budgets[g])
                if budget not in best:
                    best[budget] = top_sum(worth, worth, budget, 0, 0)
                if best[budget] > 0:
                    kept = worth[retained[p][t, g, :n]].sum()
                    # No set of B is worth more than the best; rounding may say so.
                    losses[p, t] += max(0.0, 1 - kept / best[budget]) / groups.count
    return losses


def _true(trace: Trace, plan: Plan, utility: Utility) -> Callable[[int], FloatArray]:
    """Give a function of the step (from 0) that gives ubar, [G, n]."""
    groups = plan.groups

    def worth(t: int) -> FloatArray:
        n = trace.prompt_length + t + 1
        u: FloatArray = true_utilities(utility, groups, t + 1, n).reshape(groups.count, groups.depth, n).mean(axis=1)
        return u

    return worth


def _smoothed(trace: Trace, plan: Plan, h: int) -> Callable[[int], FloatArray]:
    """Give the same from the scores; its steps must come in order."""
    from kvsim.engines.cpu.losses import smooth

    groups, steps = plan.groups, trace.num_steps
    reach = min(h, steps - 1)
    ring = np.zeros((min(2 * reach + 1, steps), groups.count, trace.num_positions))
    read = 0

    def worth(t: int) -> FloatArray:
        nonlocal read
        last = min(t + reach, steps - 1)
        while read <= last:
            scores = full_scores(trace, groups, plan.score, read + 1).mean(axis=1)
            ring[read % len(ring), :, : scores.shape[1]] = scores
            read += 1
        u = np.empty((groups.count, trace.prompt_length + t + 1))
        smooth(ring, max(0, t - reach), last, trace.prompt_length, u)
        return u

    return worth
