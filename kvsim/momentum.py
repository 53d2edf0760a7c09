"""Momentum dominance (InertiaKV section 5.3), measured: what of a change of the scores reaches the state."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.correlation import top_jaccard
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.grammar import format_float, parse_part
from kvsim.head import Coefficients
from kvsim.plan import FloatArray, ScoreSource
from kvsim.policy import Policy
from kvsim.replay import choose_budget
from kvsim.scorers import SCORERS
from kvsim.shadow import LinearPlan, bundles, full_scores, linear_plans

__all__ = ["DEFAULT_POLICIES", "Momentum", "momentum"]

DEFAULT_POLICIES = ("ema:0.8", "ema:0.8,over=step")

MOST_NOISE = 1e6
"""Of more, the scores are not even a rounding error."""

Change = Callable[[int, FloatArray], FloatArray]
"""Gives the changed scores [G, K, n] of a step (from 1) from the scores."""


@dataclass(frozen=True)
class Momentum:
    """What a change of the scores does to one policy's state on one trace.

    All are averages over scored steps and groups, in shadow mode, over positions 0..p_t. A relative difference is the
    L2 norm of the difference over that of what the policy itself has. It depends on the scale of the scores, as ranks
    do not, so the top-B Jaccard stands beside it. Layer updates and steps start from the policy's own state. None where
    nothing is defined, as all scores are 0.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    change : str
        ``score=NAME``, or ``noise:X``.
    trace_name, trace_hash : str
        The recording.
    scores_layer : float or None
        Relative difference of a layer's scores.
    state_layer : float or None
        Relative difference of the state after ONE layer's update with the changed scores, averaged over layers.
    expected_layer : float
        Weight of one layer's update in a settled state, averaged over layers: ``1 - A`` for the layer-sequential EMA.
        By the paper's arithmetic state_layer is that times scores_layer (16% where they differ by 82%).
    scores_step : float or None
        Relative difference of a step's scores, averaged over layers with the rule's weights.
    state_step : float or None
        Relative difference of the state after a whole step, all K updates, with the changed scores.
    expected_step : float
        Weight of one step in a settled state: ``1 - A^K`` for the layer-sequential EMA.
    state_run : float or None
        Relative difference of the states when the change is there from the first step on.
    state_run_last : float or None
        The same at the last scored step.
    top_scores, top_step, top_run : float
        Top-B Jaccard of what scores_step, state_step and state_run compare.
    steps : array
        [3, scored steps] scores_step, state_step and state_run at each scored step, NaN where not defined.
    """

    policy: str
    change: str
    trace_name: str
    trace_hash: str
    scores_layer: float | None
    state_layer: float | None
    expected_layer: float
    scores_step: float | None
    state_step: float | None
    expected_step: float
    state_run: float | None
    state_run_last: float | None
    top_scores: float
    top_step: float
    top_run: float
    steps: FloatArray = field(repr=False, compare=False)

    @property
    def carried_layer(self) -> float | None:
        """How much of the difference one layer's update carries into the state, to be held against expected_layer."""
        return _ratio(self.state_layer, self.scores_layer)

    @property
    def carried_step(self) -> float | None:
        """How much of the difference a whole step carries into the state, to be held against expected_step."""
        return _ratio(self.state_step, self.scores_step)

    @property
    def carried_run(self) -> float | None:
        """How much of the difference is in the states of whole runs."""
        return _ratio(self.state_run, self.scores_step)

    def summary(self) -> dict[str, Any]:
        """Give everything but the steps, ready for JSON."""
        own = {name: value for name, value in vars(self).items() if name != "steps"}
        own["trace"] = own.pop("trace_name")
        return own | {name: getattr(self, name) for name in ("carried_layer", "carried_step", "carried_run")}


def momentum(
    trace: Trace | str | Path,
    policies: Sequence[Policy | str] = DEFAULT_POLICIES,
    *,
    scores: Sequence[str] = (),
    noise: Sequence[float] = (),
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Momentum]:
    """Change the scores of linear rules, and measure how much of it one layer, one step and a whole run carry.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policies : sequence of Policy or str
        Linear rules; the scores that are changed are those of their ``score=`` axis.
    scores : sequence of str
        Scorers that take the place of a policy's own, such as ``"vnorm"``.
    noise : sequence of float
        Relative L2 norms of Gaussian noise, equally large at all positions, that is added to every layer's scores anew
        at every step: 0.82 for the paper's 82%; from 0 to 1e6.
    compression_ratio, budget
        As for `kvsim.replay`; a policy's own budget beats them.
    seed : int
        Seed of the noise.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    list of Momentum
        For each policy in order, one for each scorer and one for each noise.

    Raises
    ------
    KvsimError
        If there is no change, a noise is out of range, a policy is not a linear rule, or a scorer cannot run on the
        recording.
    """
    chosen = choose_budget(compression_ratio, budget)
    names = [f"score={scorer}" for scorer in scores] + [f"noise:{format_float(size)}" for size in noise]
    if not names:
        raise KvsimError("name a change of the scores: scores=['vnorm'] or noise=[0.82]")
    for size in noise:
        if not 0 <= size <= MOST_NOISE:
            raise KvsimError(f"noise must be a number from 0 to {MOST_NOISE:g}, got {size}")
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    plans = linear_plans(trace, policies, chosen)
    together = bundles(plans)
    results: dict[int, list[Momentum]] = {}
    for done, members in enumerate(together):

        def advance(step: int, offset: int = done) -> None:
            if progress is not None:
                progress(offset * trace.num_steps + step, len(together) * trace.num_steps)

        own = [plans[index] for index in members]
        changes = [_scorer(trace, own[0], scorer) for scorer in scores] + [_noise(size, seed) for size in noise]
        for index, found in zip(members, _run(trace, own, changes, advance), strict=True):
            plan = plans[index].plan.policy
            results[index] = [
                one.result(plan, name, trace, plans[index].rule) for one, name in zip(found, names, strict=True)
            ]
    return [one for index in range(len(plans)) for one in results[index]]


class _Record:
    """Sums of one policy under one change."""

    def __init__(self, groups: int, positions: int) -> None:
        self.state = np.zeros((groups, positions))
        self.layers: list[FloatArray] = []
        self.steps: list[FloatArray] = []
        self.tops: list[FloatArray] = []

    def result(self, policy: str, change: str, trace: Trace, rule: Coefficients) -> Momentum:
        layers, steps, tops = np.stack(self.layers), np.stack(self.steps), np.stack(self.tops)
        scores_layer, state_layer = (_mean(layers[:, place]) for place in range(2))
        scores_step, state_step, state_run = (_mean(steps[:, place]) for place in range(3))
        top_scores, top_step, top_run = (float(top) for top in tops.mean(axis=(0, 2)))
        series = [[_mean(step[place]) for step in steps] for place in range(3)]
        return Momentum(
            policy=policy,
            change=change,
            trace_name=trace.path.name,
            trace_hash=trace.hash,
            scores_layer=scores_layer,
            state_layer=state_layer,
            expected_layer=_expected_layer(rule),
            scores_step=scores_step,
            state_step=state_step,
            expected_step=1 - rule.step_decay,
            state_run=state_run,
            state_run_last=_mean(steps[-1, 2]),
            top_scores=top_scores,
            top_step=top_step,
            top_run=top_run,
            steps=np.array(series, dtype=np.float64),
        )


def _run(
    trace: Trace, plans: list[LinearPlan], changes: list[Change], advance: Callable[[int], None]
) -> list[list[_Record]]:
    groups, prompt, source = plans[0].plan.groups, trace.prompt_length, plans[0].plan.score
    shape = groups.count, trace.num_positions
    states = [np.zeros(shape) for _ in plans]
    records = [[_Record(*shape) for _ in changes] for _ in plans]
    for one, state, found in zip(plans, states, records, strict=True):
        for own in [state, *(record.state for record in found)]:
            own[:, :prompt] = one.plan.m0
    for step in range(1, trace.num_steps + 1):
        s = full_scores(trace, groups, source, step)
        changed = [change(step, s) for change in changes]
        for one, state, found in zip(plans, states, records, strict=True):
            _advance(one, step, s, changed, state, found)
        advance(step)
    return records


def _advance(
    one: LinearPlan, step: int, s: FloatArray, changed: list[FloatArray], state: FloatArray, found: list[_Record]
) -> None:
    """Take one policy, and what it would be under each change, through a step."""
    n = s.shape[-1]
    if not one.plan.scored[step - 1]:
        for own in [state, *(record.state for record in found)]:
            own[:, n - 1] = own[:, : n - 1].mean(axis=1)
        return
    rule = one.rule
    after = _layer_states(rule, state[:, :n], s)
    weighted = np.einsum("k,gkn->gn", rule.layer_weights, s)
    # As below, not after[:, -1], so that no change makes no difference.
    state[:, :n] = rule.step_decay * state[:, :n] + weighted
    budgets = one.plan.budgets.tolist()
    for record, other in zip(found, changed, strict=True):
        apart = np.linalg.norm(other - s, axis=-1)
        record.layers.append(np.stack([_over(apart, s), _over(rule.b * apart, after)]))
        shift = np.einsum("k,gkn->gn", rule.layer_weights, other - s)
        record.state[:, :n] = rule.step_decay * record.state[:, :n] + weighted + shift
        own, run = state[:, :n], record.state[:, :n]
        compared = [(weighted, weighted + shift), (own, own + shift), (own, run)]
        record.steps.append(np.stack([_over(np.linalg.norm(b - a, axis=-1), a) for a, b in compared]))
        record.tops.append(
            np.array([[top_jaccard(a[g], b[g], budget) for g, budget in enumerate(budgets)] for a, b in compared])
        )


def _layer_states(rule: Coefficients, state: FloatArray, s: FloatArray) -> FloatArray:
    """Give the state after each layer's update, [G, K, n]."""
    found = np.empty_like(s)
    m = np.zeros_like(state) if rule.reset else state
    for layer, (a, b) in enumerate(zip(rule.a, rule.b, strict=True)):
        m = a * m + b * s[:, layer]
        found[:, layer] = m
    return found


def _expected_layer(rule: Coefficients) -> float:
    """Give the weight of a layer's update in the state after it, averaged over layers, in the limit of many steps."""
    if rule.step_decay == 1:
        return 0.0
    total = 0.0 if rule.reset else float(rule.layer_weights.sum()) / (1 - rule.step_decay)
    shares = []
    for a, b in zip(rule.a, rule.b, strict=True):
        total = float(a * total + b)
        shares.append(float(b) / total)
    return sum(shares) / len(shares)


def _scorer(trace: Trace, one: LinearPlan, scorer: str) -> Change:
    policy = dataclasses.replace(one.policy.expand(), score=parse_part(scorer, SCORERS, "score"))
    (other,) = linear_plans(trace, [policy], choose_budget())
    source: ScoreSource = other.plan.score
    return lambda step, s: full_scores(trace, one.plan.groups, source, step)


def _noise(size: float, seed: int) -> Change:
    def change(step: int, s: FloatArray) -> FloatArray:
        drawn = np.random.default_rng([seed, step]).normal(size=s.shape)
        scale = np.linalg.norm(s, axis=-1, keepdims=True) / np.linalg.norm(drawn, axis=-1, keepdims=True)
        changed: FloatArray = s + size * scale * drawn
        return changed

    return change


def _over(norms: FloatArray, of: FloatArray) -> FloatArray:
    """Give norms over those of vectors, NaN where these are 0."""
    scale = np.linalg.norm(of, axis=-1)
    found: FloatArray = np.divide(norms, scale, out=np.full_like(scale, np.nan), where=scale > 0)
    return found


def _mean(values: FloatArray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
