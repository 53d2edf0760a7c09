"""Random eviction."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.random import RandomScore


@register
@dataclass(frozen=True)
class Random(Preset):
    """Keep tokens by a seeded draw, fixed for each position: a baseline, not a floor.

    Attributes
    ----------
    seed : int
        Seed of the draw.
    """

    name: ClassVar[str] = "random"
    seed: int = 0

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=RandomScore(self.seed))
