"""Pivotal tokens."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Pivotal(Scorer):
    """1 where a token receives more attention than the mean over the visible set, else 0 (Liu et al., 2023)."""

    name: ClassVar[str] = "pivotal"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("attention", pivotal=True)
