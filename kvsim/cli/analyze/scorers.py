"""``kvsim analyze scorers``: how far each scorer's ranking is from attention's."""

from typing import Annotated, Any

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, More, Quiet, Traces, budget_note, find_traces
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.errors import KvsimError
from kvsim.replay import choose_budget
from kvsim.spectrum import READINGS, Spectrum

__all__ = ["Scorers", "print_left_out", "scorers"]

Scorers = Annotated[
    list[str] | None,
    typer.Option(
        "--scorer",
        metavar="SCORER",
        help="As after score=, such as learned:FILE; repeatable. By default all there are.",
    ),
]

COLUMNS = ("mean_of_layers", "layer_mean", "layer", "min", "max")


def scorers(
    trace: Traces = None,
    more: More = None,
    scorer: Scorers = None,
    layer: Annotated[int | None, typer.Option(metavar="N", help="Layer to show; half depth by default.")] = None,
    every: Annotated[int, typer.Option(metavar="N", help="Measure every N-th step, from the first.")] = 1,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Correlate every scorer with attention: Spearman's rho, and the Jaccard index of the top-B sets.

    Per layer, over all positions the step can see, averaged over steps. Nothing is evicted.
    Mean of layers: of each layer's own numbers. Layer mean: of the scores first, as a shared set ranks by.

    Example: kvsim analyze scorers --trace traces/samples/smollm2-needle-512 --scorer keydiff --scorer knorm --layer 15
    """
    from kvsim.spectrum import spectrum

    if every < 1:
        raise KvsimError(f"every must be at least 1 step, got {every}")
    chosen = choose_budget(compression_ratio, budget)
    found: list[Spectrum] = []
    for location in find_traces([*(trace or []), *(more or [])]):
        recording = open_trace(location)
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            steps = range(1, recording.num_steps + 1, every)
            found.append(spectrum(recording, scorer, budget=str(chosen), steps=steps, progress=advance))
    overviews = [one.overview(layer) for one in found]
    if as_json:
        print_json(
            {
                "mode": "shadow",
                "readings": READINGS,
                "budgets": {one.trace_name: one.budget for one in found},
                "results": [row for one in found for row in one.rows],
                "overview": [row for rows in overviews for row in rows],
                "left_out": [
                    {"trace": one.trace_name, "scorer": name, "reason": why}
                    for one in found
                    for name, why in one.left_out.items()
                ],
            }
        )
        return
    pace = "" if every == 1 else f", every {every} steps"
    for one, rows in zip(found, overviews, strict=True):
        say(f"{one.trace_name}: {len(one.layers)} layers, {len(one.steps)} steps{pace}, B = {one.budget}")
        _print(rows)
        print_left_out(one.left_out)
    if any(row["scorer"].startswith("knorm") for rows in overviews for row in rows):
        say("knorm is minus the key norm, as in kvpress; knorm:sign=plus keeps large keys")
    say(f"shadow mode: nothing is evicted; equal scores keep the newest; {budget_note(chosen)}")


def print_left_out(left_out: dict[str, str]) -> None:
    """List the scorers that a recording cannot give."""
    for name, why in left_out.items():
        say(f"left out: {name} ({why})")


def _print(rows: list[dict[str, Any]]) -> None:
    table = narrow_table("scorer")
    number = rows[0]["layer"] if rows else None
    heads = ("mean of\nlayers", "layer\nmean", f"layer\n{number}", "least\nlayer", "most\nlayer")
    for measure in ("rho", "J"):
        for head in heads:
            table.add_column(f"{measure}\n{head}", justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        cells = [_cell(row[f"{measure}_{column}"]) for measure in ("spearman", "top_jaccard") for column in COLUMNS]
        table.add_row(Text(row["scorer"]), *cells)
    print_table(table)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{round(value, 3) + 0.0:.3f}"
