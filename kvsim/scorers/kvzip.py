"""Scores of KVzip's reconstruction pass."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class KVzipScore(Scorer):
    """The highest attention a prompt position gets while the model repeats the prompt (Kim et al., 2025).

    Needs a recording made with ``--kvzip``. Generated positions, which KVzip does not score, have the highest score
    there is, 1: they stay while prompt positions remain.
    """

    name: ClassVar[str] = "kvzip"

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        trace = context.trace
        if not trace.has("kvzip_scores"):
            raise PolicyError(
                f"{context.policy}: needs the scores of the reconstruction pass, which {trace.path} lacks; "
                "record with --kvzip"
            )
        values = np.ones((len(context.groups.layers), trace.num_kv_heads, trace.num_positions))
        values[..., : trace.prompt_length] = trace.kvzip_scores()[list(context.groups.layers)]
        return ScoreSource("static", values=values)
