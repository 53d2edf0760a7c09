"""``kvsim analyze oracle``: how far policies are from the best and from random eviction."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvsim.cli.analyze.floor import verdict
from kvsim.cli.folding import PolicyText
from kvsim.cli.left_out import runnable, say_left_out
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    More,
    PolicyTexts,
    Quiet,
    Traces,
    budget_note,
    open_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.floor import SEEDS, Floor, random_floor
from kvsim.optima import Beside, Choice, beside_optimum
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay_many

__all__ = ["oracle"]

BEST = {
    "bound": "certified upper bound",
    "exact": "exact optimum",
    "auto": "exact optimum where that is quick, else a certified upper bound",
}


def oracle(
    policy: PolicyTexts,
    trace: Traces = None,
    more: More = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    method: Annotated[
        Choice,
        typer.Option(help="Certified upper bound, exact optimum (a linear program), or exact where that is quick."),
    ] = "bound",
    pooled: Annotated[
        bool, typer.Option("--pooled/--no-pooled", help="Compare with budgets pooled over all groups too.")
    ] = True,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Draws of random eviction.")] = SEEDS,
    engine: EngineName = DEFAULT_ENGINE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Put each policy between the offline optimum and random eviction, at equal groups and budget.

    best: the most mass that could be kept with the policy's own groups and budgets.
    pooled best: the same when all groups share their budgets' sum and divide it anew at every step,
    always as an upper bound; policies that allot budgets to groups cannot beat it.
    gap: 1 - kept mass / best. Policies that let the cache grow have none.
    --json also gives kept mass step by step, of the policy and of the optimum's schedule.

    Example: kvsim analyze oracle --trace traces/samples/smollm2-needle-512 --policy ema:0.8,over=step --policy tova
    """
    chosen = choose_budget(compression_ratio, budget)
    policies = [parse(text) for text in policy]
    asked = [own.with_budget(chosen) for own in policies]
    traces = open_traces(trace, more)
    rows: list[dict[str, Any]] = []
    places, left_out = runnable(traces, asked) if len(traces) > 1 else ([list(range(len(asked)))], [])
    for recording, own_places in zip(traces, places, strict=True):
        if not own_places:
            continue
        results = replay_many(
            recording, [asked[place] for place in own_places], shadow_churn=False, raw=False, engine=engine
        )
        floors = random_floor(results, recording, seeds=seeds, engine=engine)
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            best = beside_optimum(results, recording, method, steps=as_json, progress=advance)
        divided = (
            beside_optimum(results, recording, "bound", pooled=True, steps=False) if pooled else [None] * len(best)
        )
        own = [_row(*parts) for parts in zip(floors, best, divided, strict=True)]
        rows += own
        if not as_json:
            names = [str(policies[place]) for place in own_places]
            say(f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}")
            _print(names, own, floors, method)
    if as_json:
        print_json(
            {"mode": "irreversible", "method": method, "results": rows, "left_out": [asdict(one) for one in left_out]}
        )
        return
    say_left_out(left_out)
    say(f"best: {BEST[method]}; random: mean of {seeds} draws; irreversible; open loop; {budget_note(chosen)}")


def _row(beside: Floor, own: Beside, pooled: Beside | None) -> dict[str, Any]:
    row = {**beside.summary(), "comparable": not own.why_not, "best_is": own.method, "best": own.best, "gap": own.gap}
    row |= {"pooled_best": pooled and pooled.best, "pooled_gap": pooled and pooled.gap}
    row |= {"kept_mass_steps": None, "optimum_steps": None}
    if own.optimum_steps is not None:
        row |= {"kept_mass_steps": own.kept_mass_steps.tolist(), "optimum_steps": own.optimum_steps.tolist()}
    return row


def _print(names: list[str], rows: list[dict[str, Any]], floors: list[Floor], method: Choice) -> None:
    table = narrow_table("policy")
    divided = any(row["pooled_best"] is not None and row["group"] != "shared" for row in rows)
    columns = ["group", "B", "kept\nmass", "best", "gap"] + ["pooled\nbest", "pooled\ngap"] * divided + ["random"]
    if method == "auto":
        columns.insert(3, "best is")
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("group", "best is") else "right", no_wrap=True, vertical="bottom"
        )
    table.add_column("below\nrandom", no_wrap=True, vertical="bottom")
    for name, row, beside in zip(names, rows, floors, strict=True):
        cells = [row["group"], f"{row['budget']:g}", f"{row['kept_mass']:.3f}"]
        cells += [row["best_is"] or "-"] * (method == "auto")
        for best, missed in [("best", "gap"), ("pooled_best", "pooled_gap")][: 1 + divided]:
            known = row[best] is not None
            cells += [f"{row[best]:.3f}", f"{row[missed]:.2%}"] if known else ["-", "-"]
        table.add_row(PolicyText(name), *cells, f"{row['random_mean']:.3f}", verdict(beside))
    print_table(table)
