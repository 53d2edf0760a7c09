"""Attention received."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Attention(Scorer):
    """The attention row, renormalised over the visible set per head and averaged over heads (InertiaKV Eq. 1)."""

    name: ClassVar[str] = "attention"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("attention")
