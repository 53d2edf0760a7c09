"""Position."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Recency(Scorer):
    """The position itself: the newest tokens stay (StreamingLLM without its sinks)."""

    name: ClassVar[str] = "recency"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        shape = (len(context.groups.layers), context.groups.num_kv_heads, context.trace.num_positions)
        return ScoreSource("static", values=np.broadcast_to(np.arange(shape[-1], dtype=np.float64), shape))
