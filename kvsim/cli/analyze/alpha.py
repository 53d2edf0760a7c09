"""``kvsim analyze alpha``: what aggregation trades against what."""

from typing import Annotated, Any

import typer

from kvsim.cli.analyze.best import EDGE, best_alpha
from kvsim.cli.analyze.utilities import Smoothed, utilities_of
from kvsim.cli.folding import PolicyText
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    More,
    Quiet,
    Traces,
    budget_note,
    open_traces,
    without_budget,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.policy import parse
from kvsim.replay import choose_budget
from kvsim.tradeoff import DEFAULT_H, DEFAULT_POLICIES, PARTS, TradeOff

__all__ = ["alpha"]


def alpha(
    trace: Traces = None,
    more: More = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="POLICY",
            help="Linear rule; repeatable. By default ema at eight alphas, and cumulative.",
        ),
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    h: Annotated[int, typer.Option("--h", metavar="STEPS", help="Half width of the moving average.")] = 8,
    only_h: Annotated[bool, typer.Option("--only-h", help="No other h: takes less memory.")] = False,
    smoothed: Smoothed = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap over traces.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Split what a linear rule loses into layer, lag and boundary; they sum to total.

    layer: wrong layers trusted. lag: stale because of memory. boundary: flips caused by noise.
    Shadow mode: nothing is evicted, and scores are those of the full cache.
    The utility is the score, averaged over h steps to either side; synthetic recordings know theirs.
    Boundary holds the bias of that average, so it is printed for h = 4, 8 and 16 as well.
    Several recordings give their mean too, with 95% bootstrap intervals.

    Example: kvsim analyze alpha --trace traces/samples/smollm2-needle-512 --policy ema:0.8 --policy ema:0.8,over=step
    """
    from kvsim.intervals import best_alphas, over_traces
    from kvsim.tradeoff import decompose

    chosen = choose_budget(compression_ratio, budget)
    names = {str(one.with_budget(chosen)): str(one) for one in map(parse, policy or DEFAULT_POLICIES)}
    traces = open_traces(trace, more)
    known = utilities_of(traces, smoothed=smoothed)
    widths = [h] if only_h else sorted({*DEFAULT_H, h})
    by_trace: list[list[TradeOff]] = []
    for recording, utility in zip(traces, known, strict=True):
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            by_trace.append(decompose(recording, list(names), h=widths, utility=utility, progress=advance))
    rows = [row for own in by_trace for row in own]
    average, best = over_traces(rows, seed=seed), best_alphas(rows)
    if as_json:
        print_json({"mode": "shadow", "results": [row.summary() for row in rows], "mean": average, "best": best})
        return
    shown = h if known[0] is None else None
    for recording, own in zip(traces, by_trace, strict=True):
        title = f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}"
        _print(title, [row.summary() for row in own], shown, names)
    if len(traces) > 1:
        _print(f"mean of {len(traces)} recordings, 95% bootstrap intervals", average, shown, names)
    _print_best([row | {"policy": without_budget(row["policy"], chosen)} for row in best if row["h"] == shown])
    how = "true utilities" if shown is None else f"u: scores averaged over h = {shown} steps to either side"
    say(f"shadow mode: nothing is evicted; {how}; {budget_note(chosen)}")


def _print(title: str, rows: list[dict[str, Any]], h: int | None, names: dict[str, str]) -> None:
    say(title)
    table = narrow_table("policy")
    for part in PARTS:
        table.add_column(part, justify="right", no_wrap=True, vertical="bottom")
    others = sorted({row["h"] for row in rows} - {h})
    for width in others:
        table.add_column(f"boundary\nh={width}", justify="right", no_wrap=True, vertical="bottom")
    boundary = {(row["policy"], row["h"]): row["boundary"] for row in rows}
    for row in rows:
        if row["h"] == h:
            # An interval is of the digits of its mean, and both of three, which leaves room for the other columns.
            digits = 3 if "traces" in row else 4
            cells = [_cell(row[part], digits, row.get(f"{part}_low"), row.get(f"{part}_high")) for part in PARTS]
            cells += [_cell(boundary[row["policy"], width], digits) for width in others]
            table.add_row(PolicyText(names[row["policy"]]), *cells)
    print_table(table)


def _print_best(best: list[dict[str, Any]]) -> None:
    if not best:
        return
    say("alpha with the smallest")
    table = narrow_table("policy")
    for part in PARTS:
        table.add_column(part, justify="right")
    for row in best:
        cells = [best_alpha(row[part], row["alphas"]) for part in PARTS]
        table.add_row(PolicyText(row["policy"]), *cells)
    print_table(table)
    if any(edge for row in best for edge in row["at_edge"].values()):
        say(EDGE)


def _cell(value: float, digits: int, low: float | None = None, high: float | None = None) -> str:
    # Adding zero turns the minus zero of a rounded difference into zero.
    shown = [f"{round(one, digits) + 0.0:.{digits}f}" for one in (value, low, high) if one is not None]
    return shown[0] if len(shown) == 1 else f"{shown[0]}\n[{', '.join(shown[1:])}]"
