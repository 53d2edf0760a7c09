"""The learned bilinear scorer."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.bilinear import load_scorer
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import FloatArray, ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class Learned(Scorer):
    """A bilinear form of query and key, learned from recorded attention (InertiaKV section 5.1); needs a qk capture.

    ``kvsim train-scorer`` makes the file. A layer has one score for all of its heads.

    Attributes
    ----------
    file : str
        The safetensors file; it must have been trained for the recording's number and size of heads.
    """

    name: ClassVar[str] = "learned"
    file: str

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        scorer, trace = load_scorer(self.file), context.trace
        for array in ("queries", "keys"):
            if not trace.has(array):
                trace.stored(array)
        theirs = (scorer.num_heads, scorer.num_kv_heads, scorer.head_dim)
        ours = (trace.num_heads, trace.num_kv_heads, trace.head_dim)
        if theirs != ours:
            raise PolicyError(
                f"{context.policy}: {self.file} is for {theirs[0]} heads ({theirs[1]} KV) of dimension {theirs[2]}, "
                f"but {trace.path} has {ours[0]} heads ({ours[1]} KV) of dimension {ours[2]}"
            )
        layers, kv_heads = list(context.groups.layers), trace.num_kv_heads
        queries = np.stack(
            [scorer.queries(trace.queries(t)[layers].astype(np.float64)) for t in range(1, trace.num_steps + 1)]
        )
        keys = np.stack([scorer.keys(trace.keys(layer).astype(np.float64)) for layer in layers])
        return ScoreSource(
            "bilinear",
            values=_for_every_head(keys, 1, kv_heads),
            queries=_for_every_head(queries, 2, kv_heads),
            signed=True,
        )


def _for_every_head(array: FloatArray, axis: int, count: int) -> FloatArray:
    """Insert an axis of `count` KV heads that share the same numbers, without copying them."""
    shape = (*array.shape[:axis], count, *array.shape[axis:])
    return np.broadcast_to(np.expand_dims(array, axis), shape)
