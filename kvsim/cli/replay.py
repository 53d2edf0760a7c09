"""``kvsim replay``."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from kvsim_traces import Trace
from rich import box
from rich.table import Table

from kvsim.budget import Budget
from kvsim.cli.closed_loop import Start, run_closed_loop
from kvsim.cli.folding import PolicyText
from kvsim.cli.left_out import LeftOut, runnable, say_left_out
from kvsim.cli.models import Device
from kvsim.cli.options import (
    AsJson,
    BudgetText,
    CompressionRatio,
    EngineMode,
    EngineName,
    More,
    PolicyTexts,
    Quiet,
    Shadow,
    Traces,
    budget_note,
    open_traces,
)
from kvsim.cli.output import print_json, print_table, progress_bar, say, stderr
from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget, replay_many
from kvsim.result import Result

__all__ = ["replay"]

COLUMNS = {
    "budget": "B",
    "retained": "held",
    "cache_size": "cache\nsize",
    "admitted": "admit-\nted",
    "kept_mass": "kept\nmass",
    "oracle_bound": "upper\nbound",
    "oracle_gap": "gap to\nbound",
    "churn": "churn",
    "shadow_churn": "shadow\nchurn",
    "raw_churn": "raw\nchurn",
    "raw_agreement": "raw\nagreem.",
    "raw_top_evicted": "raw-top\nevicted",
    "output_error": "output\nerror",
    "ties": "ties",
}


def replay(
    policy: PolicyTexts,
    trace: Traces = None,
    more: More = None,
    compression_ratio: CompressionRatio = None,
    budget: BudgetText = None,
    engine: EngineName = DEFAULT_ENGINE,
    mode: EngineMode = "exact",
    shadow: Shadow = False,
    store_rows: Annotated[
        bool, typer.Option("--store-rows", help="Keep attention recomputed from queries and keys beside the trace.")
    ] = False,
    closed_loop: Annotated[
        bool, typer.Option("--closed-loop", help="Run the model again under each policy's sets until they settle.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="For --closed-loop: the recorded model.")] = None,
    max_passes: Annotated[int | None, typer.Option(help="For --closed-loop: stop after so many passes.")] = None,
    prefix: Annotated[
        Start, typer.Option(help="For --closed-loop: read the prompt again, or take its keys from a qkv recording.")
    ] = "prefill",
    device: Device = None,
    dtype: Annotated[str | None, typer.Option(help="For --closed-loop: number type, float32 by default.")] = None,
    out: Annotated[Path | None, typer.Option(help="New directory for Parquet files of the results.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Replay policies on recordings and print what they kept and lost.

    Open loop: the recorded hidden states are held fixed; exact for the first eviction, approximate after it.
    --closed-loop runs the model over all steps at once under each policy's sets, and again until no set changes:
    then they are those of live decoding of the recorded tokens.

    With several recordings, those that a policy cannot run on are left out for it, and named on stderr.

    Example: kvsim replay --trace traces/samples/smollm2-needle-512 --policy ema:0.9 --policy tova
    """
    get_engine(engine)
    policies = [parse(text) for text in policy]
    chosen = choose_budget(compression_ratio, budget)
    if closed_loop and (shadow or store_rows or engine != DEFAULT_ENGINE or mode != "exact"):
        raise KvsimError("--closed-loop does not take --shadow, --store-rows, --engine or --mode")
    if not closed_loop and (model is not None or max_passes is not None or prefix != "prefill"):
        raise KvsimError("--model, --max-passes and --prefix are for --closed-loop")
    if out is not None and out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new directory")
    traces = open_traces(trace, more)
    asked = [wanted.with_budget(chosen) for wanted in policies]
    places = [list(range(len(asked)))] * len(traces)
    left_out: list[LeftOut] = []
    if store_rows or len(traces) > 1:
        # All of them before anything is written or run; for a single recording the replay itself does so.
        places, left_out = runnable(traces, asked)
    if closed_loop and left_out:
        raise KvsimError(left_out[0].why)
    if store_rows:
        for recording in traces:
            if recording.capture in ("qk", "qkv"):
                with progress_bar(f"storing rows of {recording.path.name}", quiet=quiet or as_json) as advance:
                    recording.store_rows(progress=advance)

    if closed_loop:
        if model is None:
            raise KvsimError("--closed-loop runs the recorded model again: name it with --model")
        results = run_closed_loop(
            traces,
            policies,
            chosen,
            model=model,
            start=prefix,
            max_passes=max_passes,
            device=device,
            dtype=dtype,
            as_json=as_json,
            quiet=quiet,
        )
        _write(results, out)
        return
    by_trace: list[list[Result]] = []
    for recording, own in zip(traces, places, strict=True):
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            runs = [asked[place] for place in own]
            by_trace.append(replay_many(recording, runs, shadow=shadow, engine=engine, mode=mode, progress=advance))
    results = [result for own in by_trace for result in own]
    if as_json:
        _write(results, out)
        print_json({"results": [result.summary() for result in results], "left_out": [asdict(one) for one in left_out]})
        return
    for recording, own, found in zip(traces, places, by_trace, strict=True):
        if found:
            _print_table(recording, [policies[place] for place in own], found, chosen)
    say_left_out(left_out)
    _write(results, out)


def _write(results: list[Result], out: Path | None) -> None:
    if out is not None:
        from kvsim.tables import write_parquet

        write_parquet(results, out)
        say(f"wrote {out}", to=stderr)


def _print_table(trace: Trace, policies: list[Policy], results: list[Result], budget: Budget) -> None:
    notes = ["shadow mode: nothing is evicted" if results[0].mode == "shadow" else "irreversible", "open loop"]
    if any(policy.budget is None and policy.head.name != "full" for policy in policies):
        notes.append(budget_note(budget))
    if any(result.approximate for result in results):
        notes.append("~ scores are head means, not renormalised over what is visible: approximate")
    if any(result.plan.admission for result in results):
        notes.append("admission acts on the prompt too, whose hidden states a replay leaves as they were recorded")
    if any(result.plan.selection for result in results):
        notes.append("select: kept mass and output error are those of what is read")
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)
    table.add_column("policy", overflow="fold", min_width=16)
    rows = [result.summary() for result in results]
    shown = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    if all(abs(row["retained"] - row["budget"]) < 1 for row in rows):
        shown.remove("retained")
    if not any(result.plan.admission for result in results):
        shown.remove("cache_size")
    for name in shown:
        table.add_column(COLUMNS[name], justify="right", no_wrap=True, vertical="bottom")
    for policy, row in zip(policies, rows, strict=True):
        cells = [_cell(name, row[name]) for name in shown]
        table.add_row(PolicyText(("~ " if row["approximate"] else "") + str(policy)), *cells)
    say(
        f"{trace.path.name}: prompt {trace.prompt_length}, steps {trace.num_steps}, "
        f"{len(trace.eligible_layers)} layers, {trace.num_heads} heads ({trace.num_kv_heads} KV)"
    )
    print_table(table)
    say("; ".join(notes))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "retained":
        return f"{value:.0f}"
    if name == "oracle_gap":
        return f"{value:.2%}"
    if name in ("budget", "ties"):
        return f"{value:.10g}" if float(value).is_integer() else f"{value:.2g}"
    return f"{value:.3f}"
