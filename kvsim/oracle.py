"""The offline optimum: the most kept mass that any policy could have had, and how far a result is from it.

>>> import kvsim
>>> trace = kvsim.open_trace("traces/samples/smollm2-long-64")  # doctest: +SKIP
>>> kvsim.oracle.gap(kvsim.replay(trace, "ema:0.9"), trace)  # doctest: +SKIP
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.mass import group_rows
from kvsim.oracles import exact, prices
from kvsim.oracles.problem import Problem, pool, problems
from kvsim.plan import FloatArray, Groups

if TYPE_CHECKING:
    from kvsim.result import Result

__all__ = [
    "LARGEST_POOL",
    "METHODS",
    "Optimum",
    "OverTime",
    "comparable",
    "gap",
    "gap_over_time",
    "incomparable",
    "optimum",
    "share_missed",
    "steps_of",
]

Method = Literal["future", "exact", "bound"]
METHODS: tuple[Method, ...] = ("future", "exact", "bound")

REMEMBERED = 16
"""Optima that are kept for the next call, which a replay after a check of its policies makes."""


ROUNDING = 1e-12
"""A gap below it is what sums in another order differ by."""

LARGEST_POOL = 2**31
"""Most bytes of the gains of all groups together, which a pooled budget needs at once."""


@dataclass(frozen=True)
class Optimum:
    """A schedule made with knowledge of the future, and a bound on every one.

    Attributes
    ----------
    last : array of int
        [G, L0+T]: the last step after which a position is kept, 0 for a prompt position that step 1 alone sees; a
        generated position that is never kept has the step before its own.
    kept_mass : float
        Its kept mass, averaged over steps and groups: the metric of that name.
    bound : float
        No schedule within the budgets has a higher kept mass.
    """

    last: npt.NDArray[np.int64]
    kept_mass: float
    bound: float

    @property
    def gap(self) -> float:
        """Share of the bound that the schedule may be short of the optimum, 0 if there is nothing to keep."""
        return share_missed(self.kept_mass, self.bound)


@dataclass(frozen=True)
class OverTime:
    """Kept mass of each step, averaged over groups.

    Attributes
    ----------
    policy : array
        [T] the policy's.
    optimum : array
        [T] that of the optimum's feasible schedule. It has the larger sum, not the larger mass at every step.
    """

    policy: FloatArray
    optimum: FloatArray


def optimum(
    trace: Trace,
    groups: Groups,
    budgets: npt.ArrayLike,
    method: Method = "bound",
    *,
    pooled: bool = False,
    most: int | None = None,
    progress: Progress | None = None,
) -> Optimum:
    """Work out what to keep of a recording when all of it is known.

    Parameters
    ----------
    trace : Trace
        The recording.
    groups : Groups
        The retention groups.
    budgets : array_like of int
        [G] tokens kept after every step from step 1 on, or one number for all groups.
    method : {"future", "exact", "bound"}
        See `kvsim.policies.oracle.Oracle`.
    pooled : bool
        Let all groups share the sum of the budgets, divided anew at every step: no policy that allots budgets to groups
        (AdaKV, PyramidKV) can then keep more.
    most : int, optional
        Most variables that the linear program of an exact optimum may have.
    progress : callable, optional
        Called with (groups done, groups in all).

    Returns
    -------
    Optimum

    Raises
    ------
    kvsim.oracles.exact.TooLargeError
        If a linear program would have more variables.
    KvsimError
        If the method is unknown, a budget is below 1 or no whole number, there are not as many as groups, the recording
        has no single heads and ``group=head`` needs them, or pooled budgets would take too much memory.
    """
    if method not in METHODS:
        raise unknown_name("method of 'oracle'", method, METHODS)
    given = np.asarray(budgets)
    if given.dtype.kind not in "iu" or given.shape not in ((), (groups.count,)):
        raise KvsimError(f"budgets must be a whole number of tokens, or {groups.count} of them, got {budgets!r}")
    per_group = np.broadcast_to(given.astype(np.int64), (groups.count,))
    if (per_group < 1).any():
        raise KvsimError(f"budgets must be at least 1 token, got {per_group.min()}")
    if groups.kind == "head" and trace.capture == "scores":
        raise KvsimError(f"{trace.path}: group=head needs attention of single heads; this is a 'scores' capture")
    pooled = pooled and groups.count > 1
    size = groups.count * trace.num_positions * trace.num_steps * 8
    if pooled and size > LARGEST_POOL:
        raise KvsimError(
            f"{trace.path}: one budget for {groups.count} groups together takes {size / 2**30:.1f} GiB, more than "
            f"{LARGEST_POOL / 2**30:g}; compare with budgets that are not pooled"
        )
    key = (trace.hash, groups, per_group.tobytes(), method, pooled)
    with _lock:
        found = _known.get(key)
    if found is None:
        found = _solve(trace, groups, per_group, method, pooled, most, progress)
        with _lock:
            _known[key] = found
            while len(_known) > REMEMBERED:
                _known.popitem(last=False)
    return found


def comparable(result: "Result") -> bool:
    """Whether a result plays by the optimum's rules.

    It evicts for good, every group keeps its own budget after every step, and queries read all that is visible.
    """
    return not incomparable(result)


def incomparable(result: "Result") -> str:
    """Say why a result does not play by the optimum's rules; an empty string where it does."""
    if result.mode == "shadow":
        return "a shadow result evicts nothing; its sets can return, the optimum's cannot"
    if not result.plan.evicts[1:].all():
        return "when=prefill lets the cache grow; the optimum keeps its budget"
    if result.plan.targets is not None:
        return "a trigger pooled over all heads lets one of them exceed its budget; the optimum keeps each"
    if result.plan.selection is not None:
        return "its kept mass is that of what select= reads; the optimum reads all that it keeps"
    return ""


def gap(result: "Result", trace: Trace, method: Literal["exact", "bound"] = "bound", *, pooled: bool = False) -> float:
    """Give ``1 - kept mass / kept mass of the offline optimum``, with the result's own groups and budgets.

    Parameters
    ----------
    result : Result
        An irreversible replay.
    trace : Trace
        The recording that it is a replay of.
    method : {"exact", "bound"}
        Compare with the exact optimum, or with the certified upper bound on it: then the gap is never too small.
    pooled : bool
        Compare with an optimum that divides the sum of the budgets among the groups as it likes.

    Returns
    -------
    float
        0 where there is no mass to keep.

    Raises
    ------
    KvsimError
        If the result is of another recording or of the shadow mode, or does not play by the optimum's rules.
    """
    best = _rival(result, trace, method, pooled)
    kept = result.outcome.metrics["kept_mass"]
    return share_missed(float(kept.mean()), best.kept_mass if method == "exact" else best.bound)


def gap_over_time(
    result: "Result", trace: Trace, method: Literal["exact", "bound"] = "bound", *, pooled: bool = False
) -> OverTime:
    """Give the kept mass of a result and of the optimum's feasible schedule at each step.

    Parameters and errors are those of `gap`. With ``method="bound"`` the schedule may be short of the optimum by
    `Optimum.gap`.
    """
    best = _rival(result, trace, method, pooled)
    return OverTime(result.outcome.metrics["kept_mass"].copy(), steps_of(best, trace, result.plan.groups))


def steps_of(best: Optimum, trace: Trace, groups: Groups) -> FloatArray:
    """Give the kept mass of an optimum's feasible schedule at each step, averaged over its groups, [T]."""
    found = np.empty(trace.num_steps)
    for t in range(1, trace.num_steps + 1):
        rows = group_rows(trace, groups, t)
        seen = best.last[:, : rows.shape[1]] >= t - 1
        seen[:, -1] = True
        found[t - 1] = rows[seen].sum() / len(rows)
    return found


def share_missed(kept: float, best: float) -> float:
    """Give ``1 - kept / best``, 0 where there is no mass to keep or the difference is one of rounding."""
    missed = 1 - kept / best if best > 0 else 0.0
    return 0.0 if abs(missed) < ROUNDING else missed


def _rival(result: "Result", trace: Trace, method: Literal["exact", "bound"], pooled: bool) -> Optimum:
    if method not in ("exact", "bound"):
        raise unknown_name("method of an oracle gap", method, ("exact", "bound"))
    if result.trace_hash != trace.hash:
        raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
    if why := incomparable(result):
        raise KvsimError(f"{result.policy}: {why}")
    return optimum(trace, result.plan.groups, result.plan.budgets, method, pooled=pooled)


def _solve(
    trace: Trace,
    groups: Groups,
    budgets: npt.NDArray[np.int64],
    method: Method,
    pooled: bool,
    most: int | None,
    progress: Progress | None,
) -> Optimum:
    last, values, bounds = [], [], []
    parts = problems(trace, groups, budgets)
    for problem in [pool(list(parts))] if pooled else parts:
        priced = exact.solve(problem, most) if method == "exact" else prices.price(problem)
        schedule = prices.greedy(problem) if method == "future" else priced.last
        last.append(_to_the_end(schedule, problem, trace.num_steps))
        values.append(problem.value(schedule))
        bounds.append(max(priced.bound, values[-1] * (1 + prices.SLACK)))
        if progress is not None:
            progress(len(last), 1 if pooled else groups.count)
    share = 1 / (trace.num_steps * groups.count)
    return Optimum(np.concatenate(last).reshape(groups.count, -1), sum(values) * share, sum(bounds) * share)


def _to_the_end(last: npt.NDArray[np.int64], problem: Problem, steps: int) -> npt.NDArray[np.int64]:
    """Keep what the last query sees: after the last step there is nothing to choose by."""
    return np.where((last == problem.num_sets) & (problem.born <= last), steps, last)


_known: "OrderedDict[tuple[object, ...], Optimum]" = OrderedDict()
_lock = threading.Lock()
