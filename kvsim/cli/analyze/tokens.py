"""``kvsim analyze tokens``: which tokens a policy threw away, when, and what later queries would have given them."""

from typing import Annotated, Any

import typer
from kvsim_traces import open_trace
from rich.text import Text

from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineName,
    Quiet,
    Shadow,
    Traces,
    budget_note,
    find_traces,
)
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.engines import DEFAULT_ENGINE
from kvsim.errors import KvsimError
from kvsim.fates import fates_of, given_to, table_of
from kvsim.policy import parse
from kvsim.replay import choose_budget, replay

__all__ = ["tokens"]

SHOWN = 20


def tokens(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="Policy string such as ema:0.9.")],
    trace: Traces = None,
    group: Annotated[
        int, typer.Option(metavar="G", help="Retention group, from 0: of a layer, or of a KV head of a layer.")
    ] = 0,
    step: Annotated[
        int | None, typer.Option(metavar="T", help="Only the tokens that left after this step; 0: before the first.")
    ] = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    shadow: Shadow = False,
    engine: EngineName = DEFAULT_ENGINE,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Tokens shown; 20 by default, all with --json.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Say which tokens a policy threw away, those that were missed most first.

    mass: attention that the full cache's rows give the token over all steps, averaged over the group's
    layers and heads; mass later: the part of it from queries that could not see the token any more. Its
    sum over all tokens, divided by the number of steps, is 1 minus the group's kept mass.

    Example: kvsim analyze tokens ema:0.8 --trace traces/samples/smollm2-needle-512 --step 10
    """
    chosen = choose_budget(compression_ratio, budget)
    asked = parse(policy).with_budget(chosen)
    locations = find_traces(trace or [])
    if len(locations) > 1:
        raise KvsimError(f"tokens are those of one recording, got {len(locations)}")
    recording = open_trace(locations[0])
    with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
        result = replay(recording, asked, shadow=shadow, shadow_churn=False, engine=engine)
        fates = fates_of(result, group)
        frame = table_of(fates, recording, given_to(fates, recording, progress=advance))
    gone = frame.filter(frame["evicted_at" if fates.mode == "irreversible" else "first_left"] >= 0)
    if step is not None:
        gone = frame[fates.left(step)]
    gone = gone.sort("mass_later", descending=True, maintain_order=True)
    most = limit if limit is not None else gone.height if as_json else SHOWN
    rows = gone.head(most).rows(named=True)
    when = "in all" if step is None else f"after step {step}"
    if as_json:
        held = None if step is None else int(fates.held[step])
        about = {"trace": result.trace_name, "group": group, "label": fates.label, "step": step}
        print_json({**result.key, **about, "held": held, "left": gone.height, "tokens": rows})
        return
    say(f"{recording.path.name}: {gone.height} tokens left {when}; {fates.label}")
    if rows:
        _print(rows)
    mode = "shadow mode: nothing is evicted" if shadow else "irreversible"
    say(f"{mode}; open loop; {budget_note(chosen)}")


def _print(rows: list[dict[str, Any]]) -> None:
    names = {"id": "id", "evicted_at": "evicted\nat step", "first_left": "first\nleft at", "times_left": "times\nleft"}
    table = narrow_table("token" if "token" in rows[0] else "position")
    if "token" in rows[0]:
        table.add_column("position", justify="right", no_wrap=True, vertical="bottom")
    shown = [name for name in names if name in rows[0]]
    for name in [*(names[name] for name in shown), "mass", "mass\nlater"]:
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        first = [Text(repr(row["token"])), str(row["position"])] if "token" in row else [str(row["position"])]
        table.add_row(*first, *(str(row[name]) for name in shown), f"{row['mass']:.4f}", f"{row['mass_later']:.4f}")
    print_table(table)
