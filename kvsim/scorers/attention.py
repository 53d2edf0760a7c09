"""Attention received."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Attention(Scorer):
    """The attention row, renormalised over the visible set per head and averaged over heads (InertiaKV Eq. 1).

    Attributes
    ----------
    heads : {"mean", "max"}
        How the query heads of a group are combined.
    """

    name: ClassVar[str] = "attention"
    heads: Literal["mean", "max"] = field(default="mean", kw_only=True)

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("attention", heads=self.heads)
