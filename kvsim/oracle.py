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

from kvsim.errors import KvsimError, unknown_name
from kvsim.oracles import exact, prices
from kvsim.oracles.problem import Problem, problems
from kvsim.plan import Groups

if TYPE_CHECKING:
    from kvsim.result import Result

__all__ = ["METHODS", "Optimum", "gap", "optimum"]

Method = Literal["future", "exact", "bound"]
METHODS: tuple[Method, ...] = ("future", "exact", "bound")

REMEMBERED = 16
"""Optima that are kept for the next call, which a replay after a check of its policies makes."""


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
        return _gap(self.kept_mass, self.bound)


def optimum(trace: Trace, groups: Groups, budgets: npt.ArrayLike, method: Method = "bound") -> Optimum:
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

    Returns
    -------
    Optimum

    Raises
    ------
    KvsimError
        If the method is unknown, a budget is below 1, the recording has no single heads and ``group=head`` needs them,
        or its exact optimum would take too large a linear program.
    """
    if method not in METHODS:
        raise unknown_name("method of 'oracle'", method, METHODS)
    per_group = np.broadcast_to(np.asarray(budgets, dtype=np.int64), (groups.count,))
    if (per_group < 1).any():
        raise KvsimError(f"budgets must be at least 1 token, got {per_group.min()}")
    if groups.kind == "head" and trace.capture == "scores":
        raise KvsimError(f"{trace.path}: group=head needs attention of single heads; this is a 'scores' capture")
    key = (trace.hash, groups, per_group.tobytes(), method)
    with _lock:
        found = _known.get(key)
    if found is None:
        found = _solve(trace, groups, per_group, method)
        with _lock:
            _known[key] = found
            while len(_known) > REMEMBERED:
                _known.popitem(last=False)
    return found


def gap(result: "Result", trace: Trace, method: Literal["exact", "bound"] = "bound") -> float:
    """Give ``1 - kept mass / kept mass of the offline optimum``, with the result's own groups and budgets.

    Parameters
    ----------
    result : Result
        An irreversible replay.
    trace : Trace
        The recording that it is a replay of.
    method : {"exact", "bound"}
        Compare with the exact optimum, or with the certified upper bound on it: then the gap is never too small.

    Returns
    -------
    float
        0 where there is no mass to keep.

    Raises
    ------
    KvsimError
        If the result is of another recording or of the shadow mode, or its cache is let grow beyond the budget.
    """
    if method not in ("exact", "bound"):
        raise unknown_name("method of an oracle gap", method, ("exact", "bound"))
    if result.trace_hash != trace.hash:
        raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
    if result.mode == "shadow":
        raise KvsimError(f"{result.policy}: a shadow result evicts nothing; its sets can return, the optimum's cannot")
    if not result.plan.evicts[1:].all():
        raise KvsimError(f"{result.policy}: when=prefill lets the cache grow; the optimum keeps its budget")
    best = optimum(trace, result.plan.groups, result.plan.budgets, method)
    kept = result.outcome.metrics["kept_mass"]
    return _gap(float(kept.mean()), best.kept_mass if method == "exact" else best.bound)


def _solve(trace: Trace, groups: Groups, budgets: npt.NDArray[np.int64], method: Method) -> Optimum:
    last, values, bounds = [], [], []
    for problem in problems(trace, groups, budgets):
        priced = exact.solve(problem) if method == "exact" else prices.price(problem)
        schedule = prices.greedy(problem) if method == "future" else priced.last
        last.append(_to_the_end(schedule, problem, trace.num_steps))
        values.append(problem.value(schedule))
        bounds.append(max(priced.bound, values[-1] * (1 + prices.SLACK)))
    share = 1 / (trace.num_steps * groups.count)
    return Optimum(np.stack(last), sum(values) * share, sum(bounds) * share)


def _to_the_end(last: npt.NDArray[np.int64], problem: Problem, steps: int) -> npt.NDArray[np.int64]:
    """Keep what the last query sees: after the last step there is nothing to choose by."""
    return np.where((last == problem.num_sets) & (problem.born <= last), steps, last)


def _gap(kept: float, best: float) -> float:
    return 1 - kept / best if best > 0 else 0.0


_known: "OrderedDict[tuple[object, ...], Optimum]" = OrderedDict()
_lock = threading.Lock()
