"""Difference from the mean key."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class KeyDiffScore(Scorer):
    """Minus the cosine between a key and the mean of the visible unit keys (Park et al., 2025); needs a qk capture."""

    name: ClassVar[str] = "keydiff"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("cosine", values=context.keys, signed=True)
