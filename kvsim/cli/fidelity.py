"""``kvsim fidelity``."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from kvsim_traces import Trace

from kvsim.cli.folding import PolicyText
from kvsim.cli.models import Device, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, More, PolicyTexts, Quiet, Ratios, Traces, at_ratios, budget_notes, open_traces
from kvsim.cli.output import narrow_table, new_file, print_json, print_table, progress_bar, say, write_json
from kvsim.errors import KvsimError
from kvsim.fidelity import Fidelity, check_recording
from kvsim.fidelity import fidelity as compare
from kvsim.policy import Policy
from kvsim.replay import replay

__all__ = ["fidelity"]

COLUMNS = {
    "jaccard": "Jacc.",
    "random": "null:\nrandom",
    "oldest": "null:\noldest",
    "jaccard_last": "at\nend",
    "random_last": "null:\nrandom",
    "oldest_last": "null:\noldest",
    "same_evictee": "same\nevictee",
    "same_evictee_random": "by\nchance",
    "kept_mass": "kept\nmass",
    "kept_mass_error": "error",
    "total_variation": "total\nvar.",
    "total_variation_most": "most\nlayer",
}


def fidelity(
    model: ModelPath,
    policy: PolicyTexts,
    trace: Traces = None,
    more: More = None,
    compression_ratio: Ratios = None,
    live: Annotated[
        bool, typer.Option("--live", help="Compare with token-by-token decoding instead of the closed loop.")
    ] = False,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="New JSON file of the rows, for `kvsim chart fidelity` too.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare open-loop replays with closed-loop ones, to see how far their sets can be trusted.

    The nulls start from the run's own first eviction, which an open loop has right for free, and then drop tokens at
    random, or the oldest: what an open loop must beat. Kept mass is the run's, error what the replay claims beside it
    (absolute, averaged over steps). Total variation: between the attention the replay reads and the run's, 0 to 1.

    Example: kvsim fidelity --model SmolLM2-135M-Instruct --trace traces/samples/smollm2-needle-512 --policy ema:0.8
    """
    need_torch("kvsim fidelity", "live")
    policies = at_ratios(policy, compression_ratio)
    traces = open_traces(trace, more)
    for recording in traces:
        check_recording(recording)
    with contextlib.nullcontext() if out is None else new_file(out):
        network, tokenizer = load(model, dtype="float32", device=device, quiet=quiet or as_json)

        from kvsim.live.match import check_model

        for recording in traces:
            check_model(recording, network, tokenizer)
        rows: list[dict[str, Any]] = []
        for recording in traces:
            with progress_bar(recording.path.name, quiet=quiet or as_json) as advance:
                own = _compare(network, recording, policies, live=live, advance=advance)
            rows += [one.summary() for one in own]
            if not as_json:
                _print(recording, policies, own)
        if out is not None:
            write_json({"results": rows}, out)
    if as_json:
        print_json({"results": rows})
        return
    against = "token-by-token decoding" if live else "closed loop"
    say(f"open loop against {against}; nulls start from the run's first eviction; {budget_notes(compression_ratio)}")


def _compare(network: Any, recording: Trace, policies: list[Policy], *, live: bool, advance: Any) -> list[Fidelity]:
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


def _print(recording: Trace, policies: list[Policy], found: list[Fidelity]) -> None:
    say(f"{recording.path.name}: prompt {recording.prompt_length}, steps {recording.num_steps}")
    table = narrow_table("policy", gap=1)
    for title in ("B", *COLUMNS.values()):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for policy, one in zip(policies, found, strict=True):
        values = [getattr(one, name) for name in COLUMNS]
        cells = [f"{one.budget:.10g}", *("-" if value is None else f"{value:.3f}" for value in values)]
        table.add_row(PolicyText(str(dataclasses.replace(policy, budget=None))), *cells)
    print_table(table)
