"""``kvsim fidelity``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvsim_traces import Trace, open_trace
from rich.text import Text

from kvsim.cli.models import Device, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, More, Quiet, Traces, find_traces
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say, write_json
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget, replay

if TYPE_CHECKING:
    from kvsim.fidelity import Fidelity

__all__ = ["fidelity"]

COLUMNS = {
    "budget": "B",
    "jaccard": "Jac-\ncard",
    "jaccard_last": "at\nend",
    "random_last": "null:\nrandom",
    "oldest_last": "null:\noldest",
    "same_evictee": "same\nevictee",
    "kept_mass_open": "kept mass\nreplayed",
    "kept_mass": "and\nreally",
    "total_variation": "total\nvariation",
}


def fidelity(
    model: ModelPath,
    policy: Annotated[list[str], typer.Option(metavar="POLICY", help="Policy string such as ema:0.9; repeatable.")],
    trace: Traces = None,
    more: More = None,
    compression_ratio: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED, in [0, 1); repeatable; 0.9 by default."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Compare with token-by-token decoding instead of the closed loop.")
    ] = False,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="New JSON file for a row of each result, steps included.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare open-loop replays with closed-loop ones, to see how far their sets can be trusted.

    The nulls start from the run's own first eviction, which an open loop has right for free, and then drop tokens at
    random, or the oldest: what an open loop must beat.

    Example: kvsim fidelity --model SmolLM2-135M-Instruct --trace traces/samples/smollm2-needle-512 --policy ema:0.8
    """
    need_torch("kvsim fidelity", "live")
    budgets = [choose_budget(ratio, None) for ratio in compression_ratio or ["0.9"]]
    policies = [parse(text).with_budget(budget) for budget in budgets for text in policy]
    if out is not None and out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    traces = [open_trace(location) for location in find_traces([*(trace or []), *(more or [])])]
    for recording in traces:
        if recording.capture == "scores":
            raise KvsimError(f"{recording.path}: a 'scores' capture has no attention of single heads to compare")
    network, tokenizer = load(model, dtype="float32", device=device, quiet=quiet or as_json)

    from kvsim.live.match import check_model

    for recording in traces:
        check_model(recording, network, tokenizer)
    found: list[Fidelity] = []
    for recording in traces:
        with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
            own = _compare(network, recording, policies, live=live, advance=advance)
        found += own
        if not as_json:
            _print(recording, policies, own)
    rows = [one.summary() | {"jaccard_steps": one.steps.tolist()} for one in found]
    if out is not None:
        write_json({"results": rows}, out)
    if as_json:
        print_json({"results": rows})
    else:
        against = "token-by-token decoding" if live else "closed loop"
        say(f"open loop against {against}; nulls start from the run's first set and drop at random, or the oldest")


def _compare(network: Any, recording: Trace, policies: list[Policy], *, live: bool, advance: Any) -> "list[Fidelity]":
    from kvsim.fidelity import fidelity as compare
    from kvsim.live import decode, prefill
    from kvsim.live.closed_loop import closed_loop
    from kvsim.live.prefix import recorded_tokens

    tokens = recorded_tokens(recording)
    prompt, forced = tokens[: recording.prompt_length], tokens[recording.prompt_length :]
    prefix = prefill(network, prompt, eligible=recording.eligible_layers, trace=recording)
    if live:
        runs = decode(network, [prefix] * len(policies), policies, steps=len(forced), force=forced, progress=advance)
        pairs = [(run.result(), run.sequence.trace) for run in runs]
    else:
        loops = closed_loop(network, prefix, forced, policies, progress=advance)
        for one in loops:
            if not one.exact:
                raise KvsimError(f"{one.policy}: the closed loop did not settle in {len(one.passes)} passes")
        pairs = [(one.result, one.trace) for one in loops]
    return [
        compare(replay(recording, policy, shadow_churn=False), result, recording, seen)
        for policy, (result, seen) in zip(policies, pairs, strict=True)
    ]


def _print(recording: Trace, policies: list[Policy], found: "list[Fidelity]") -> None:
    say(f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}")
    table = narrow_table("policy")
    for title in COLUMNS.values():
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for policy, one in zip(policies, found, strict=True):
        row = one.summary()
        cells = [f"{row['budget']:.10g}"]
        cells += ["-" if row[name] is None else f"{row[name]:.3f}" for name in list(COLUMNS)[1:]]
        table.add_row(Text(str(policy)), *cells)
    print_table(table)
