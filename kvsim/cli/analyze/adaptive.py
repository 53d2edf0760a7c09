"""``kvsim analyze adaptive``: which alphas adaptive rules choose, and what that is worth."""

from typing import Annotated, Any

import typer

from kvsim.cli.analyze.best import EDGE
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

__all__ = ["adaptive"]

DEFAULT_ALPHA = 0.8


def adaptive(
    trace: Traces = None,
    more: More = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="POLICY", help="Adaptive rule; repeatable. By default each, over=both and over=step."
        ),
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    h: Annotated[int, typer.Option("--h", metavar="STEPS", help="Half width of the moving average.")] = 8,
    smoothed: Smoothed = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Follow the alpha of adaptive rules, beside fixed ones: the default of 0.8, and the best in hindsight.

    Kept mass is that of irreversible eviction, and so are the first five columns on alpha: its mean, least and
    most, the steps at which it changed, and the first of them. The shadow loss is that of a cache that evicts
    nothing: the utility that its sets lose. The utility is the score, averaged over h steps to either side;
    synthetic recordings know theirs. Below stands what alpha was chosen by.

    Example: kvsim analyze adaptive --trace traces/samples/smollm2-needle-512 --policy adaptive:tracking,over=step
    """
    from kvsim.adaptation import DEFAULT_ADAPTIVE, adaptation, fixed_beside, hindsight

    chosen = choose_budget(compression_ratio, budget)
    own = [parse(one) for one in policy or DEFAULT_ADAPTIVE]
    everything = list(dict.fromkeys([*own, *fixed_beside(own)]))
    rows: list[dict[str, Any]] = []
    best: list[dict[str, Any]] = []
    traces = open_traces(trace, more)
    for recording, utility in zip(traces, utilities_of(traces, smoothed=smoothed), strict=True):
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            found = adaptation(recording, everything, budget=str(chosen), h=h, utility=utility, progress=advance)
        rows += [row.summary() for row in found]
        best += hindsight(found)
        if not as_json:
            say(f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}")
            names = {row.policy: str(one) for row, one in zip(found, everything, strict=True)}
            told = [one | {"family": without_budget(one["family"], chosen)} for one in hindsight(found)]
            _print([row.summary() for row in found], hindsight(found), names)
            _print_hindsight(told)
    if as_json:
        print_json({"loop": "open", "h": h, "results": rows, "hindsight": best})
        return
    if any(edge for one in best for edge in one["at_edge"].values()):
        say(EDGE)
    say(f"open loop; alpha of irreversible eviction, and of shadow mode; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]], best: list[dict[str, Any]], names: dict[str, str]) -> None:
    table = narrow_table("policy")
    headings = ["kept\nmass", "shadow\nloss", "alpha\nmean", "min", "max", "switches", "first\nswitch"]
    for heading in [*headings, "shadow\nmean"]:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    notable = {(one["family"], one[f"{of}_alpha"]) for one in best for of in ("kept_mass", "shadow_loss")}
    for row in rows:
        if row["alpha"] in (None, DEFAULT_ALPHA) or (row["family"], row["alpha"]) in notable:
            alive, shadow = row["irreversible"], row["shadow"]
            first = "-" if alive["first_switch"] is None else str(alive["first_switch"])
            cells = [f"{row['kept_mass']:.4f}", f"{row['shadow_loss']:.4f}", *_range(alive)]
            cells += [str(alive["switches"]), first, f"{shadow['alpha_mean']:.2f}"]
            table.add_row(PolicyText(names[row["policy"]]), *cells)
    print_table(table)
    for row in rows:
        signals = [
            ", ".join([mode, *(f"{name} {value:.3g}" for name, value in row[mode]["signals"].items())])
            for mode in ("irreversible", "shadow")
            if row[mode]["signals"]
        ]
        if signals:
            say(f"{names[row['policy']]}: {'; '.join(signals)}")


def _print_hindsight(best: list[dict[str, Any]]) -> None:
    for one in best:
        kept, lost = (
            f"{one[of]:.4f} at {one[f'{of}_alpha']:g}" + " (edge)" * one["at_edge"][of]
            for of in ("kept_mass", "shadow_loss")
        )
        say(f"best of {one['family']} in hindsight: kept mass {kept}, shadow loss {lost}")


def _range(path: dict[str, Any]) -> list[str]:
    return [f"{path[name]:.2f}" for name in ("alpha_mean", "alpha_min", "alpha_max")]
