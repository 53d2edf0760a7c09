"""Rank stability: InertiaKV's Proposition 1 beside what recordings show, pair by pair near the boundary."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.pairs import Bound, Pair, Process, Series, Shuffled, mean_of, measure, median, shuffle, step_shares
from kvsim.plan import FloatArray
from kvsim.policy import Policy
from kvsim.replay import choose_budget
from kvsim.shadow import LinearPlan, bundles, check_boundary, layer_means, linear_plans

__all__ = ["DEFAULT_POLICIES", "Stability", "Tally", "rank_stability"]

DEFAULT_POLICIES = ("ema:0.8", "ema:0.95", "ema:0.8,over=step", "ema:0.95,over=step", "cumulative")
REACH = 9
"""How many ranks to either side of the boundary pairs are made of."""


@dataclass(frozen=True)
class Tally:
    """One bound over all pairs that have it.

    Attributes
    ----------
    pairs : int
        Pairs for which the bound is defined.
    vacuous : int
        Those for which it is 1 or more, and says nothing: a probability is at most 1.
    violated : int
        Those that are in the wrong order more often than the bound allows.
    shuffled : float or None
        How many are violated with the steps in random order; see `kvsim.pairs.Shuffled`.
    median : float or None
        Median of the bound, as it is (it may be above 1); None without pairs.
    """

    pairs: int
    vacuous: int
    violated: int
    shuffled: float | None
    median: float | None

    @property
    def violated_share(self) -> float | None:
        """Share of the pairs that are violated, vacuous ones (which cannot be) included."""
        return self.violated / self.pairs if self.pairs else None

    @property
    def violated_of_telling(self) -> float | None:
        """Share of the pairs that are violated among those for which the bound is below 1."""
        telling = self.pairs - self.vacuous
        return self.violated / telling if telling else None

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        shares = {"violated_share": self.violated_share, "violated_of_telling": self.violated_of_telling}
        return dict(vars(self)) | shares


@dataclass(frozen=True)
class Stability:
    """Proposition 1 for one policy on one trace.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    trace_name, trace_hash : str
        The recording.
    budget : float
        Tokens kept, averaged over groups.
    step_decay : float
        A, the weight of the previous scored step's state: A^K of the layer-sequential EMA.
    first_step : int
        First step of the last half, over which misranking is measured.
    pairs : tuple of Pair
        Every pair near the boundary of every group.
    shuffled : Shuffled or None
        The same measures with the steps in random order.
    misranked_steps, finite_steps : array or None
        [T] share of pairs in the wrong order at each step, and the mean of the finite-t bound, capped at 1; pairs of
        equal means are left out. None if all are.
    """

    policy: str
    trace_name: str
    trace_hash: str
    budget: float
    step_decay: float
    first_step: int
    pairs: tuple[Pair, ...] = field(repr=False)
    shuffled: Shuffled | None = None
    misranked_steps: FloatArray | None = field(default=None, repr=False, compare=False)
    finite_steps: FloatArray | None = field(default=None, repr=False, compare=False)

    def tally(self, bound: Bound) -> Tally:
        """Count the pairs for which a bound is vacuous or violated.

        Parameters
        ----------
        bound : {"asymptotic", "finite"}
            Which one.
        """
        values = [value for pair in self.pairs if (value := getattr(pair, bound)) is not None]
        return Tally(
            pairs=len(values),
            vacuous=sum(value >= 1 for value in values),
            violated=sum(pair.violated(bound) for pair in self.pairs),
            shuffled=None if self.shuffled is None else getattr(self.shuffled, bound),
            median=median(values),
        )

    @property
    def common_violated(self) -> int:
        """Pairs that violate even the asymptotic bound with the larger variance for both; see `Pair`."""
        pairs = ((pair.misranked, pair.asymptotic_common) for pair in self.pairs)
        return sum(share is not None and bound is not None and share > bound for share, bound in pairs)

    def summary(self) -> dict[str, Any]:
        """Give everything but the pairs and the steps, ready for JSON; None where there is nothing to tell."""
        told = [pair.misranked for pair in self.pairs if pair.misranked is not None]
        own = [value for pair in self.pairs for value in (pair.autocorrelation_above, pair.autocorrelation_below)]
        return {
            "policy": self.policy,
            "trace": self.trace_name,
            "trace_hash": self.trace_hash,
            "budget": self.budget,
            "step_decay": self.step_decay,
            "first_step": self.first_step,
            "pairs": len(self.pairs),
            "tied": len(self.pairs) - len(told),
            "misranked": mean_of(told),
            "misranked_median": median(told),
            "misranked_shuffled": None if self.shuffled is None else self.shuffled.misranked,
            "asymptotic": self.tally("asymptotic").summary(),
            "asymptotic_common_violated": self.common_violated,
            "finite": self.tally("finite").summary(),
            "autocorrelation": median([pair.autocorrelation for pair in self.pairs]),
            "autocorrelation_tokens": median(own),
            "correlation": median([pair.correlation for pair in self.pairs]),
            "variance_ratio": median([pair.variance_ratio for pair in self.pairs]),
            "variance_ratio_shuffled": None if self.shuffled is None else self.shuffled.variance_ratio,
        }


def rank_stability(
    trace: Trace | str | Path,
    policies: Sequence[Policy | str] = DEFAULT_POLICIES,
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    shuffles: int = 20,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Stability]:
    """Measure how often pairs near the boundary are in the wrong order, beside what Proposition 1 allows.

    Shadow mode, over prompt positions, one update a scored step with the rule's layer mean x and the A that acts per
    step (see `kvsim.shadow.layer_means`). Pairs have one member at ranks B-8 … B and one at B+1 … B+9 of the time mean
    of x over all steps, for each retention group; protection is ignored. A pair is in the wrong order at a step if the
    state of the member with the larger mean is the smaller one; `misranked` is their share in the last half.

    The bounds are ``f (v_i + v_j) / delta^2`` with the pair's own time means and (population) variances. For the
    asymptotic one f is ``(1 - A) / (1 + A)``; for the finite-t one it is ``(1 - A)(1 + A^t) / ((1 + A)(1 - A^t))``, t
    counting updates, averaged over the steps of the last half. The paper's ``2 sigma^2`` has one sigma^2 that bounds
    both variances; their sum takes its place here, the tightest that its proof gives. How many pairs violate even the
    bound with the larger variance for both is `Stability.common_violated`.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policies : sequence of Policy or str
        Linear rules: `single`, `cumulative`, `ema`, and presets that stand for them.
    compression_ratio, budget
        As for `kvsim.replay`; a policy's own budget beats them.
    shuffles : int
        How often the steps are put in random order, to see how many violations chance alone makes.
    seed : int
        Seed of the shuffles.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    list of Stability
        One for each policy, in order.

    Raises
    ------
    KvsimError
        If a policy is not a linear rule that starts at 0, the recording has a single step, or the budget leaves no
        prompt position out.

    Notes
    -----
    The steps are read twice, so that memory is that of the pairs' scores and of one step.
    `cumulative` has no stationary limit, nor has ``refresh=first`` more than one update: no asymptotic bound.
    The order is that of the same steps that the state averages. The closer a rule's memory comes to the length of the
    recording, the less it can be wrong, whatever the scores do; shuffled steps share this, so compare with them.
    """
    chosen = choose_budget(compression_ratio, budget)
    if isinstance(shuffles, bool) or not isinstance(shuffles, int) or shuffles < 0:
        raise KvsimError(f"shuffles must be a whole number of at least 0, got {shuffles!r}")
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    if trace.num_steps < 2:
        raise KvsimError(f"{trace.path}: has {trace.num_steps} step; rank stability is measured over at least 2")
    plans = linear_plans(trace, policies, chosen)
    for one in plans:
        check_boundary(trace, one)
    together = bundles(plans)
    steps, total = trace.num_steps, 2 * trace.num_steps * len(together)
    results: dict[int, Stability] = {}
    for done, members in enumerate(together):

        def advance(step: int, offset: int = done) -> None:
            if progress is not None:
                progress(2 * offset * steps + step, total)

        own = [plans[index] for index in members]
        for index, series in zip(members, _series(trace, own, advance), strict=True):
            results[index] = _measure(trace, plans[index], series, shuffles, seed)
    return [results[index] for index in range(len(plans))]


def _series(trace: Trace, plans: list[LinearPlan], advance: Callable[[int], None]) -> list[list[Series]]:
    """Give the scores of the positions around the boundary of each plan's groups."""
    groups = plans[0].plan.groups
    total = np.zeros((len(plans), groups.count, trace.prompt_length))
    for step, means in enumerate(layer_means(trace, plans), start=1):
        total += means
        advance(step)
    order = np.argsort((total / trace.num_steps).astype(np.float32), axis=-1, kind="stable")[..., ::-1]
    found = [
        [
            Series.around(groups.label(g), order[p, g], int(one.plan.budgets[g]), REACH, trace.num_steps)
            for g in range(groups.count)
        ]
        for p, one in enumerate(plans)
    ]
    for step, means in enumerate(layer_means(trace, plans), start=1):
        for p, own in enumerate(found):
            for g, series in enumerate(own):
                series.scores[step - 1] = means[p, g, series.positions]
        advance(trace.num_steps + step)
    return found


def _measure(trace: Trace, one: LinearPlan, series: list[Series], shuffles: int, seed: int) -> Stability:
    process = Process(one.rule.step_decay, one.plan.scored)
    pairs = [pair for own in series for pair in measure(own, process)]
    misranked, finite = step_shares(series, process)
    return Stability(
        policy=one.plan.policy,
        trace_name=trace.path.name,
        trace_hash=trace.hash,
        budget=float(one.plan.budgets.mean()),
        step_decay=process.decay,
        first_step=process.half + 1,
        pairs=tuple(pairs),
        shuffled=shuffle(series, pairs, process, shuffles, seed) if shuffles else None,
        misranked_steps=misranked,
        finite_steps=finite,
    )
