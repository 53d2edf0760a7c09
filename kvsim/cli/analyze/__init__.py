"""``kvsim analyze``: one file for each question."""

import typer

from kvsim.cli.analyze.adaptive import adaptive
from kvsim.cli.analyze.alpha import alpha
from kvsim.cli.analyze.diff import diff
from kvsim.cli.analyze.floor import floor
from kvsim.cli.analyze.footprint import footprint
from kvsim.cli.analyze.memory import memory
from kvsim.cli.analyze.momentum import momentum
from kvsim.cli.analyze.oracle import oracle
from kvsim.cli.analyze.scorers import scorers
from kvsim.cli.analyze.sensitivity import sensitivity
from kvsim.cli.analyze.stability import stability
from kvsim.cli.analyze.tokens import tokens
from kvsim.cli.analyze.transfer import transfer
from kvsim.cli.output import ErrorGroup
from kvsim.cli.predict import prediction

__all__ = ["app"]

app = typer.Typer(cls=ErrorGroup, help="Measure what aggregation trades against what.", no_args_is_help=True)
app.command()(adaptive)
app.command()(alpha)
app.command()(diff)
app.command()(floor)
app.command()(footprint)
app.command()(memory)
app.command()(momentum)
app.command()(stability)
app.command()(oracle)
app.command()(prediction)
app.command()(scorers)
app.command()(sensitivity)
app.command()(tokens)
app.command()(transfer)
