"""``kvsim analyze stability``: Proposition 1 beside what recordings show."""

from typing import Annotated, Any

import typer

from kvsim.cli.folding import PolicyText
from kvsim.cli.options import AsJson, BudgetText, CompressionRatio, More, Quiet, Traces, budget_note, open_traces
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.policy import parse
from kvsim.replay import choose_budget
from kvsim.stability import DEFAULT_POLICIES

__all__ = ["stability"]


def stability(
    trace: Traces = None,
    more: More = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="POLICY", help=f"Linear rule; repeatable. By default: {' '.join(DEFAULT_POLICIES)}."
        ),
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    shuffles: Annotated[int, typer.Option(metavar="N", help="Random orders of the steps to compare with.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random orders.")] = 0,
    pairs: Annotated[bool, typer.Option("--pairs", help="With --json: every pair too.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show how often a linear rule misranks pairs near the boundary, beside what InertiaKV's Proposition 1 allows.

    Pairs: one member at ranks B-8 … B and one at B+1 … B+9 of the time mean, over prompt positions.
    A per step: what is left of the old state after a step, A of Proposition 1: alpha^K for ema:alpha, which updates
    once for each of the K layers; alpha with over=step; 1 for cumulative, which forgets nothing.
    misranked: share of the last half of the steps at which the state has the order of the means reversed.
    shuffled: the same with the steps in random order, so that nothing depends on time.
    limit, finite: Proposition 1's bound on misranked, after many steps, and the one for every step; median over pairs.
    viol. (violated): pairs misranked more often than a bound, of those whose bound is below 1; others say nothing.
    lag-1: median autocorrelation of the gap of two scores, and of one score; Proposition 1 assumes 0.
    Shadow mode: nothing is evicted, and scores are those of the full cache.

    Example: kvsim analyze stability --trace traces/samples/smollm2-needle-512 --policy ema:0.8,over=step
    """
    from kvsim.stability import rank_stability

    chosen = choose_budget(compression_ratio, budget)
    names = {str(one.with_budget(chosen)): str(one) for one in map(parse, policy or DEFAULT_POLICIES)}
    recordings = open_traces(trace, more)
    results: list[dict[str, Any]] = []
    for recording in recordings:
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            found = rank_stability(recording, list(names), shuffles=shuffles, seed=seed, progress=advance)
        rows = [one.summary() for one in found]
        if as_json:
            if pairs:
                rows = [
                    row | {"pair_rows": [pair.summary() for pair in one.pairs]}
                    for row, one in zip(rows, found, strict=True)
                ]
            results += rows
            continue
        first = recording.num_steps // 2 + 1
        say(
            f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}, "
            f"measured from step {first}"
        )
        _print(rows, names)
    if as_json:
        print_json({"mode": "shadow", "shuffles": shuffles, "seed": seed, "results": results})
        return
    say(f"shadow mode: nothing is evicted; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]], names: dict[str, str]) -> None:
    table = narrow_table("policy")
    bounds = [f"{bound}{name}" for bound in ("limit\n", "finite\n") for name in ("median", "viol.")]
    columns = ["A per\nstep", "pairs", "misranked", "shuffled", *bounds, "lag-1\ngap", "lag-1\none"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        cells = [f"{row['step_decay']:.2g}", str(row["pairs"])]
        cells += [_cell(row["misranked"]), _cell(row["misranked_shuffled"])]
        for bound in (row["asymptotic"], row["finite"]):
            telling = bound["pairs"] - bound["vacuous"]
            violated = f"{bound['violated']}/{telling}" if bound["pairs"] else "-"
            cells += ["-" if bound["median"] is None else f"{bound['median']:.2g}", violated]
        cells += [_cell(row["autocorrelation"]), _cell(row["autocorrelation_tokens"])]
        table.add_row(PolicyText(names[row["policy"]]), *cells)
    print_table(table)


def _cell(value: float | None) -> str:
    # Adding zero turns the minus zero of a rounded number into zero.
    return "-" if value is None else f"{round(value, 3) + 0.0:.3f}"
