"""Random eviction as a yardstick: which policies keep less of the attention than a draw would."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from kvsim_traces import Trace

from kvsim.budget import Budget
from kvsim.engines import DEFAULT_ENGINE
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.policies.random import Random
from kvsim.policy import Policy, parse
from kvsim.replay import replay_many
from kvsim.result import Result

__all__ = ["SEEDS", "Floor", "random_floor"]

SEEDS = 20

ROUNDING = 1e-12
"""Relative difference of two kept masses that sums in another order may have."""


@dataclass(frozen=True)
class Floor:
    """A policy's kept mass beside that of random eviction with equal groups and budget.

    Attributes
    ----------
    policy, trace, trace_hash : str
        Canonical policy with its budget, and the recording.
    group : {"shared", "layer", "head"}
        Retention groups of both.
    budget : float
        Tokens kept in a group, averaged over groups; random keeps as many in each.
    seeds : int
        Number of draws.
    kept_mass : float
        The policy's, averaged over steps.
    random_mean, random_min, random_max : float
        Of the draws' kept masses.
    percentile : float
        Share of the draws that keep less, counting those that keep as much as half, in [0, 1].
    """

    policy: str
    trace: str
    trace_hash: str
    group: str
    budget: float
    seeds: int
    kept_mass: float
    random_mean: float
    random_min: float
    random_max: float
    percentile: float

    @property
    def below(self) -> bool:
        """Whether the policy keeps less than the mean of the draws."""
        return _less(self.kept_mass, self.random_mean)

    @property
    def below_all(self) -> bool:
        """Whether the policy keeps less than every draw."""
        return _less(self.kept_mass, self.random_min)

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        return {**asdict(self), "below_random": self.below, "below_every_seed": self.below_all}


def random_floor(
    results: Sequence[Result],
    trace: Trace,
    *,
    seeds: int = SEEDS,
    engine: str = DEFAULT_ENGINE,
    progress: Progress | None = None,
) -> list[Floor]:
    """Replay random eviction beside policies: equal groups, budget, mode, moments of eviction, admission, selection.

    Random is no floor: a policy that ranks by the wrong thing falls below it. A draw is fixed for each position and the
    same in all groups (`random:SEED`, seeds from 0); groups of unequal budgets are compared with their mean, which
    leaves the total equal.

    Parameters
    ----------
    results : sequence of Result
        Replays of the policies.
    trace : Trace
        The recording that they are replays of.
    seeds : int
        Number of draws, at least 1.
    engine : str
        Engine of the draws' replays.
    progress : callable, optional
        Called with (replays done, replays in all).

    Returns
    -------
    list of Floor
        In the order of `results`.

    Raises
    ------
    KvsimError
        If `seeds` is below 1 or a result is of another recording.
    """
    if seeds < 1:
        raise KvsimError(f"seeds must be at least 1, got {seeds}")
    drawn: dict[tuple[Policy, str], list[float]] = {}
    rivals = []
    for result in results:
        if result.trace_hash != trace.hash:
            raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
        budget = Budget(tokens=int(result.plan.budgets.sum()) // result.plan.groups.count)
        own = parse(result.policy).expand()
        rival = Policy(Random(), group=result.plan.groups.kind, budget=budget, when=own.when)
        rivals.append((replace(rival, admit=own.admit, select=own.select), result.mode))
    wanted = list(dict.fromkeys(rivals))
    for done, (policy, mode) in enumerate(wanted):
        draws = [replace(policy, head=Random(s)) for s in range(seeds)]
        shadow = mode == "shadow"
        played = replay_many(trace, draws, shadow=shadow, shadow_churn=False, raw=False, engine=engine)
        drawn[policy, mode] = [_kept(one) for one in played]
        if progress is not None:
            progress((done + 1) * seeds, len(wanted) * seeds)
    return [_beside(result, drawn[rival]) for result, rival in zip(results, rivals, strict=True)]


def _beside(result: Result, draws: list[float]) -> Floor:
    kept = _kept(result)
    lower = sum(_less(one, kept) for one in draws)
    higher = sum(_less(kept, one) for one in draws)
    return Floor(
        policy=result.policy,
        trace=result.trace_name,
        trace_hash=result.trace_hash,
        group=result.plan.groups.kind,
        budget=float(result.budget),
        seeds=len(draws),
        kept_mass=kept,
        random_mean=float(np.mean(draws)),
        random_min=min(draws),
        random_max=max(draws),
        percentile=(lower + (len(draws) - lower - higher) / 2) / len(draws),
    )


def _kept(result: Result) -> float:
    return float(result.outcome.metrics["kept_mass"].mean())


def _less(a: float, b: float) -> bool:
    return a < b - ROUNDING * abs(b)
