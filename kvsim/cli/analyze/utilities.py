"""Whether a loss is measured against true utilities or against smoothed scores; several commands must decide alike."""

from collections.abc import Sequence
from typing import Annotated

import typer
from kvsim_traces import Trace

from kvsim.errors import KvsimError
from kvsim.tradeoff import Utility

__all__ = ["Smoothed", "utilities_of"]

Smoothed = Annotated[bool, typer.Option("--smoothed", help="Smooth the scores of synthetic recordings too.")]


def utilities_of(traces: Sequence[Trace], *, smoothed: bool) -> list[Utility | None]:
    """Give each recording's true utilities, or None for all of them where scores are to be smoothed.

    Raises
    ------
    KvsimError
        If only some of the recordings are synthetic and `smoothed` is off.
    """
    from kvsim.synth import synthetic_of

    found = [None if smoothed else synthetic_of(trace) for trace in traces]
    if len({spec is None for spec in found}) > 1:
        raise KvsimError("synthetic and other recordings have different utilities; take one kind, or add --smoothed")
    return [None if spec is None else spec.utilities for spec in found]
