"""Lag-relative information."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.plan import FloatArray, ScoreSource
from kvsim.scorers.base import Scorer, register


@register
@dataclass(frozen=True)
class LagKVScore(Scorer):
    """How much a token's key and value vary, measured by the range of the next partition (Liang et al., 2025).

    The prompt behind its sinks is cut into partitions of `lag_size`. Keys and values are scaled, dimension by
    dimension, by the minimum and maximum of the partition that follows; the standard deviation over dimensions, its
    softmax within the partition, and the mean of both make the score, of which the rank within the partition counts.
    Sinks, the last partition and what is left over are kept, as are generated tokens; a prompt too short for two
    partitions is scored by position. All as in kvpress; needs a qkv capture.

    Attributes
    ----------
    lag_size : int
        Positions in a partition, at least 2.
    n_sink : int
        First positions, which are always kept.
    """

    name: ClassVar[str] = "lagkv"
    lag_size: int = 128
    n_sink: int = field(default=4, kw_only=True)

    def __post_init__(self) -> None:
        if self.lag_size < 2:
            raise PolicyError(f"lag_size of 'lagkv' must be at least 2, got {self.lag_size}")
        if self.n_sink < 0:
            raise PolicyError(f"n_sink of 'lagkv' must be 0 or more, got {self.n_sink}")

    def source(self, context: Context) -> ScoreSource:
        """See `Scorer.source`."""
        prompt, sink, lag = context.prompt_length, self.n_sink, self.lag_size
        scores = np.ones((*context.keys.shape[:2], context.trace.num_positions))
        partitions = (prompt - sink) // lag
        if partitions < 2:
            scores[..., sink:prompt] = np.arange(max(0, prompt - sink)) / max(1, prompt - sink)
            return ScoreSource("static", values=scores)
        stop = sink + partitions * lag
        both = [_spread(states[:, :, sink:stop], lag) for states in (context.keys, context.values)]
        ranks = (both[0] + both[1]).argsort(axis=-1).argsort(axis=-1) / lag
        scores[..., sink : stop - lag] = ranks.reshape(*ranks.shape[:2], -1)
        return ScoreSource("static", values=scores)


def _spread(states: FloatArray, lag: int) -> FloatArray:
    """Give the softmax of each token's spread in its partition, [K, Hk, partitions - 1, lag]."""
    parts = states.reshape(*states.shape[:2], -1, lag, states.shape[-1])
    low, high = (reach(parts[:, :, 1:], axis=-2, keepdims=True) for reach in (np.min, np.max))
    width = np.maximum(high - low, np.finfo(np.float32).tiny)
    spread = ((parts[:, :, :-1] - low) / width).std(axis=-1, ddof=1)
    weights: FloatArray = np.exp(spread - spread.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights
