"""``kvsim analyze floor``: which policies keep less than random eviction."""

from dataclasses import asdict
from typing import Annotated

import typer

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
    Shadow,
    Traces,
    budget_note,
    open_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.floor import SEEDS, Floor, random_floor
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay_many

__all__ = ["floor", "verdict"]


def floor(
    policy: PolicyTexts,
    trace: Traces = None,
    more: More = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    shadow: Shadow = False,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Draws of random eviction.")] = SEEDS,
    engine: EngineName = DEFAULT_ENGINE,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Replay random eviction beside each policy, at equal groups and budget; mark those that keep less.

    A draw that happens to keep an attention sink keeps much more than others: draws spread widely.
    percentile: share of the draws that keep less than the policy; as much counts half.

    Example: kvsim analyze floor --trace traces/samples/smollm2-needle-512 --policy keydiff --policy streaming:4
    """
    chosen = choose_budget(compression_ratio, budget)
    policies = [parse(text) for text in policy]
    asked = [own.with_budget(chosen) for own in policies]
    found: list[list[Floor]] = []
    traces = open_traces(trace, more)
    places, left_out = runnable(traces, asked) if len(traces) > 1 else ([list(range(len(asked)))], [])
    for recording, own in zip(traces, places, strict=True):
        if not own:
            found.append([])
            continue
        results = replay_many(
            recording, [asked[place] for place in own], shadow=shadow, shadow_churn=False, raw=False, engine=engine
        )
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            found.append(random_floor(results, recording, seeds=seeds, engine=engine, progress=advance))
    if as_json:
        rows = [one.summary() for floors in found for one in floors]
        mode = "shadow" if shadow else "irreversible"
        print_json({"mode": mode, "results": rows, "left_out": [asdict(one) for one in left_out]})
        return
    for recording, own, floors in zip(traces, places, found, strict=True):
        if not own:
            continue
        say(f"{recording.path.name}: kept mass beside {seeds} draws")
        table = narrow_table("policy")
        for name in ("B", "kept\nmass", "random\nmean", "random\nmin", "random\nmax", "percentile"):
            table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
        table.add_column("below random", no_wrap=True, vertical="bottom")
        for place, one in zip(own, floors, strict=True):
            masses = one.kept_mass, one.random_mean, one.random_min, one.random_max
            numbers = [f"{one.budget:g}", *(f"{mass:.3f}" for mass in masses), f"{one.percentile:.0%}"]
            table.add_row(PolicyText(str(policies[place])), *numbers, verdict(one))
        print_table(table)
    say_left_out(left_out)
    say(f"{'shadow mode: nothing is evicted' if shadow else 'irreversible; open loop'}; {budget_note(chosen)}")


def verdict(one: Floor) -> str:
    """Say in a table whether a policy is below random."""
    if one.below_all:
        return "every draw"
    return "the mean" if one.below else "-"
