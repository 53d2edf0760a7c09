"""What ``kvsim chart`` can draw: for each kind, which replays or analyses it takes, and which chart."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim_traces import Trace

from kvsim.budget import Budget
from kvsim.engines.outcome import METRICS, Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.policy import Policy, parse
from kvsim.predictions import MEASURES
from kvsim.ranges import read_range
from kvsim.replay import choose_budget, replay_many
from kvsim.result import Result

if TYPE_CHECKING:
    import altair as alt

    from kvsim.heads import ByHead

    Chart = alt.LayerChart | alt.VConcatChart

__all__ = ["KINDS", "RATIOS", "Kind", "Request", "check_metric"]

RATIOS = ("0.5", "0.75", "0.9", "0.95")


@dataclass(frozen=True)
class Request:
    """What a chart is asked for.

    Attributes
    ----------
    traces : list of Trace
        The recordings, at least one for most kinds.
    policies : list of str
        Policy strings; none for a kind's own.
    budget : Budget
        For policies without one.
    metric, sort : str or None
        The metric of a chart that has a choice, and the order of a retention map.
    shadow, raw, both : bool
        Evict nothing; draw the raw top-B sets too; draw both modes.
    steps : str or None
        The steps of a retention map, as `kvsim.ranges.read_range` reads them.
    h : int
        Half width of the moving average of the trade-off.
    ratios : tuple of str
        Compression ratios of the charts against budget or cost.
    bound : str or None
        Which bound of Proposition 1.
    scorers : list of str
        The scorers of the spectrum; none for all there are.
    files : list of Path
        Files of rows, for the kinds that are drawn from them.
    step : int or None
        The step of the charts by head; None for the mean over steps.
    cells : int or None
        Most cells of a retention map; None for the default.
    positions : str or None
        The tokens of `received`, as `kvsim.ranges.read_positions` reads them, or the range of a retention map.
    layer : int or None
        The layer of `received`; None for the mean over all.
    group : int or None
        The retention group of `received`, 0 by default, or of a retention map, the mean over all by default.
    heads : list of str
        The layers and query heads of `utility`, as `kvsim.utility.read_head` reads them.
    advance : callable
        Told (done, all).
    """

    traces: list[Trace]
    policies: list[str]
    budget: Budget
    metric: str | None = None
    sort: str | None = None
    shadow: bool = False
    raw: bool = False
    both: bool = False
    steps: str | None = None
    h: int = 8
    ratios: tuple[str, ...] = RATIOS
    bound: str | None = None
    scorers: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    step: int | None = None
    cells: int | None = None
    positions: str | None = None
    layer: int | None = None
    group: int | None = None
    heads: list[str] = field(default_factory=list)
    advance: Progress = field(default=lambda done, total: None)

    def one_trace(self, kind: str) -> Trace:
        """Give the recording of a chart that shows one.

        Raises
        ------
        KvsimError
            If there are several.
        """
        if len(self.traces) > 1:
            raise KvsimError(f"{kind} draws one recording, got {len(self.traces)}")
        return self.traces[0]

    def chosen(self, *own: str) -> list[Policy]:
        """Give the policies with their budgets: those named, or else a kind's own.

        Raises
        ------
        KvsimError
            If none is named and the kind has none.
        """
        if not (self.policies or own):
            raise KvsimError("name a policy: --policy ema:0.9")
        return [parse(text).with_budget(self.budget) for text in self.policies or own]

    def results(self, policies: Sequence[Policy], *, shadow: bool | None = None) -> list[Result]:
        """Replay policies on every recording."""
        evicts_nothing = self.shadow if shadow is None else shadow
        found: list[Result] = []
        for index, trace in enumerate(self.traces):
            found += replay_many(trace, list(policies), shadow=evicts_nothing, shadow_churn=False)
            self.advance(index + 1, len(self.traces))
        return found


@dataclass(frozen=True)
class Kind:
    """One kind of chart: what draws it, what it shows, whether it reads files of rows, and its metrics."""

    draw: "Callable[[Request], Chart]"
    doc: str
    reads_files: bool = False
    metrics: tuple[str, ...] = tuple(METRICS)


def _retention(request: Request) -> "Chart":
    from kvsim import charts

    trace = request.one_trace("retention")
    policies = request.chosen(*([] if not request.raw else ["ema:0,over=step"]))
    results = request.results(policies) if request.policies else []
    if request.both:
        if request.shadow:
            raise KvsimError("--both draws the shadow mode too; leave --shadow out")
        results += request.results(policies, shadow=True)
    if request.raw:
        raws = [Policy(parse("ema:0,over=step").head, group=p.group_kind, budget=p.budget) for p in policies]
        own = dict.fromkeys(raw.with_budget(request.budget) for raw in raws)
        results = request.results([*own], shadow=True) + results
    sort: Any = request.sort or "position"
    utility = charts.reference_utility(trace) if sort == "utility" else None
    fine: dict[str, Any] = {} if request.cells is None else {"cells": request.cells}
    part: dict[str, Any] = {"group": request.group}
    if request.positions is not None:
        first, last = read_range(request.positions, "--positions")
        part["positions"] = first, last + 1
    if request.steps is not None:
        part["steps"] = read_range(request.steps, "--steps")
    return charts.retention(results, sort=sort, utility=utility, **part, **fine)


def _evictions(request: Request) -> "Chart":
    from kvsim import charts

    return charts.evictions(request.results(request.chosen()))


def _steps(metric: str | None) -> "Callable[[Request], Chart]":
    def draw(request: Request) -> "Chart":
        from kvsim import charts

        return charts.timeline(request.results(request.chosen()), metric or request.metric or "kept_mass")

    return draw


def _churn(request: Request) -> "Chart":
    from kvsim import charts

    policies = request.chosen()
    results = [] if request.shadow else request.results(policies, shadow=False)
    return charts.churn(results + request.results(policies, shadow=True))


def _attended_pairs(request: Request) -> "Chart":
    from kvsim import charts

    return charts.attended_pairs(request.results(request.chosen()))


def _oracle_gap(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.optima import beside_optimum

    policies = request.chosen()
    for policy in policies:
        if policy.budget is None:
            raise KvsimError(f"{policy}: has no budget, so there is no optimum to compare it with; leave it out")
    if any(policy.head.name == "oracle" for policy in policies):
        return charts.oracle_gap(request.results(policies))
    rows: list[dict[str, Any]] = []
    for done, trace in enumerate(request.traces, start=1):
        for one in beside_optimum(replay_many(trace, policies, shadow_churn=False, raw=False), trace):
            if one.why_not:
                raise KvsimError(f"{one.policy}: {one.why_not}; leave it out")
            rows += one.step_rows()
        request.advance(done, len(request.traces))
    return charts.oracle_gap(rows)


def _jaccard(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.anatomy import dissect

    policies = request.chosen()
    if len(policies) < 2:
        raise KvsimError("jaccard compares policies with the first one: name at least two")
    found = []
    for trace in request.traces:
        results = replay_many(trace, policies, shadow=request.shadow, shadow_churn=False, raw=False)
        found.append(dissect(results, trace, progress=request.advance))
    return charts.jaccard(found)


def _alpha(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.tradeoff import DEFAULT_POLICIES

    metric = request.metric or "kept_mass"
    rows = [result.summary() for result in request.results(request.chosen(*DEFAULT_POLICIES))]
    return charts.alpha_sensitivity(rows, metric)


def _budgets(cost: str | None) -> "Callable[[Request], Chart]":
    def draw(request: Request) -> "Chart":
        from kvsim import charts
        from kvsim.sweep import run_sweep

        bases = [dataclasses.replace(policy, budget=None) for policy in request.chosen()]
        grid = {"compression_ratio": request.ratios}
        traces: list[Any] = list(request.traces)
        rows = run_sweep(traces, bases, grid, shadow=request.shadow, progress=request.advance).rows
        metric = request.metric or "kept_mass"
        return charts.budget_curves(rows, metric) if cost is None else charts.quality_cost(rows, metric, cost)

    return draw


def _tradeoff(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.synth import synthetic_of
    from kvsim.tradeoff import decompose

    own = ("ema:0.8", "ema:0.8,over=step", "ema:0.8,over=layer", "ema:0.95,over=step", "cumulative", "single")
    policies = request.chosen(*own)
    rows = []
    for trace in request.traces:
        spec = synthetic_of(trace)
        utility = None if spec is None else spec.utilities
        rows += decompose(trace, policies, h=request.h, utility=utility, progress=request.advance)
    return charts.tradeoff(rows, h=request.h)


def _stability(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.pairs import BOUNDS
    from kvsim.stability import DEFAULT_POLICIES, rank_stability

    if request.bound is not None and request.bound not in BOUNDS:
        raise unknown_name("bound", request.bound, BOUNDS)
    policies = request.chosen(*DEFAULT_POLICIES)
    found = [
        one for trace in request.traces for one in rank_stability(trace, policies, shuffles=0, progress=request.advance)
    ]
    return charts.rank_stability(found, request.bound)


def _two_tokens(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.twotokens import two_tokens

    policies = request.chosen("ema:0.8,over=step")
    if len(policies) > 1:
        raise KvsimError(f"two-tokens draws one policy, got {len(policies)}")
    return charts.two_tokens(two_tokens(request.one_trace("two-tokens"), policies[0]))


def _spectrum(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.spectrum import spectrum

    scorers = request.scorers or None
    budget = str(request.budget)
    found = [spectrum(trace, scorers, budget=budget, progress=request.advance) for trace in request.traces]
    return charts.scorer_spectrum(found)


def _heads(request: Request) -> "Chart":
    from kvsim import charts

    return charts.kept_by_head(_by_head(request, "heads").rows(request.step), request.metric or "kept_fraction")


def _layers(request: Request) -> "Chart":
    from kvsim import charts

    found = _by_head(request, "layers")
    return charts.mass_by_layer(found.rows(request.step), found.part_rows(request.step))


def _by_head(request: Request, kind: str) -> "ByHead":
    from kvsim.heads import by_head

    trace, policies = request.one_trace(kind), request.chosen()
    results = replay_many(trace, policies, shadow=request.shadow, shadow_churn=False, raw=False)
    return by_head(results, trace, progress=request.advance)


def _memory(request: Request) -> "Chart":
    from kvsim import charts

    trace = request.one_trace("memory")
    own = ("ema:0.8", "ema:0.95", "ema:0.8,over=step", "ema:0.95,over=step", "cumulative", "single")
    chosen = [dataclasses.replace(policy, budget=None) for policy in request.chosen(*own)]
    return charts.memory_weights(chosen, len(trace.eligible_layers), steps=trace.num_steps)


def _received(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.attending import attention_on
    from kvsim.fates import fates_of
    from kvsim.ranges import read_positions

    trace = request.one_trace("received")
    if len(request.policies) > 1:
        raise KvsimError(f"received draws one policy beside the full cache, got {len(request.policies)}")
    if request.positions is None:
        raise KvsimError("received draws the attention on chosen tokens: name them, --positions 12-20,31")
    positions, fates = read_positions(request.positions, trace.num_positions), None
    if request.policies:
        (result,) = request.results(request.chosen())
        fates = fates_of(result, request.group or 0)
    found = attention_on(trace, positions, request.layer, fates=fates, progress=request.advance)
    return charts.attention_received(found, trace, layer=request.layer, fates=fates)


def _growth(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.footprint import footprint

    return charts.cache_growth([footprint(result) for result in _irreversible(request, "growth", request.chosen())])


def _triggers(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.footprint import footprint

    results = _irreversible(request, "triggers", request.chosen())
    return charts.eviction_triggers([footprint(result).summary() for result in results])


def _budget_axis(request: Request) -> "Chart":
    from kvsim import charts

    policies: list[Policy] = []
    for text in request.policies:
        policy = parse(text)
        sweeps = policy.expand().with_budget(request.budget).budget is not None and policy.budget is None
        ratios = request.ratios if sweeps else (None,)
        policies += [policy.with_budget(request.budget if r is None else choose_budget(r)) for r in ratios]
    if not policies:
        request.chosen()
    results = _irreversible(request, "budget-axis", list(dict.fromkeys(policies)))
    return charts.quality_by_size(results, request.metric or "kept_mass")


def _irreversible(request: Request, kind: str, policies: Sequence[Policy]) -> list[Result]:
    if request.shadow:
        raise KvsimError(f"{kind} draws what a cache holds; a shadow run evicts nothing: leave --shadow out")
    return request.results(policies)


def _head_sizes(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.heads import size_rows

    results = request.results(request.chosen())
    return charts.kept_by_head([row for result in results for row in size_rows(result, request.step)])


def _utility(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.ranges import read_positions
    from kvsim.utility import read_head, token_utility

    trace = request.one_trace("utility")
    if request.policies:
        raise KvsimError("utility draws what the full cache's attention gives; leave --policy out")
    if request.positions is None or not request.heads:
        raise KvsimError("utility draws tokens and heads: name them, --positions 12,31 --head 10.19")
    positions = read_positions(request.positions, trace.num_positions)
    heads = [read_head(text) for text in request.heads]
    return charts.utility_of_tokens(token_utility(trace, positions, heads, progress=request.advance), trace)


def _fidelity(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.fidelity import read_fidelity

    return charts.fidelity(read_fidelity(request.files))


def _prediction(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.predictions import read_predictions

    return charts.prediction(read_predictions(request.files), request.metric or "kept_mass")


def _needle_grid(request: Request) -> "Chart":
    from kvsim import charts
    from kvsim.evaluations import cells, read_evaluations

    for file in request.files:
        if not file.exists():
            raise KvsimError(f"{file}: there is no such file")
    rows = [row for file in request.files for row in read_evaluations(file)]
    return charts.needle_grid(cells([row for row in rows if row["task"] == "needle"]), "rouge_l_f")


KINDS: dict[str, Kind] = {
    "retention": Kind(_retention, "positions kept, step by step; --sort, --raw, --both, --positions, --steps, --group"),
    "evictions": Kind(_evictions, "when tokens were evicted"),
    "steps": Kind(_steps(None), "a metric over the steps; --metric"),
    "kept-mass": Kind(_steps("kept_mass"), "kept mass over the steps"),
    "output-error": Kind(_steps("output_error"), "output error over the steps"),
    "churn": Kind(_churn, "churn with and without eviction, beside the raw top-B's"),
    "growth": Kind(_growth, "how the cache grows and when it is cut, a panel a policy; the area is the attended pairs"),
    "attended-pairs": Kind(_attended_pairs, "attended pairs up to each step"),
    "oracle-gap": Kind(_oracle_gap, "the gap to the offline optimum up to each step"),
    "jaccard": Kind(_jaccard, "how much of the first policy's sets each other one has, over the steps"),
    "alpha": Kind(_alpha, "a metric against alpha; --metric"),
    "budgets": Kind(_budgets(None), "a metric against the budget; --metric, --ratios"),
    "cost": Kind(_budgets("kv_bytes"), "a metric against memory; --metric, --ratios"),
    "budget-axis": Kind(
        _budget_axis, "a metric against the cache's size, admission and eviction on one axis; --metric, --ratios"
    ),
    "triggers": Kind(_triggers, "cache size and how often it is cut, a bar a policy"),
    "tradeoff": Kind(_tradeoff, "what a linear rule loses to layers, lag and noise; --h"),
    "stability": Kind(_stability, "Proposition 1 beside the measured misranking, pair by pair; --bound"),
    "two-tokens": Kind(_two_tokens, "the two tokens at ranks B and B+1, their scores and a rule's state"),
    "spectrum": Kind(_spectrum, "how far scorers are from attention, layer by layer; --scorer"),
    "heads": Kind(
        _heads,
        "what each layer and KV head keeps; --step, --metric",
        metrics=("kept_fraction", "kept_mass"),
    ),
    "head-sizes": Kind(_head_sizes, "kept fraction of each layer and KV head, of several recordings; --step"),
    "layers": Kind(_layers, "kept mass and where the attention goes, layer by layer; --step"),
    "memory": Kind(_memory, "where the weight of a linear rule's state comes from"),
    "received": Kind(_received, "the attention that chosen tokens get together; --positions, --layer, --group"),
    "utility": Kind(_utility, "the attention that single tokens get from single heads; --positions, --head"),
    "fidelity": Kind(_fidelity, "open loops beside closed ones, with two nulls; from kvsim fidelity --out", True),
    "prediction": Kind(
        _prediction, "live scores against what replays said; from kvsim predict --out; --metric", True, tuple(MEASURES)
    ),
    "needle-grid": Kind(_needle_grid, "ROUGE-L by length and depth of the needle; from kvsim eval --out", True),
}


def check_metric(kind: str, metric: str | None) -> None:
    """Refuse a metric that a kind has not.

    Raises
    ------
    KvsimError
        Listing those that there are.
    """
    metrics = KINDS[kind].metrics
    if metric is not None and metric not in metrics:
        raise unknown_name("metric", metric, metrics)
