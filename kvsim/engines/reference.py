"""The reference engine: plain NumPy in float64, and the definition of every number (design: section 2)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from kvsim_traces import Trace

from kvsim.engines.outcome import METRICS, Mode, Outcome, Progress
from kvsim.engines.output import output_error_of_step
from kvsim.engines.stepper import BoolArray, Stepper, top
from kvsim.plan import FloatArray, Plan

__all__ = ["rows_of", "run", "run_many", "settle"]


def run_many(
    trace: Trace,
    plans: Sequence[Plan],
    *,
    shadow: bool = False,
    raw: bool = True,
    mode: Mode = "exact",
    progress: Progress | None = None,
) -> list[Outcome]:
    """Replay plans one after the other; see `run`. There is one mode, the exact one, and `raw` is always on."""
    if len(plans) == 1:
        return [run(trace, plans[0], shadow=shadow, progress=progress)]
    outcomes = []
    for done, plan in enumerate(plans, start=1):
        outcomes.append(run(trace, plan, shadow=shadow))
        if progress is not None:
            progress(done, len(plans))
    return outcomes


def run(trace: Trace, plan: Plan, *, shadow: bool = False, progress: Progress | None = None) -> Outcome:
    """Replay a plan on a trace.

    Parameters
    ----------
    trace : Trace
        The recording; its rows are those of the full cache (open loop).
    plan : Plan
        What to run.
    shadow : bool
        Evict nothing: rank all positions at every step, and measure a cache that could recall any of them.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    Outcome
    """
    groups, steps = plan.groups, trace.num_steps
    prompt, positions = trace.prompt_length, trace.num_positions
    heads_known = trace.capture != "scores"
    stepper = Stepper(plan, prompt, positions, shadow=shadow, heads_known=heads_known)
    history = np.zeros((steps, groups.count, positions), dtype=np.bool_) if shadow else None
    metrics = {name: np.full((steps, groups.count), np.nan) for name in METRICS}
    values = _values(trace, plan) if trace.has("values") and heads_known else None
    raw_before: list[BoolArray] = []

    for t in range(1, steps + 1):
        n = prompt + t
        newest = n - 1
        rows = rows_of(trace, plan, t)
        step = stepper.step(t, rows)
        everything = np.arange(n)
        raw_now = []
        for g in range(groups.count):
            retained = stepper.retained[g]
            members_layers, members_heads, _ = groups.members(g)
            full = rows[members_layers, members_heads].mean(axis=1) if heads_known else rows[members_layers]
            raw = top(full.mean(axis=0), everything, int(plan.budgets[g]), positions)
            overlap = (raw & retained).sum()
            metrics["kept_mass"][t - 1, g] = full[:, step.visible[g, :n]].sum(axis=1).mean()
            metrics["raw_agreement"][t - 1, g] = overlap / (raw | retained).sum()
            metrics["raw_top_evicted"][t - 1, g] = 1 - overlap / raw.sum()
            metrics["newest_kept"][t - 1, g] = retained[newest]
            metrics["newest_wronged"][t - 1, g] = raw[newest] and not retained[newest]
            metrics["ties"][t - 1, g] = step.ties[g]
            metrics["retained"][t - 1, g] = retained.sum()
            if t > 1:
                metrics["churn"][t - 1, g] = _churn(retained, step.before[g])
                metrics["raw_churn"][t - 1, g] = _churn(raw, raw_before[g])
            raw_now.append(raw)
        raw_before = raw_now
        if values is not None:
            metrics["output_error"][t - 1] = output_error_of_step(rows, values[:, :, :n], step.visible[:, :n], plan)
        if history is not None:
            history[t - 1] = stepper.retained
        if progress is not None:
            progress(t, steps)

    per_step = {name: column.mean(axis=1) for name, column in metrics.items()}
    return Outcome(None if shadow else stepper.evicted_at, history, per_step)


def settle(trace: Trace, plan: Plan, *, shadow: bool = False) -> Plan:
    """Run a plan's control on a trace, and give the plan with the coefficients that it decided on.

    An engine that takes all coefficients at once runs the settled plan; one without a control is settled already.
    """
    if plan.control is None:
        return plan
    heads_known = trace.capture != "scores"
    stepper = Stepper(plan, trace.prompt_length, trace.num_positions, shadow=shadow, heads_known=heads_known)
    for t in range(1, trace.num_steps + 1):
        stepper.step(t, rows_of(trace, plan, t))
    return replace(plan, a=stepper.a, b=stepper.b, control=None)


def rows_of(trace: Trace, plan: Plan, t: int) -> FloatArray:
    """Give the full-cache attention of a step, [K, H, n], or the head means [K, n] of a `scores` capture."""
    layers = list(plan.groups.layers)
    rows = trace.score_rows(t, layers) if trace.capture == "scores" else trace.attention_rows(t, layers)
    return rows.astype(np.float64)


def _churn(now: BoolArray, before: BoolArray) -> float:
    either = (now | before).sum()
    return 1 - float((now & before).sum() / either) if either else 0.0


def _values(trace: Trace, plan: Plan) -> FloatArray:
    """Values of the eligible layers, [K, Hk, L0+T, d]."""
    return np.stack([trace.values(layer) for layer in plan.groups.layers]).astype(np.float64)
