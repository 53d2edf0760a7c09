"""Attention less redundancy."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import Redundancy, ScoreSource
from kvsim.scorers.base import Scorer, register
from kvsim.scoring import unit_vectors


@register
@dataclass(frozen=True)
class RKVScore(Scorer):
    """Attention, ranked by ``mix * importance - (1 - mix) * redundancy`` (Cai et al., 2025); needs keys.

    Importance is the rule's state over its sum, redundancy the softmax of the mean cosine between a key and the other
    visible ones, without each key's most recent similar one. The state remembers; redundancy is that of the moment.

    Attributes
    ----------
    mix : float
        The paper's lambda, in [0, 1]; by default that of the authors' code.
    threshold : float
        Cosine from which on two keys are similar.
    heads : {"mean", "max"}
        How the query heads of a group are combined.
    """

    name: ClassVar[str] = "rkv"
    mix: float = 0.07
    threshold: float = field(default=0.5, kw_only=True)
    heads: Literal["mean", "max"] = field(default="max", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.mix <= 1:
            raise PolicyError(f"mix of 'rkv' must be in [0, 1], got {self.mix}")
        if not -1 <= self.threshold <= 1:
            raise PolicyError(f"threshold of 'rkv' must be in [-1, 1], got {self.threshold}")

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        redundancy = Redundancy(unit_vectors(context.keys), self.mix, self.threshold)
        return ScoreSource("attention", heads=self.heads, redundancy=redundancy)
