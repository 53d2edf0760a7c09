"""A seeded draw."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class RandomScore(Scorer):
    """A uniform draw in [0, 1), fixed for each position and the same in every layer.

    Attributes
    ----------
    seed : int
        Seed of the draw; a longer trace extends the draw of a shorter one.
    """

    name: ClassVar[str] = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise PolicyError(f"seed of 'random' must be 0 or more, got {self.seed}")

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        shape = (len(context.groups.layers), context.groups.num_kv_heads, context.trace.num_positions)
        draw = np.random.Generator(np.random.PCG64(self.seed)).random(shape[-1])
        return ScoreSource("static", values=np.broadcast_to(draw, shape))
