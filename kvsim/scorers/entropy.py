"""Attention weighted by its entropy."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Entropy(Scorer):
    """A layer's attention score times the entropy of its attention over log n (InertiaKV section 5.1)."""

    name: ClassVar[str] = "entropy"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        return ScoreSource("attention", entropy=True)
