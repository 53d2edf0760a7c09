"""``kvsim analyze transfer``: whether an EMA helps other scorers than attention."""

import dataclasses
from typing import Annotated, Any

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.analyze.scorers import Scorers, print_left_out
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    More,
    Quiet,
    Traces,
    budget_note,
    find_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.plan import GroupKind
from kvsim.replay import choose_budget
from kvsim.transfer import DEFAULT_ALPHAS, MEASURES, Transfer

__all__ = ["transfer"]


def transfer(
    trace: Traces = None,
    more: More = None,
    scorer: Scorers = None,
    alpha: Annotated[
        list[float] | None, typer.Option(metavar="A", help="Coefficient of the EMA; repeatable. 0.8 by default.")
    ] = None,
    group: Annotated[GroupKind, typer.Option(help="Who shares a retained set.")] = "shared",
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    engine: EngineName = DEFAULT_ENGINE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare single, ema and cumulative for every scorer, at equal groups and budget, with differences from single.

    In a shared group single ranks by the last layer alone, so an EMA changes layer weights too.
    With --group layer it adds memory of steps and nothing else.
    newest kept: share of steps whose own token is retained; near 0, the retained set is frozen.

    Example: kvsim analyze transfer --trace traces/samples/smollm2-multineedle-256 --group layer --alpha 0.8
    """
    from kvsim.transfer import transfer as measure

    chosen = choose_budget(compression_ratio, budget)
    found: list[Transfer] = []
    for location in find_traces([*(trace or []), *(more or [])]):
        recording = open_trace(location)
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            found.append(
                measure(
                    recording,
                    scorer,
                    alphas=alpha or DEFAULT_ALPHAS,
                    group=group,
                    budget=str(chosen),
                    engine=engine,
                    progress=advance,
                )
            )
    if as_json:
        print_json({"mode": "irreversible", "loop": "open", "results": [dataclasses.asdict(one) for one in found]})
        return
    for one in found:
        note = "; approximate (scores capture)" if one.approximate else ""
        say(f"{one.trace_name}: group {one.group}, B = {one.budget}{note}")
        _print(one.rows)
        print_left_out(one.left_out)
    say(f"irreversible; open loop; changes: from single with the same scorer; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]]) -> None:
    table = narrow_table("scorer")
    table.add_column("rule", no_wrap=True, vertical="bottom")
    for measure in MEASURES:
        table.add_column(measure.replace("_", "\n"), justify="right", no_wrap=True, vertical="bottom")
        if measure != "newest_kept":
            table.add_column("change", justify="right", no_wrap=True, vertical="bottom")
    before = None
    for row in rows:
        cells = []
        for measure in MEASURES:
            cells.append(_cell(row[measure]))
            if measure != "newest_kept":
                cells.append(_cell(row[f"{measure}_change"], sign="+"))
        table.add_row(Text("" if row["scorer"] == before else row["scorer"]), Text(row["rule"]), *cells)
        before = row["scorer"]
    print_table(table)


def _cell(value: float | None, sign: str = "-") -> str:
    return "-" if value is None else f"{round(value, 3) + 0.0:{sign}.3f}"
