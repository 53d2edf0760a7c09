"""Retrieval heads and streaming heads."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvsim.admission import Admission
from kvsim.admissions.base import SINK, WINDOW, Admit, check_share, check_window, first_positions, register
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.retrieval_heads import load_heads


@register
@dataclass(frozen=True)
class Duo(Admit):
    """Admit everything in retrieval heads and the first positions alone in the others (DuoAttention).

    ``kvsim duo-heads`` makes the file; `kvsim.retrieval_heads` says what it holds.

    Attributes
    ----------
    file : str
        The JSON file that says which heads retrieve.
    window : int, optional
        Recent positions that every query sees; by default the file's, or 256.
    sink : int, optional
        Positions at the start of the sequence that the other heads admit; by default the file's, or 128.
    share : float, optional
        Take this share of the heads of the eligible layers, in [0, 1], those with the highest scores, instead of the
        file's threshold.
    """

    name: ClassVar[str] = "duo"
    file: str
    window: int | None = field(default=None, kw_only=True)
    sink: int | None = field(default=None, kw_only=True)
    share: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.window is not None:
            check_window(self.name, self.window)
        if self.sink is not None and self.sink < 0:
            raise PolicyError(f"sink of 'duo' must be 0 or more, got {self.sink}")
        if self.share is not None:
            check_share(self.name, "share", self.share)

    def admission(self, context: Context) -> Admission:
        """See `Admit.admission`."""
        heads, trace = load_heads(self.file), context.trace
        theirs, ours = (heads.num_layers, heads.num_kv_heads), (trace.num_layers, trace.num_kv_heads)
        if theirs != ours:
            raise PolicyError(
                f"{self.file}: is for {theirs[0]} layers of {theirs[1]} KV heads, but {trace.path} has {ours[0]} of "
                f"{ours[1]}"
            )
        retrieval = heads.retrieval(context.groups.layers, self.share).reshape(-1)
        sink = next(one for one in (self.sink, heads.sink, SINK) if one is not None)
        window = next(one for one in (self.window, heads.window, WINDOW) if one is not None)
        marks = first_positions(context, sink)
        marks[np.flatnonzero(retrieval)] = True
        return Admission(window, marks)
