"""``kvsim trace``: look at recordings, check and mend them, bring them in and out."""

from pathlib import Path
from typing import Annotated

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
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _text(value))
    console.print(table, highlight=False)


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


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
