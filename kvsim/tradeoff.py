"""The trade-off of aggregation, measured: what layer weights, memory and noise each cost a linear rule.

Shadow mode: nothing is evicted, and a rule's set at step t is the top-B of its state over positions 0..p_t.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.alphas import ALPHAS
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.plan import FloatArray, Groups, Plan
from kvsim.policy import Policy
from kvsim.replay import choose_budget
from kvsim.shadow import LinearPlan, bundles, full_scores, linear_plans

__all__ = ["DEFAULT_H", "DEFAULT_POLICIES", "PARTS", "TradeOff", "Utility", "decompose", "true_utilities"]

DEFAULT_H = (4, 8, 16)
LARGEST = 2**31
"""Most bytes of scores and states: those of 30 layers, 65,536 positions and the default rules and h take a quarter."""

DEFAULT_POLICIES = (
    *(f"ema:{alpha:g}{over}" for over in ("", ",over=step", ",over=layer") for alpha in ALPHAS),
    "cumulative",
)
PARTS = ("layer", "lag", "boundary", "total")

Utility = Callable[[int], FloatArray]
"""True utilities of step t (from 1): [K, L0 + t] for the K eligible layers, the same for every head."""


@dataclass(frozen=True)
class TradeOff:
    """What one policy loses on one trace, and to what; averages over steps, then over groups.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    trace_name, trace_hash : str
        The recording.
    h : int or None
        Half width of the moving average that stands for the local utility; None for true utilities.
    budget : float
        Tokens kept, averaged over groups.
    layer : float
        Loss of the top-B of u under the rule's layer weights without memory: wrong layers trusted.
    lag : float
        What the rule's memory adds when it runs on u: stale. It may come out slightly negative.
    boundary : float
        What running it on the scores adds to that: flips caused by noise.
    steps : array
        [3, T] layer, lag and boundary at each step.
    """

    policy: str
    trace_name: str
    trace_hash: str
    h: int | None
    budget: float
    layer: float
    lag: float
    boundary: float
    steps: FloatArray = field(repr=False, compare=False)

    @property
    def total(self) -> float:
        """Loss of the rule run on the scores: the sum of the parts."""
        return self.layer + self.lag + self.boundary

    def summary(self) -> dict[str, Any]:
        """Give everything but the steps, ready for JSON."""
        own = {name: getattr(self, name) for name in ("policy", "trace_name", "trace_hash", "h", "budget", *PARTS)}
        own["trace"] = own.pop("trace_name")
        return own


def decompose(
    trace: Trace | str | Path,
    policies: Sequence[Policy | str] = DEFAULT_POLICIES,
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    h: int | Sequence[int] = DEFAULT_H,
    utility: Utility | None = None,
    progress: Progress | None = None,
) -> list[TradeOff]:
    """Split the loss of linear rules on a recording into layer, lag and boundary, in one pass over its steps.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policies : sequence of Policy or str
        Linear rules: `single`, `cumulative`, `ema`, and presets that stand for them.
    compression_ratio, budget
        As for `kvsim.replay`; a policy's own budget beats them.
    h : int or sequence of int
        Half widths of the moving average; windows end where the recording does.
    utility : callable, optional
        True utilities, instead of moving averages, whatever score a policy reads.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    list of TradeOff
        For each policy in order, one for each h in order (one in all with `utility`).

    Notes
    -----
    Memory is that of the scores of ``2 h + 1`` steps at the largest h, 8 bytes for each layer of a group and position,
    and of ``1 + number of h`` states for each policy, group and position; more than `LARGEST` bytes are refused.

    Raises
    ------
    KvsimError
        If a policy is not a linear rule, an h is negative, memory would be too large, or a utility has the wrong shape
        or is not finite.
    """
    chosen = choose_budget(compression_ratio, budget)
    widths = list(h) if isinstance(h, Sequence) else [h]
    for width in widths:
        if isinstance(width, bool) or not isinstance(width, int) or width < 0:
            raise KvsimError(f"h must be a number of steps of at least 0, got {width!r}")
    if not widths:
        raise KvsimError("name at least one h")
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    plans = linear_plans(trace, policies, chosen)
    together = bundles(plans)
    variants: list[int | None] = [None] if utility is not None else list(widths)
    for members in together:
        _check_memory(trace, plans[members[0]].plan.groups, len(members), variants)
    results: dict[tuple[int, int], TradeOff] = {}
    for done, members in enumerate(together):

        def advance(step: int, steps: int, offset: int = done) -> None:
            if progress is not None:
                progress(offset * steps + step, len(together) * steps)

        losses = _Pass(trace, [plans[index] for index in members], variants, utility).run(advance)
        for place, index in enumerate(members):
            for v, variant in enumerate(variants):
                results[index, v] = _result(trace, plans[index].plan, variant, losses[v, place])
    return [results[index, v] for index in range(len(plans)) for v in range(len(variants))]


def _result(trace: Trace, plan: Plan, h: int | None, losses: FloatArray) -> TradeOff:
    parts = np.stack([losses[0], losses[1] - losses[0], losses[2] - losses[1]])
    layer, lag, boundary = (float(part) for part in parts.mean(axis=1))
    budget = float(plan.budgets.mean())
    return TradeOff(plan.policy, trace.path.name, trace.hash, h, budget, layer, lag, boundary, parts)


def _check_memory(trace: Trace, groups: Groups, policies: int, variants: Sequence[int | None]) -> None:
    """Refuse a pass that would hold more than `LARGEST` bytes of scores and states."""
    column = groups.count * trace.num_positions * 8
    states = (1 + len(variants)) * policies * column
    ring = min(2 * max(width or 0 for width in variants) + 1, trace.num_steps) * groups.depth * column
    if states + ring <= LARGEST:
        return
    needs = f"{trace.path}: the trade-off would hold {(states + ring) / 2**30:.1f} GiB of scores and states"
    widest = ((LARGEST - states) // (groups.depth * column) - 1) // 2
    hint = f"use no h above {widest}" if widest >= 0 else "take fewer policies at a time, or a coarser group="
    raise KvsimError(f"{needs}, more than {LARGEST / 2**30:g}; {hint}")


class _Pass:
    """One pass over a recording's steps for plans that share scores and groups."""

    def __init__(
        self,
        trace: Trace,
        members: list[LinearPlan],
        variants: list[int | None],
        utility: Utility | None,
    ) -> None:
        plans, rules = [one.plan for one in members], [one.rule for one in members]
        self.trace, self.plans, self.variants, self.utility = trace, plans, variants, utility
        self.groups = plans[0].groups
        # Rules that weigh layers alike share the sums over layers, which are most of the work.
        weights = np.stack([rule.layer_weights for rule in rules])
        self.weights, self.which = np.unique(weights, axis=0, return_inverse=True)
        self.decay = [rule.step_decay for rule in rules]
        shape = (len(plans), self.groups.count, trace.num_positions)
        self.on_scores = self._initial(shape)
        self.on_utility = [self._initial(shape) for _ in variants]
        self.reach = min(max((width or 0 for width in variants), default=0), trace.num_steps - 1)

    def _initial(self, shape: tuple[int, ...]) -> FloatArray:
        states = np.zeros(shape)
        for state, plan in zip(states, self.plans, strict=True):
            state[:, : self.trace.prompt_length] = plan.m0
        return states

    def run(self, advance: Progress) -> FloatArray:
        """Give the losses [variants, plans, 3, T]: by layer weights alone, the rule on u, the rule on the scores."""
        from kvsim.engines.cpu.losses import smooth

        trace, steps = self.trace, self.trace.num_steps
        depth, count = self.groups.depth, self.groups.count
        losses = np.zeros((len(self.variants), len(self.plans), 3, steps))
        ring = np.zeros((min(2 * self.reach + 1, steps), count * depth, trace.num_positions))
        read = 0
        for t in range(steps):
            n = trace.prompt_length + t + 1
            while read <= min(t + self.reach, steps - 1):
                scores = full_scores(trace, self.groups, self.plans[0].score, read + 1)
                scores = scores.reshape(count * depth, -1)
                ring[read % len(ring), :, : scores.shape[1]] = scores
                read += 1
            s = ring[t % len(ring), :, :n].reshape(count, depth, n)
            updated = self._update(self.on_scores, s, t, n)[1]
            for v, width in enumerate(self.variants):
                if width is None:
                    assert self.utility is not None
                    u = true_utilities(self.utility, self.groups, t + 1, n)
                else:
                    u = np.empty((count * depth, n))
                    smooth(ring, max(0, t - width), min(t + width, steps - 1), trace.prompt_length, u)
                self._measure(losses[v, :, :, t], v, u.reshape(count, depth, n), t, n, updated)
            advance(t + 1, steps)
        return losses

    def _update(self, states: FloatArray, s: FloatArray, t: int, n: int) -> tuple[FloatArray, FloatArray]:
        """Advance all states by step t; give the layer sums [G, W, n] and the states [P, G, n]."""
        from kvsim.engines.cpu.losses import weigh

        sums = np.empty((len(s), len(self.weights), n))
        for g in range(len(s)):
            weigh(self.weights, s[g], sums[g])
        for p, plan in enumerate(self.plans):
            if plan.scored[t]:
                states[p, :, :n] *= self.decay[p]
                states[p, :, :n] += sums[:, self.which[p]]
            else:
                states[p, :, n - 1] = states[p, :, : n - 1].mean(axis=1)
        return sums, states[:, :, :n]

    def _measure(self, out: FloatArray, v: int, u: FloatArray, t: int, n: int, on_scores: FloatArray) -> None:
        from kvsim.engines.cpu.losses import loss, top_sum

        sums, on_utility = self._update(self.on_utility[v], u, t, n)
        worth = u.mean(axis=1)
        for g in range(self.groups.count):
            best: dict[int, float] = {}
            alone: dict[tuple[int, int, int, int], float] = {}
            for p, plan in enumerate(self.plans):
                budget, sink, recent = int(plan.budgets[g]), int(plan.n_sink[g]), int(plan.n_recent[g])
                if budget not in best:
                    best[budget] = top_sum(worth[g], worth[g], budget, 0, 0)
                key = (int(self.which[p]), budget, sink, recent)
                if key not in alone:
                    alone[key] = loss(sums[g, key[0]], worth[g], best[budget], budget, sink, recent)
                out[p, 0] += alone[key] / self.groups.count
                for place, states in ((1, on_utility), (2, on_scores)):
                    lost = loss(states[p, g], worth[g], best[budget], budget, sink, recent)
                    out[p, place] += lost / self.groups.count


def true_utilities(utility: Utility, groups: Groups, step: int, n: int) -> FloatArray:
    """Read the true utilities of a step's n positions as the groups see them, [G * K, n].

    Raises
    ------
    KvsimError
        If they have the wrong shape or are not finite.
    """
    given = np.asarray(utility(step), dtype=np.float64)
    want = (len(groups.layers), n)
    if given.shape != want or not np.isfinite(given).all():
        raise KvsimError(
            f"utilities of step {step} must be finite numbers of shape {list(want)}, got shape {list(given.shape)}"
        )
    return np.concatenate([given[groups.members(g)[0]] for g in range(groups.count)])
