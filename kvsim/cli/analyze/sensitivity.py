"""``kvsim analyze sensitivity``: can a run tell, while it decodes, that it depends on alpha."""

from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from kvsim.cli.analyze.best import EDGE, best_alpha
from kvsim.cli.analyze.utilities import Smoothed, utilities_of
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    More,
    Quiet,
    Traces,
    budget_note,
    open_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.observables import DEFAULT_ALPHA, DEFAULT_H, OBSERVABLES, SENSITIVITIES, TELLING_TRACES
from kvsim.replay import choose_budget

__all__ = ["sensitivity"]

COLUMNS = {
    "score_margin": "score\nmargin",
    "state_margin": "state\nmargin",
    "score_entropy": "score\nentropy",
    "disagreement": "disagr.",
    "raw_top_evicted": "raw-top\nevicted",
    "kept_mass_spread": "mass\nspread",
    "loss_spread": "loss\nspread",
    "kept_mass_tilt": "mass\ntilt",
}


def sensitivity(
    trace: Traces = None,
    more: More = None,
    alpha: Annotated[float, typer.Option(metavar="A", help="EMA that is observed.")] = DEFAULT_ALPHA,
    over: Annotated[Literal["both", "step", "layer"], typer.Option(help="Which EMA, as in ema:A,over=…")] = "both",
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    h: Annotated[int, typer.Option("--h", metavar="STEPS", help="Half width of the moving average.")] = DEFAULT_H,
    smoothed: Smoothed = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the bootstrap over traces.")] = 0,
    engine: EngineName = DEFAULT_ENGINE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Set what a run shows while it decodes against how much kept mass and loss depend on alpha.

    spread: largest less smallest over alpha 0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99. tilt: at 0.99 less at 0.
    Margins, entropy and loss are without eviction; disagreement and raw-top evicted with it.
    From 6 recordings on: correlations of the two; --json gives them from 3 on.

    Example: kvsim analyze sensitivity --trace 'traces/samples/*' --alpha 0.8
    """
    from kvsim.observables import correlate
    from kvsim.observables import sensitivity as measure

    chosen = choose_budget(compression_ratio, budget)
    traces = open_traces(trace, more)
    known = utilities_of(traces, smoothed=smoothed)
    found = []
    with progress_bar("recordings", quiet=quiet or as_json) as advance:
        for recording, utility in zip(traces, known, strict=True):
            found.append(
                measure(recording, alpha=alpha, over=over, h=h, utility=utility, budget=str(chosen), engine=engine)
            )
            advance(len(found), len(traces))
    correlations = correlate(found, seed=seed)
    rows = [one.summary() for one in found]
    if as_json:
        meanings = {"observables": OBSERVABLES, "sensitivities": SENSITIVITIES}
        print_json({**meanings, "results": rows, "correlations": correlations})
        return
    _print(rows)
    _print_correlations(correlations, len(rows))
    how = f"scores averaged over h = {h} steps to either side" if known[0] is None else "true utilities"
    if any(one.approximate for one in found):
        say("scores captures among them: approximate")
    say(f"observed: {found[0].rule.replace('alpha', f'{found[0].alpha:g}')}; u: {how}; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]]) -> None:
    table = narrow_table("recording")
    for head in (*COLUMNS.values(), "best,\nmass", "best,\nloss"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        best = [best_alpha(row[name], row["alphas"], "\n") for name in ("best_by_kept_mass", "best_by_loss")]
        table.add_row(Text(row["trace"]), *[_cell(row[name]) for name in COLUMNS], *best)
    print_table(table)
    if any(edge for row in rows for edge in row["at_edge"].values()):
        say(EDGE)


def _print_correlations(rows: list[dict[str, Any]], count: int) -> None:
    if count < TELLING_TRACES:
        say(f"correlations over recordings need at least {TELLING_TRACES} of them; those over fewer say nothing")
        return
    say(f"correlations over {count} recordings: 95% bootstrap intervals (too narrow for few), p of a permutation test")
    table = narrow_table("observable")
    table.add_column("with", no_wrap=True)
    for name in ("Spearman", "", "p", "Pearson", "", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for row in rows:
        cells = []
        for name in ("spearman", "pearson"):
            low, high = row[f"{name}_low"], row[f"{name}_high"]
            interval = "" if low is None else f"[{_cell(low, 2)}, {_cell(high, 2)}]"
            cells += [_cell(row[name], 2), interval, _cell(row[f"{name}_p"])]
        observable = "" if row["observable"] == before else row["observable"].replace("_", " ")
        before = row["observable"]
        table.add_row(observable, row["sensitivity"].replace("_", " "), *cells)
    print_table(table)


def _cell(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"
