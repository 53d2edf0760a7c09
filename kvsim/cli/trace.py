"""``kvsim trace``: look at recordings, check and mend them, bring them in and out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from kvsim_traces import describe, export_npz, import_npz, open_trace, repair_trace, verify_trace
from rich.table import Table

from kvsim.cli.output import ErrorGroup, console, print_json

__all__ = ["app"]

app = typer.Typer(cls=ErrorGroup, help="Look at, check, mend, import and export recordings.", no_args_is_help=True)

TraceDir = Annotated[str, typer.Argument(metavar="TRACE", help="Trace directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def info(trace: TraceDir, as_json: AsJson = False) -> None:
    """Print what a recording holds and where it came from."""
    facts = describe(open_trace(trace))
    if as_json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _facts(facts):
        table.add_row(name, value)
    console.print(table, highlight=False)


def _facts(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
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
        yield "model", f"{model['name']} (config {model['config_hash'][:12]}, weights {model['weights_hash'][:12]})"
    if manifest["tokenizer"] is not None:
        yield "tokenizer", f"{manifest['tokenizer']['name']} ({manifest['tokenizer']['hash'][:12]})"
    flags = ["end of sequence suppressed"] if generation["suppress_eos"] else []
    flags += ["chat template"] if generation["chat_template"] else []
    yield "tokens", ", ".join([generation["mode"], f"temperature {generation['temperature']:g}", *flags])
    if check is not None:
        yield (
            "check",
            f"step {check['step']} against {check['against']}: largest error {check['max_abs_error']:.1e} "
            f"as computed, {check['max_abs_error_stored']:.1e} as stored",
        )
    for name, array in facts["arrays"].items():
        shape = " x ".join(map(str, array["shape"]))
        yield name, f"{array['dtype']} [{shape}], {array['bytes'] / 1e6:.2f} MB in {array['pieces']} pieces"
    environment = ", ".join(f"{name} {value}" for name, value in manifest["environment"].items())
    yield (
        "recorded",
        f"{manifest['created']} by kvsim {manifest['kvsim_version']}" + f"; {environment}" * bool(environment),
    )
    for note in manifest["notes"]:
        yield "note", note


@app.command()
def verify(trace: TraceDir, as_json: AsJson = False) -> None:
    """Check every byte: checksums, metadata, row sums; exit code 2 if anything is wrong."""
    report = verify_trace(trace)
    if as_json:
        print_json({"ok": report.ok, "problems": report.problems})
    else:
        for problem in report.problems:
            console.print(problem, highlight=False, markup=False)
        console.print(f"{trace}: {'ok' if report.ok else 'damaged or incomplete'}", highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def repair(
    trace: TraceDir,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut a damaged recording to the steps before the damage.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Mend a recording whose recorder was killed; committed steps are kept unless --truncate says otherwise."""
    report = repair_trace(trace, truncate=truncate)
    if as_json:
        print_json({"ok": report.ok, "actions": report.actions, "problems": report.problems})
    else:
        for line in [*report.actions, *report.problems]:
            console.print(line, highlight=False, markup=False)
    if not report.ok:
        raise typer.Exit(2)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help=".npz with attention [T,K,H,L] or scores [T,K,L], and prompt_length.")],
    out: Annotated[Path, typer.Option(help="New trace directory.")],
) -> None:
    """Turn anyone's arrays into a recording; optional arrays: tokens, queries, keys, values."""
    trace = import_npz(file, out)
    console.print(f"wrote {out}: {trace.num_steps} steps, capture {trace.capture}", highlight=False, markup=False)


@app.command()
def export(
    trace: TraceDir,
    out: Annotated[Path, typer.Option(help="New .npz file.")],
) -> None:
    """Write a recording as a plain .npz that `kvsim trace import` reads back."""
    export_npz(open_trace(trace), out)
    console.print(f"wrote {out}", highlight=False, markup=False)
