"""``kvsim chart``: the charts of `kvsim.charts`, from recordings and policies."""

from pathlib import Path
from typing import Annotated

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.chart_kinds import KINDS, RATIOS, Request, check_metric
from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, Quiet, Shadow, Traces, find_traces
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say, stderr
from kvsim.errors import KvsimError, unknown_name
from kvsim.replay import choose_budget

__all__ = ["chart"]


def chart(
    kind: Annotated[
        str | None, typer.Argument(metavar="KIND", help=f"One of: {', '.join(KINDS)}. Without one, they are explained.")
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TRACE|FILE]...", help="Traces, as after --trace; or the files of rows of a kind."),
    ] = None,
    trace: Traces = None,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", metavar="POLICY", help="Policy string such as ema:0.9; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ends with .html, .json (Vega-Lite), .png or .svg.")
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For kinds with a metric; kept_mass by default (heads: kept_fraction)."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="ORDER", help="For retention: position (the default) or utility.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="For retention: the raw top-B sets as well.")] = False,
    both: Annotated[
        bool, typer.Option("--both", help="For retention: with eviction, and below it in shadow mode.")
    ] = False,
    steps: Annotated[
        str | None, typer.Option(metavar="I-J", help="For retention: the steps shown, both included.")
    ] = None,
    shadow: Shadow = False,
    h: Annotated[int, typer.Option("--h", metavar="STEPS", help="For tradeoff: half width of the average.")] = 8,
    step: Annotated[
        int | None, typer.Option(metavar="T", help="For heads, head-sizes and layers: one step, not the mean over all.")
    ] = None,
    bound: Annotated[
        str | None, typer.Option(metavar="NAME", help="For stability: finite (the default) or asymptotic.")
    ] = None,
    scorer: Annotated[
        list[str] | None, typer.Option("--scorer", metavar="SCORER", help="For spectrum: as after score=; repeatable.")
    ] = None,
    ratios: Annotated[
        str,
        typer.Option(
            metavar="R,R,…", help="For budgets, cost, budget-axis: compression ratios, each the fraction REMOVED."
        ),
    ] = ",".join(RATIOS),
    positions: Annotated[
        str | None,
        typer.Option(metavar="I-J,K,…", help="For received and utility: the tokens, by position. For retention: I-J."),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(metavar="L", help="For received: one layer; the mean over layers by default.")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(metavar="G", help="One retention group, from 0. For received 0, for retention the mean of all."),
    ] = None,
    head: Annotated[
        list[str] | None, typer.Option(metavar="L.H", help="For utility: a layer and a query head of it; repeatable.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Draw a chart of recordings and policies into a file, or print it as Vega-Lite with --json.

    fidelity, needle-grid and prediction are drawn from files that `kvsim fidelity`, `eval` and `predict` wrote.
    Pictures (.png, .svg) need the extra charts, that is vl-convert-python.

    Example: kvsim chart retention --trace traces/samples/smollm2-needle-512 --policy ema:0.8,over=step --out map.html
    """
    if kind is None:
        _list(as_json)
        return
    if kind not in KINDS:
        raise unknown_name("kind of chart", kind, KINDS)
    if out is None and not as_json:
        raise KvsimError("name a file with --out FILE.html, or print the chart with --json")
    check_metric(kind, metric)
    from kvsim.charts.files import check_path, save
    from kvsim.charts.maps import MAX_CELLS

    if out is not None:
        check_path(out)
    named = [*(trace or []), *(more or [])]
    if KINDS[kind].reads_files and not named:
        raise KvsimError(f"{kind} is drawn from files of rows: name one")
    traces = [] if KINDS[kind].reads_files else [open_trace(location) for location in find_traces(named)]
    with progress_bar(kind, quiet=quiet or as_json) as advance:
        request = Request(
            traces=traces,
            files=[Path(name) for name in named] if KINDS[kind].reads_files else [],
            policies=policy or [],
            budget=choose_budget(compression_ratio, budget),
            metric=metric,
            sort=sort,
            shadow=shadow,
            raw=raw,
            both=both,
            steps=steps,
            h=h,
            bound=bound,
            scorers=scorer or [],
            ratios=tuple(ratios.split(",")),
            step=step,
            cells=MAX_CELLS if out is not None and out.suffix in (".png", ".svg") else None,
            positions=positions,
            layer=layer,
            group=group,
            heads=head or [],
            advance=advance,
        )
        drawn = KINDS[kind].draw(request)
    if out is not None:
        save(drawn, out)
        say(f"wrote {out}", to=stderr)
    if as_json:
        print_json(drawn.to_dict())


def _list(as_json: bool) -> None:
    if as_json:
        print_json({"kinds": [{"name": name, "doc": kind.doc} for name, kind in KINDS.items()]})
        return
    table = narrow_table("kind")
    table.add_column("shows")
    for name, kind in KINDS.items():
        table.add_row(Text(name), Text(kind.doc))
    print_table(table)
