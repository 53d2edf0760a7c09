"""``kvsim bench``: measure, never in a test."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from kvsim_traces.bench import bench_trace
from rich.table import Table

from kvsim.cli.output import ErrorGroup, console, print_json

__all__ = ["app"]

app = typer.Typer(cls=ErrorGroup, help="Measure kvsim on this machine.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    pass


@app.command()
def trace(
    directory: Annotated[Path | None, typer.Option(help="Where to write the scratch recording.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Append to and read from a recording of [128, 30, 16, 4096] scores, beside a plain memory read."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-") as scratch:
        report = bench_trace(Path(scratch))
    if as_json:
        print_json(report)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in report.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table, highlight=False)
