"""Policies beside the offline optimum of their own groups and budgets: exact where that is quick, else a bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.oracle import Optimum, incomparable, optimum, share_missed, steps_of
from kvsim.oracles.exact import TooLargeError
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["CHOICES", "QUICK", "Beside", "Choice", "beside_optimum"]

Choice = Literal["exact", "bound", "auto"]
CHOICES: tuple[Choice, ...] = ("exact", "bound", "auto")

QUICK = 20_000
"""Most variables of a group's linear program that ``auto`` solves, which takes about half a second."""


@dataclass(frozen=True)
class Beside:
    """A policy beside the offline optimum of its own groups and budgets.

    Attributes
    ----------
    policy, trace, trace_hash : str
        Canonical policy with its budget, and the recording.
    group : {"shared", "layer", "head"}
        Its retention groups.
    budget : float
        Tokens kept in a group, averaged over groups.
    kept_mass : float
        The policy's, averaged over steps.
    method : {"exact", "bound"} or None
        Whether `best` is the optimum, or a certified upper bound on it; None where a policy cannot be compared.
    best, gap : float or None
        The most that can be kept, and ``1 - kept_mass / best``, which is never too small.
    why_not : str
        Why it cannot be compared; empty where it can.
    kept_mass_steps, optimum_steps : array or None
        [T] kept mass at each step, of the policy and, where asked for, of a feasible schedule: the optimal one, or one
        close to it.
    """

    policy: str
    trace: str
    trace_hash: str
    group: str
    budget: float
    kept_mass: float
    method: Literal["exact", "bound"] | None
    best: float | None
    gap: float | None
    why_not: str
    kept_mass_steps: FloatArray = field(repr=False, compare=False)
    optimum_steps: FloatArray | None = field(repr=False, compare=False)

    @property
    def reference(self) -> str:
        """The oracle that keeps what `optimum_steps` says: a policy string without its budget."""
        return f"oracle:{self.method}/group={self.group}"

    def step_rows(self) -> list[dict[str, Any]]:
        """Give one row a step, as `kvsim.charts.oracle_gap` draws them; none where it cannot be compared."""
        if self.optimum_steps is None:
            return []
        names: dict[str, Any] = {"trace": self.trace, "trace_hash": self.trace_hash, "policy": self.policy}
        names |= {"reference": self.reference, "budget": self.budget}
        pairs = enumerate(zip(self.kept_mass_steps.tolist(), self.optimum_steps.tolist(), strict=True), start=1)
        return [{**names, "step": step, "kept_mass": kept, "optimum": best} for step, (kept, best) in pairs]


def beside_optimum(
    results: Sequence[Result],
    trace: Trace,
    method: Choice = "auto",
    *,
    pooled: bool = False,
    steps: bool = True,
    progress: Progress | None = None,
) -> list[Beside]:
    """Put each policy beside the optimum of its own groups and budgets; equal ones are worked out once.

    Parameters
    ----------
    results : sequence of Result
        Replays of the recording. One that does not play by the optimum's rules has no gap, and `Beside.why_not` says
        so.
    trace : Trace
        The recording.
    method : {"exact", "bound", "auto"}
        The exact optimum, the certified upper bound, or the exact one where it is a linear program of at most `QUICK`
        variables in each group, and the bound elsewhere.
    pooled : bool
        Let all groups share the sum of the budgets, as for `kvsim.oracle.optimum`.
    steps : bool
        Work out `Beside.optimum_steps`, which takes one more pass over the rows.
    progress : callable, optional
        Called with (groups done, groups in all); an optimum's steps count as one more group.

    Returns
    -------
    list of Beside
        In the order of `results`.

    Raises
    ------
    KvsimError
        If the method is unknown, a result is of another recording, or as for `kvsim.oracle.optimum`.
    """
    if method not in CHOICES:
        raise unknown_name("method", method, CHOICES)
    kinds: dict[Any, Result] = {}
    for result in results:
        if result.trace_hash != trace.hash:
            raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
        if not incomparable(result):
            kinds.setdefault(_kind(result), result)
    total, done = sum(1 + one.plan.groups.count for one in kinds.values()), 0
    found: dict[Any, tuple[Literal["exact", "bound"], Optimum, FloatArray | None]] = {}
    for kind, one in kinds.items():
        groups, offset = one.plan.groups, done

        def advance(ready: int, _: int, offset: int = offset) -> None:
            if progress is not None:
                progress(offset + ready, total)

        used, best = _best(trace, one, method, pooled, advance)
        found[kind] = used, best, steps_of(best, trace, groups) if steps else None
        done += 1 + groups.count
        advance(done - offset, 0)
    return [_beside(result, found.get(_kind(result))) for result in results]


def _best(
    trace: Trace, result: Result, method: Choice, pooled: bool, advance: Callable[[int, int], None]
) -> tuple[Literal["exact", "bound"], Optimum]:
    plan = result.plan
    if method != "bound":
        most = QUICK if method == "auto" else None
        try:
            exact = optimum(trace, plan.groups, plan.budgets, "exact", pooled=pooled, most=most, progress=advance)
        except TooLargeError:
            if method == "exact":
                raise
        else:
            return "exact", exact
    return "bound", optimum(trace, plan.groups, plan.budgets, "bound", pooled=pooled, progress=advance)


def _kind(result: Result) -> Any:
    return result.plan.groups, result.plan.budgets.tobytes()


def _beside(result: Result, found: tuple[Literal["exact", "bound"], Optimum, FloatArray | None] | None) -> Beside:
    why = incomparable(result)
    own = result.outcome.metrics["kept_mass"]
    kept = float(own.mean())
    known: dict[str, Any] = dict.fromkeys(("method", "best", "gap", "optimum_steps"))
    if not why:
        assert found is not None
        method, best, optimum_steps = found
        most = best.kept_mass if method == "exact" else best.bound
        known = {"method": method, "best": most, "gap": share_missed(kept, most), "optimum_steps": optimum_steps}
    return Beside(
        policy=result.policy,
        trace=result.trace_name,
        trace_hash=result.trace_hash,
        group=result.plan.groups.kind,
        budget=float(result.budget),
        kept_mass=kept,
        why_not=why,
        kept_mass_steps=own.copy(),
        **known,
    )
