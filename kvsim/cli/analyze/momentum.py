"""``kvsim analyze momentum``: what of a change of the scores reaches the state."""

from typing import Annotated, Any

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.folding import PolicyText
from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, More, Quiet, Traces, budget_note, find_traces
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.momentum import DEFAULT_POLICIES
from kvsim.policy import parse
from kvsim.replay import choose_budget

__all__ = ["momentum"]

DEFAULT_SCORES = ("entropy",)
DEFAULT_NOISE = (0.82,)


def momentum(
    trace: Traces = None,
    more: More = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="POLICY", help=f"Linear rule; repeatable. By default: {' '.join(DEFAULT_POLICIES)}."
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(metavar="SCORER", help="Scorer in the place of the policy's own, such as vnorm; repeatable."),
    ] = None,
    noise: Annotated[
        list[float] | None,
        typer.Option(metavar="X", help="Relative size of noise on every layer's scores; repeatable."),
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show how much of a change of the scores reaches a linear rule's state, and its top-B set.

    Without --score and --noise: score=entropy, and noise of 0.82 (the paper's 82%).
    one layer, one step: one layer's update, or one step, has the other scores; before it the state is the policy's own.
    whole run: the other scores from the first step on, which is what another scorer does.
    difference: L2 norm of the change over that of the policy's own numbers.
    carried: the state's difference over the scores' difference, that is, how much of the change gets through.
    expected: what carried would be if the change had one size everywhere, the weight of the update in a settled state.
    With A the rule's alpha and K the layers that share its state: for ema:A one layer 1 - A, one step 1 - A^K.
    With over=step all layers make one update: one layer (1 - A) / K, one step 1 - A.
    same top-B: Jaccard of the highest B.
    Shadow mode: nothing is evicted, and scores are those of the full cache.

    Example: kvsim analyze momentum --trace traces/samples/smollm2-multineedle-256 --score vnorm --noise 0.82
    """
    from kvsim.momentum import momentum as measure

    chosen = choose_budget(compression_ratio, budget)
    scores, sizes = score or [], noise or []
    if not scores and not sizes:
        scores, sizes = list(DEFAULT_SCORES), list(DEFAULT_NOISE)
    names = {str(one.with_budget(chosen)): str(one) for one in map(parse, policy or DEFAULT_POLICIES)}
    results: list[dict[str, Any]] = []
    for location in find_traces([*(trace or []), *(more or [])]):
        recording = open_trace(location)
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            found = measure(recording, list(names), scores=scores, noise=sizes, seed=seed, progress=advance)
        rows = [one.summary() for one in found]
        results += rows
        if not as_json:
            say(f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}")
            _print(rows, names)
    if as_json:
        print_json({"mode": "shadow", "seed": seed, "results": results})
        return
    say(f"shadow mode: nothing is evicted; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    table = narrow_table("policy")
    table.add_column("change", overflow="fold", vertical="bottom")
    table.add_column("in", no_wrap=True, vertical="bottom")
    columns = ["difference\nof scores", "of\nstate", "carried", "expected", "same top-B\nof scores", "of\nstate"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        first = PolicyText(names[row["policy"]]), Text(row["change"])
        same = _share(row["top_scores"])
        table.add_row(*first, "one layer", *_cells(row, "layer", "layer"), _share(row["expected_layer"]), "", "")
        step = *_cells(row, "step", "step"), _share(row["expected_step"]), same, _share(row["top_step"])
        table.add_row("", "", "one step", *step)
        table.add_row("", "", "whole run", *_cells(row, "step", "run"), "", same, _share(row["top_run"]))
    print_table(table)


def _cells(row: dict[str, Any], scores: str, state: str) -> list[str]:
    return [_share(row[name]) for name in (f"scores_{scores}", f"state_{state}", f"carried_{state}")]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 1000 else f"{value:.3g}"
