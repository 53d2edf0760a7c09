"""The command line: ``kvsim replay --trace DIR --policy ema:0.9``."""

import io
import sys
from typing import Annotated

import typer

from kvsim.cli import (
    analyze,
    bench,
    chart,
    compare,
    duo_heads,
    evaluate,
    fidelity,
    live,
    loss,
    policies,
    predict,
    record,
    replay,
    sweep,
    tasks,
    trace,
    train_gate,
    train_scorer,
)
from kvsim.cli.app import app as explorer
from kvsim.cli.output import ErrorGroup
from kvsim.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvsim",
    cls=ErrorGroup,
    help="Record one real run of a language model, then replay any KV-cache policy against the recording.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvsim {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(replay.replay)
app.command()(sweep.sweep)
app.command()(compare.compare)
app.command()(chart.chart)
app.command("app")(explorer)
app.command()(record.record)
app.command()(live.live)
app.command()(loss.loss)
app.command("eval")(evaluate.evaluate)
app.command()(predict.predict)
app.command()(fidelity.fidelity)
app.command()(policies.policies)
app.command()(tasks.tasks)
app.command("train-scorer")(train_scorer.train_scorer)
app.command("duo-heads")(duo_heads.duo_heads)
app.command("train-gate")(train_gate.train_gate)
app.add_typer(analyze.app, name="analyze")
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the ``kvsim`` command; characters that a terminal cannot show are printed as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    app()
