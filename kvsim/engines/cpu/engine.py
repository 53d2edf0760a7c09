"""Running a plan group by group, on threads that hold no lock."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.cpu.output import output_errors
from kvsim.engines.cpu.raw import compare, raw_sets
from kvsim.engines.cpu.replay_fast import replay_fast
from kvsim.engines.cpu.replay_many import replay_shared
from kvsim.engines.cpu.replay_one import ATTENTION, BILINEAR, COSINE, STATIC, replay_group
from kvsim.engines.cpu.rows import TokenRows, bounded, token_rows
from kvsim.engines.outcome import METRICS, Mode, Outcome, Progress
from kvsim.engines.reference import settle
from kvsim.plan import Plan
from kvsim.scoring import unit_vectors

__all__ = ["is_plain", "run", "run_many"]

KINDS = {"attention": ATTENTION, "static": STATIC, "cosine": COSINE, "bilinear": BILINEAR}


def run(
    trace: Trace,
    plan: Plan,
    *,
    shadow: bool = False,
    raw: bool = True,
    mode: Mode = "exact",
    measure: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Replay a plan on a trace; see `kvsim.engines.reference.run`, whose `evicted_at` the exact mode returns.

    Parameters
    ----------
    trace, plan, shadow, raw, progress
        As for the reference engine.
    mode : {"exact", "fast"}
        ``exact`` keeps the layer order of the definition in float64; ``fast`` collapses a step's layers into one
        float32 product where the scores are plain attention, and may order near-ties differently.
    measure : bool
        Whether the fast mode computes the kept mass where nothing else needs it.
    """
    if shadow:
        plan.check_shadow()
    plan = settle(trace, plan, shadow=shadow)
    rows = token_rows(trace)
    groups, steps, positions = plan.groups, trace.num_steps, trace.num_positions
    evicted_at = np.full((groups.count, positions), -1, dtype=np.int32)
    history = np.zeros((groups.count, steps, positions), dtype=np.bool_) if shadow else None
    mixed = plan.score.redundancy
    metrics = {name: np.full((groups.count, steps), np.nan) for name in METRICS}
    source = _Source.of(plan)
    renormalise = trace.capture != "scores" and not shadow
    a, b = np.ascontiguousarray(plan.a), np.ascontiguousarray(plan.b)

    def one(g: int) -> None:
        answers = tuple(metrics[name][g] for name in ("kept_mass", "ties", "retained", "churn"))
        bases, depth, heads = _span(rows, plan, g)
        recording = (rows.data, bases, rows.stride, rows.scale, depth, heads)
        limits = (int(plan.budgets[g]), int(plan.n_sink[g]), int(plan.n_recent[g]), trace.prompt_length, plan.m0[g])
        rule = (a, b, plan.reset, plan.scored, plan.evicts)
        if mode == "fast" and not shadow and is_plain(plan):
            replay_fast(*recording, renormalise, *rule, *limits, measure, evicted_at[g], *answers)
        else:
            sets = np.zeros((0, 0), np.bool_) if history is None else history[g]
            history_of_scores = np.zeros((plan.window, positions))
            if plan.ring is not None:
                history_of_scores[:, : trace.prompt_length] = plan.ring[g]
            replay_group(
                *recording,
                KINDS[plan.score.kind],
                renormalise,
                *source.of_group(plan, g, heads),
                plan.score.heads == "max",
                plan.score.entropy,
                plan.score.pivotal,
                plan.score.signed,
                *rule,
                *limits,
                plan.window,
                history_of_scores,
                plan.pool,
                plan.batch,
                np.empty(0, np.int64) if plan.targets is None else plan.targets[g],
                0 if plan.admission is None else plan.admission.window,
                np.empty(0, np.bool_) if plan.admission is None else plan.admission.admitted[g],
                0 if plan.rescue is None else int(plan.rescue[g]),
                _units(plan, g),
                0.0 if mixed is None else mixed.mix,
                0.0 if mixed is None else mixed.threshold,
                shadow,
                evicted_at[g],
                sets,
                *answers,
            )

    with bounded(rows):
        _over_groups(one, groups.count, steps, progress)
        if raw:
            _compare_with_raw(trace, rows, plan, metrics, evicted_at, history)
    metrics["churn"][:, 0] = np.nan
    _mark_newest(metrics, evicted_at, history, trace.prompt_length)
    per_step = {name: column.mean(axis=0) for name, column in metrics.items()}
    if raw and trace.has("values") and trace.capture != "scores":
        per_step["output_error"] = output_errors(trace, rows, groups, evicted_at[None], history)[0]
    history = None if history is None else history.transpose(1, 0, 2)
    return Outcome(None if shadow else evicted_at, history, per_step)


def run_many(
    trace: Trace,
    plans: Sequence[Plan],
    *,
    shadow: bool = False,
    raw: bool = True,
    mode: Mode = "exact",
    progress: Progress | None = None,
) -> list[Outcome]:
    """Replay several plans; those with one shared group and plain attention scores run in one pass over the rows.

    Parameters
    ----------
    trace, shadow, raw, mode, progress
        As for `run`; progress counts plans, or steps where there is only one.
    plans : sequence of Plan
        What to run.

    Returns
    -------
    list of Outcome
        One for each plan, in order.
    """
    if len(plans) == 1:
        return [run(trace, plans[0], shadow=shadow, raw=raw, mode=mode, progress=progress)]
    outcomes: list[Outcome | None] = [None] * len(plans)
    together = [i for i, plan in enumerate(plans) if not shadow and _fits_one_pass(plan)]
    if len(together) > 1:
        for i, outcome in zip(together, _one_pass(trace, [plans[i] for i in together], raw, mode), strict=True):
            outcomes[i] = outcome
    for i, plan in enumerate(plans):
        if outcomes[i] is None:
            outcomes[i] = run(trace, plan, shadow=shadow, raw=raw, mode=mode)
        if progress is not None:
            progress(i + 1, len(plans))
    return [outcome for outcome in outcomes if outcome is not None]


def is_plain(plan: Plan) -> bool:
    """Whether a plan is plain attention under a linear rule, which the fast and the many-policy kernels know."""
    score = plan.score
    weighted = score.weight is not None or score.entropy or score.pivotal or score.signed or score.heads == "max"
    ranked = plan.window or plan.pool > 1 or plan.batch or plan.rescue is not None or score.redundancy is not None
    return score.kind == "attention" and plan.admission is None and not (weighted or ranked)


def _fits_one_pass(plan: Plan) -> bool:
    constant = plan.control is None and bool((plan.a == plan.a[:1]).all() and (plan.b == plan.b[:1]).all())
    return plan.groups.kind == "shared" and is_plain(plan) and constant


def _one_pass(trace: Trace, plans: list[Plan], raw: bool, mode: Mode) -> list[Outcome]:
    rows = token_rows(trace)
    count, steps, positions = len(plans), trace.num_steps, trace.num_positions
    evicted_at = np.full((count, positions), -1, dtype=np.int32)
    metrics = {name: np.full((count, steps), np.nan) for name in METRICS}
    bases, depth, heads = _span(rows, plans[0], 0)
    with bounded(rows):
        replay_shared(
            rows.data,
            bases,
            rows.stride,
            rows.width,
            rows.scale,
            depth,
            heads,
            trace.capture != "scores",
            mode == "exact",
            np.stack([plan.a[0] for plan in plans]),
            np.stack([plan.b[0] for plan in plans]),
            np.array([plan.reset for plan in plans]),
            np.stack([plan.scored for plan in plans]),
            np.stack([plan.evicts for plan in plans]),
            np.array([plan.budgets[0] for plan in plans]),
            np.array([plan.n_sink[0] for plan in plans]),
            np.array([plan.n_recent[0] for plan in plans]),
            trace.prompt_length,
            np.stack([plan.m0[0] for plan in plans]),
            np.zeros((count, positions), np.float64 if mode == "exact" else np.float32),
            evicted_at,
            *(metrics[name] for name in ("kept_mass", "ties", "retained", "churn")),
        )
    metrics["churn"][:, 0] = np.nan
    _mark_newest(metrics, evicted_at, None, trace.prompt_length)
    outcomes = []
    measured = raw and trace.has("values") and trace.capture != "scores"
    errors = output_errors(trace, rows, plans[0].groups, evicted_at[:, None]) if measured else None
    for p, plan in enumerate(plans):
        own = {name: column[p : p + 1] for name, column in metrics.items()}
        if raw:
            with bounded(rows):
                _compare_with_raw(trace, rows, plan, own, evicted_at[p : p + 1], None)
        per_step = {name: column[0] for name, column in own.items()}
        if errors is not None:
            per_step["output_error"] = errors[p]
        outcomes.append(Outcome(evicted_at[p : p + 1], None, per_step))
    return outcomes


def _mark_newest(
    metrics: dict[str, npt.NDArray[np.float64]],
    evicted_at: npt.NDArray[np.int32],
    history: npt.NDArray[np.bool_] | None,
    prompt: int,
) -> None:
    """Say for each step whether its own position is retained, [G, T]."""
    steps = np.arange(evicted_at.shape[1] - prompt)
    if history is None:
        metrics["newest_kept"][:] = evicted_at[:, prompt:] != steps + 1
    else:
        metrics["newest_kept"][:] = history[:, steps, prompt + steps]


def _compare_with_raw(
    trace: Trace,
    rows: TokenRows,
    plan: Plan,
    metrics: dict[str, npt.NDArray[np.float64]],
    evicted_at: npt.NDArray[np.int32],
    history: npt.NDArray[np.bool_] | None,
) -> None:
    """Fill in the metrics that need the raw top-B sets, [G, T] each; `history` is [G, T, L0+T]."""
    for g in range(plan.groups.count):
        sets, metrics["raw_churn"][g] = _RAW.get(trace, rows, plan, g)
        columns = metrics["raw_agreement"][g], metrics["raw_top_evicted"][g], metrics["newest_wronged"][g]
        own = np.zeros((0, 0), np.bool_) if history is None else history[g]
        compare(sets, evicted_at[g], own, trace.prompt_length, *columns)


def _over_groups(work: Callable[[int], None], count: int, steps: int, progress: Progress | None) -> None:
    if count == 1:
        work(0)
        if progress is not None:
            progress(steps, steps)
        return
    threads = min(count, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        for done, _ in enumerate(pool.map(work, range(count)), start=1):
            if progress is not None:
                progress(done * steps // count, steps)


def _span(rows: TokenRows, plan: Plan, g: int) -> tuple[npt.NDArray[np.int64], int, int]:
    """Where a group's elements start in each step, its layers, and its heads (1 for a `scores` capture)."""
    layers, heads, _ = plan.groups.members(g)
    first_layer, first_head = layers.start or 0, heads.start or 0
    count = heads.stop - heads.start if heads.stop is not None else rows.heads
    return rows.bases + first_layer * rows.heads + first_head, plan.groups.depth, count


@dataclass(frozen=True)
class _Source:
    """The arrays of a score source as the kernel wants them."""

    weight: npt.NDArray[np.float64] | None
    static: npt.NDArray[np.float64] | None
    vectors: npt.NDArray[np.float64] | None
    queries: npt.NDArray[np.float64] | None

    @classmethod
    def of(cls, plan: Plan) -> "_Source":
        score = plan.score
        static = score.values if score.kind == "static" else None
        vectors = score.values if score.kind == "bilinear" else None
        if score.kind == "cosine":
            assert score.values is not None
            vectors = unit_vectors(score.values)
        return cls(score.weight, static, vectors, score.queries)

    def of_group(self, plan: Plan, g: int, heads: int) -> tuple[npt.NDArray[np.float64], ...]:
        layers, _, kv = plan.groups.members(g)
        weight, static = np.empty((0, 0, 0)), np.empty((0, 0))
        vectors, queries = np.empty((0, 0, 0, 0)), np.empty((0, 0, 0, 0))
        if self.weight is not None:
            own = self.weight[layers, kv]
            weight = np.repeat(own, heads // own.shape[1], axis=1)
        if self.static is not None:
            static = self.static[layers, kv]
            static = np.ascontiguousarray(static.max(axis=1) if plan.score.heads == "max" else static.mean(axis=1))
        if self.vectors is not None:
            vectors = np.ascontiguousarray(_distinct(self.vectors[layers, kv], 1))
        if self.queries is not None:
            queries = np.ascontiguousarray(_distinct(self.queries[:, layers, kv], 2))
        return weight, static, vectors, queries


def _units(plan: Plan, g: int) -> npt.NDArray[np.float64]:
    """Give the unit keys of a group's redundancy, [K * KV heads, L, d]; empty without one."""
    if plan.score.redundancy is None:
        return np.empty((0, 0, 0))
    layers, _, kv = plan.groups.members(g)
    units = plan.score.redundancy.units[layers, kv]
    return np.ascontiguousarray(units.reshape(-1, *units.shape[2:]))


def _distinct(array: npt.NDArray[np.float64], axis: int) -> npt.NDArray[np.float64]:
    """Drop what `np.broadcast_to` repeated along an axis: heads that share their numbers have the mean of one."""
    return array.take([0], axis) if array.strides[axis] == 0 else array


class _RawSets:
    """Raw top-B sets depend on the trace, the grouping and B, not on the policy: the most recent ones are kept."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[tuple[Any, ...], tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, trace: Trace, rows: TokenRows, plan: Plan, g: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
        """Give a group's bitmaps, [T, ceil(L / 8)], and their churn, [T]."""
        budget = int(plan.budgets[g])
        key = (trace.hash, plan.groups.kind, g, budget)
        found = self._held.get(key)
        if found is None:
            bases, depth, heads = _span(rows, plan, g)
            sets = np.zeros((trace.num_steps, (trace.num_positions + 7) // 8), np.uint8)
            raw_sets(rows.data, bases, rows.stride, rows.scale, depth * heads, budget, trace.prompt_length, sets)
            churn = np.full(trace.num_steps, np.nan)
            both = np.bitwise_count(sets[1:] & sets[:-1]).sum(axis=1, dtype=np.int64)
            churn[1:] = 1 - both / np.bitwise_count(sets[1:] | sets[:-1]).sum(axis=1, dtype=np.int64)
            found = sets, churn
            with self._lock:
                self._held[key] = found
                while sum(sets.nbytes for sets, _ in self._held.values()) > self._limit and len(self._held) > 1:
                    self._held.popitem(last=False)
        return found


_RAW = _RawSets(128 * 2**20)
