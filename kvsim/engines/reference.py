"""The reference engine: plain NumPy in float64, and the definition of every number (design: section 2)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import METRICS, Mode, Outcome, Progress
from kvsim.engines.output import output_error_of_step
from kvsim.plan import FloatArray, Plan
from kvsim.scoring import attention_scores, head_mean_scores, independent_scores, ranking

__all__ = ["run", "run_many"]

BoolArray = npt.NDArray[np.bool_]


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
    state = np.zeros((groups.count, positions))
    state[:, :prompt] = plan.m0
    retained = np.zeros((groups.count, positions), dtype=np.bool_)
    retained[:, :prompt] = True
    evicted_at = np.full((groups.count, positions), -1, dtype=np.int32)
    history = np.zeros((steps, groups.count, positions), dtype=np.bool_) if shadow else None
    metrics = {name: np.full((steps, groups.count), np.nan) for name in METRICS}
    values = _values(trace, plan) if trace.has("values") and heads_known else None
    raw_before: list[BoolArray] = []
    ring = np.zeros((groups.count, plan.window, positions))
    if plan.ring is not None:
        ring[:, :, :prompt] = plan.ring
    updates = 0
    guarded = np.zeros((groups.count, positions), dtype=np.bool_)
    peak = np.zeros((groups.count, positions))

    if plan.evicts[0] and not shadow:
        for g in range(groups.count):
            retained[g], _ = _select(state[g], np.arange(prompt), plan, g, plan.target(g, prompt), guarded[g])
            evicted_at[g, :prompt][~retained[g, :prompt]] = 0

    for t in range(1, steps + 1):
        n = prompt + t
        newest = n - 1
        layers = list(groups.layers)
        rows = (trace.attention_rows(t, layers) if heads_known else trace.score_rows(t, layers)).astype(np.float64)
        everything = np.arange(n)
        visible_now = retained.copy()
        visible_now[:, newest] = True
        raw_now = []
        for g in range(groups.count):
            visible = everything if shadow else np.flatnonzero(visible_now[g])
            m = state[g]
            if plan.scored[t - 1]:
                if plan.score.kind != "attention":
                    scores = independent_scores(plan.score, groups, g, visible, t)
                elif heads_known:
                    scores = attention_scores(plan.score, rows, groups, g, visible, renormalise=not shadow)
                else:
                    scores = head_mean_scores(plan.score, rows, groups, g, visible)
                peak[g, visible] = scores.max(axis=0)
                if plan.window:
                    ring[g, updates % plan.window, visible] = scores.sum(axis=0)
                    m[visible] = ring[g][:, visible].sum(axis=0)
                else:
                    if plan.reset:
                        m[visible] = 0
                    for a, b, s in zip(plan.a[t - 1], plan.b[t - 1], scores, strict=True):
                        m[visible] = a * m[visible] + b * s
            elif visible.size > 1:
                m[newest] = m[visible[:-1]].mean()

            ties = 0
            before = retained[g].copy()
            if shadow or (plan.evicts[t] and visible.size > plan.budgets[g]):
                stay = int(plan.budgets[g]) if shadow else plan.target(g, visible.size)
                if plan.rescue is not None and visible.size > plan.budgets[g] and not guarded[g].any():
                    free = visible[~_protected(visible, plan, g)]
                    guarded[g] = _top(peak[g], free, int(plan.rescue[g]), positions)
                retained[g], ties = _select(m, visible, plan, g, stay, guarded[g])
                if not shadow:
                    evicted_at[g, visible[~retained[g, visible]]] = t
            else:
                retained[g] = visible_now[g]

            members_layers, members_heads, _ = groups.members(g)
            full = rows[members_layers, members_heads].mean(axis=1) if heads_known else rows[members_layers]
            raw = _top(full.mean(axis=0), everything, int(plan.budgets[g]), positions)
            overlap = (raw & retained[g]).sum()
            metrics["kept_mass"][t - 1, g] = full[:, visible_now[g, :n]].sum(axis=1).mean()
            metrics["raw_agreement"][t - 1, g] = overlap / (raw | retained[g]).sum()
            metrics["raw_top_evicted"][t - 1, g] = 1 - overlap / raw.sum()
            metrics["newest_kept"][t - 1, g] = retained[g, newest]
            metrics["newest_wronged"][t - 1, g] = raw[newest] and not retained[g, newest]
            metrics["ties"][t - 1, g] = ties
            metrics["retained"][t - 1, g] = retained[g].sum()
            if t > 1:
                metrics["churn"][t - 1, g] = _churn(retained[g], before)
                metrics["raw_churn"][t - 1, g] = _churn(raw, raw_before[g])
            raw_now.append(raw)
        updates += bool(plan.scored[t - 1])
        raw_before = raw_now
        if values is not None:
            metrics["output_error"][t - 1] = output_error_of_step(rows, values[:, :, :n], visible_now[:, :n], plan)
        if history is not None:
            history[t - 1] = retained
        if progress is not None:
            progress(t, steps)

    per_step = {name: column.mean(axis=1) for name, column in metrics.items()}
    return Outcome(None if shadow else evicted_at, history, per_step)


def _select(
    m: FloatArray, visible: npt.NDArray[np.intp], plan: Plan, g: int, stay: int, guarded: BoolArray
) -> tuple[BoolArray, int]:
    """Keep `stay` of `visible`: protected first, then by float32 rank, then the newest; count ties."""
    kept = np.zeros(m.size, dtype=np.bool_)
    rank = np.zeros(m.size)
    rank[visible] = ranking(plan, g, m[visible], visible)
    protected = _protected(visible, plan, g) | guarded[visible]
    free = visible[~protected]
    room = stay - int(protected.sum())
    kept[visible[protected]] = True
    if room >= free.size:
        kept[free] = True
        return kept, 0
    chosen = _top(rank, free, room, m.size)
    kept |= chosen
    if room <= 0:
        return kept, 0
    lost = free[~chosen[free]]
    cut = rank[lost].astype(np.float32).max()
    tied = rank[free].astype(np.float32) == cut
    return kept, int(tied.sum()) if bool(tied[chosen[free]].any()) else 0


def _protected(visible: npt.NDArray[np.intp], plan: Plan, g: int) -> BoolArray:
    """Mark the first and the most recent positions that the plan protects."""
    marks: BoolArray = (visible < plan.n_sink[g]) | (visible > visible[-1] - plan.n_recent[g])
    return marks


def _top(m: FloatArray, among: npt.NDArray[np.intp], count: int, positions: int) -> BoolArray:
    """Mark the `count` highest of m[among] by float32 value; among equal ones the highest positions."""
    mask = np.zeros(positions, dtype=np.bool_)
    # A stable sort keeps equal states in order of position, so the lowest of them is evicted first.
    order = np.argsort(m[among].astype(np.float32), kind="stable")
    mask[among[order[max(0, among.size - max(0, count)) :]]] = True
    return mask


def _churn(now: BoolArray, before: BoolArray) -> float:
    return 1 - float((now & before).sum() / (now | before).sum())


def _values(trace: Trace, plan: Plan) -> FloatArray:
    """Values of the eligible layers, [K, Hk, L0+T, d]."""
    return np.stack([trace.values(layer) for layer in plan.groups.layers]).astype(np.float64)
