"""``kvsim trace``: look at recordings, check and mend them, bring them in and out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from kvsim_traces import describe, export_npz, import_npz, open_trace, repair_trace, verify_trace
from rich.table import Table
from rich.text import Text

from kvsim.cli.options import AsJson, Quiet
from kvsim.cli.output import ErrorGroup, preview, print_json, print_table, progress_bar, say
from kvsim.errors import KvsimError

__all__ = ["app"]

app = typer.Typer(cls=ErrorGroup, help="Look at, check, mend, import and export recordings.", no_args_is_help=True)

TraceDir = Annotated[str, typer.Argument(metavar="TRACE", help="Trace directory.")]


@app.command()
def info(trace: TraceDir, as_json: AsJson = False) -> None:
    """Print what a recording holds and where it came from."""
    recording = open_trace(trace)
    facts = describe(recording)
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(facts, preview(recording)):
        table.add_row(name, Text(value))
    print_table(table)


def _facts(facts: dict[str, Any], said: str) -> Iterator[tuple[str, str]]:
    manifest = facts["manifest"]
    generation, check, model = manifest["generation"], manifest["check"], manifest["model"]
    yield "path", facts["path"]
    yield "hash", facts["hash"]
    yield "capture", f"{manifest['capture']}, {facts['bytes'] / 1e6:.1f} MB"
    state = "complete" if manifest["complete"] else f"INCOMPLETE, {manifest['planned_steps']} planned"
    yield "length", f"prompt {manifest['prompt_length']}, steps {manifest['committed_steps']} ({state})"
    eligible, layers = len(facts["eligible_layers"]), manifest["num_layers"]
    heads = f"{manifest['num_heads']} heads, {manifest['num_kv_heads']} KV heads"
    yield "layers", f"{layers} recorded, {eligible} eligible; {heads}, head dim {manifest['head_dim'] or '-'}"
    if model is not None:
        yield (
            "model",
            f"{model['name']} (config {_short(model['config_hash'])}, weights {_short(model['weights_hash'])})",
        )
    if manifest["tokenizer"] is not None:
        yield "tokenizer", f"{manifest['tokenizer']['name']} ({_short(manifest['tokenizer']['hash'])})"
    flags = ["end of sequence suppressed"] if generation["suppress_eos"] else []
    flags += ["chat template"] if generation["chat_template"] else []
    how = [f"temperature {generation['temperature']:g}"] if generation["mode"] == "generated" else []
    yield "tokens", ", ".join([generation["mode"], *how, *flags])
    if said:
        yield "text", said
    if check is not None:
        yield (
            "check",
            f"step {check['step']} against {check['against']}: largest error {check['max_abs_error']:.1e} "
            f"as computed, {check['max_abs_error_stored']:.1e} as stored",
        )
    for name, array in facts["arrays"].items():
        shape = " x ".join(map(str, array["shape"]))
        size = f"{array['bytes'] / 1e6:.2f} MB in {array['pieces']} file" + "s" * (array["pieces"] > 1)
        yield name, f"{array['dtype']} [{shape}], {size}"
    environment = ", ".join(f"{name} {value}" for name, value in manifest["environment"].items())
    yield (
        "recorded",
        f"{manifest['created']} by kvsim {manifest['kvsim_version']}" + f"; {environment}" * bool(environment),
    )
    for note in manifest["notes"]:
        yield "note", note


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:12]


@app.command()
def verify(trace: TraceDir, as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check every byte: checksums, metadata, row sums; exit code 2 if anything is wrong."""
    if not Path(trace).exists():
        raise KvsimError(f"{trace}: no such trace directory")
    with progress_bar(f"checking {trace}", quiet=quiet or as_json) as advance:
        report = verify_trace(trace, progress=advance)
    if as_json:
        print_json({"ok": report.ok, "problems": report.problems})
    else:
        for problem in report.problems:
            say(problem)
        say(f"{trace}: {'ok' if report.ok else 'damaged or incomplete'}")
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def repair(
    trace: TraceDir,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a damaged recording to the steps before the damage.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Mend a recording whose recorder was killed; committed steps are kept unless --truncate says otherwise."""
    with progress_bar(f"checking {trace}", quiet=quiet or as_json) as advance:
        report = repair_trace(trace, truncate=truncate, progress=advance)
    if as_json:
        print_json({"ok": report.ok, "actions": report.actions, "problems": report.problems})
    else:
        for line in [*report.actions, *report.problems] or [f"{trace}: nothing to repair"]:
            say(line)
    if not report.ok:
        raise typer.Exit(2)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="An .npz file.")],
    out: Annotated[Path, typer.Option(help="New trace directory.")],
    quiet: Quiet = False,
) -> None:
    """Turn anyone's arrays into a recording.

    The .npz holds attention [T,K,H,L] or scores [T,K,L], and prompt_length; optional are tokens, queries, keys, values,
    num_kv_heads, prompt_mass, prompt_queries.
    """
    with progress_bar(f"importing {file}", quiet=quiet) as advance:
        trace = import_npz(file, out, progress=advance)
    say(f"wrote {out}: {trace.num_steps} steps, capture {trace.capture}")
    for note in trace.manifest.notes:
        say(f"note: {note}")


@app.command()
def export(
    trace: TraceDir,
    out: Annotated[Path, typer.Option(help="New .npz file.")],
    quiet: Quiet = False,
) -> None:
    """Write a recording as a plain .npz that `kvsim trace import` reads back."""
    with progress_bar(f"exporting {trace}", quiet=quiet) as advance:
        export_npz(open_trace(trace), out, progress=advance)
    say(f"wrote {out}")


@app.command()
def gates(
    trace: TraceDir,
    gate: Annotated[Path, typer.Option(metavar="FILE", help="A write gate of the recording's model.")],
    as_json: AsJson = False,
) -> None:
    """Score the keys of a recording with a write gate and keep the scores in it; any others are replaced.

    Example: kvsim trace gates runs/a --gate gate.safetensors
    """
    from kvsim.gate_scores import store_gate_scores

    recording, scorer = store_gate_scores(trace, gate)
    scores = recording.gates()[list(recording.eligible_layers)]
    facts = {"hash": scorer.hash, "tau": scorer.tau, "mean": float(scores.mean())}
    facts["admitted"] = float((scores >= scorer.tau).mean())
    if as_json:
        print_json({"trace": str(recording.path), "gate": gate.name, **facts})
    else:
        say(f"wrote {trace}: gates of {gate.name}, mean {facts['mean']:.3f}")
        say(f"{facts['admitted']:.1%} at or above its tau {scorer.tau:g}")
        model = recording.manifest.model
        if model is not None and scorer.config_hash and model["config_hash"] not in (None, scorer.config_hash):
            say(f"note: trained for {scorer.model}; the config of {model['name']}, which was recorded, is another")


@app.command()
def synth(
    out: Annotated[Path, typer.Option(help="New trace directory.")],
    kind: Annotated[
        Literal["iid", "drift", "shift", "heavy", "sink"],
        typer.Option(help="Utilities that stay, turn, change at one step, have a heavy tail, or have sinks."),
    ] = "iid",
    noise: Annotated[float, typer.Option(metavar="S", help="Standard deviation of a score over its utility.")] = 0.3,
    drift: Annotated[
        float | None, typer.Option(metavar="D", help="Radians a step, for kind drift; 0.05 by default.")
    ] = None,
    shift_at: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", help="First step after the change, for kind shift; by default halfway, T // 2 + 1."
        ),
    ] = None,
    heads: Annotated[int, typer.Option(metavar="H", help="Heads.")] = 2,
    layers: Annotated[int, typer.Option(metavar="K", help="Layers.")] = 4,
    steps: Annotated[int, typer.Option(metavar="T", help="Decode steps.")] = 64,
    prompt: Annotated[int, typer.Option(metavar="L", help="Prompt length.")] = 256,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed.")] = 0,
    quiet: Quiet = False,
) -> None:
    """Write a synthetic recording whose true utilities are known (Python: kvsim.synth.synthetic_of).

    Every position but 0 has a utility, seen through independent noise; position 0 takes the rest of the row.

    Example: kvsim trace synth --out runs/shift --kind shift --shift-at 33 --noise 0.5
    """
    from kvsim.synth import Synthetic, write_synthetic

    if drift is None:
        drift = 0.05 if kind == "drift" else 0.0
    spec = Synthetic(kind, prompt, steps, layers, heads, noise, drift, shift_at, seed)
    with progress_bar(f"writing {out}", quiet=quiet) as advance:
        write_synthetic(spec, out, progress=advance)
    say(f"wrote {out}: {kind}, prompt {prompt}, {steps} steps")
