"""What a scorer gives every position at a step when nothing is evicted, layer by layer and for all layers together."""

from dataclasses import replace

import numpy as np
from kvsim_traces import Trace

from kvsim.plan import FloatArray, Groups, ScoreSource
from kvsim.scoring import attention_scores, head_mean_scores, independent_scores, less_redundancy, unit_vectors

__all__ = ["ShadowScores", "shadow_rows"]


def shadow_rows(trace: Trace, layers: tuple[int, ...], step: int) -> FloatArray:
    """Read the full cache's attention of a step: [K, H, n], or [K, n] from a `scores` capture."""
    read = trace.score_rows if trace.capture == "scores" else trace.attention_rows
    return read(step, list(layers)).astype(np.float64)


class ShadowScores:
    """One scorer over positions 0..p_t, step by step, as the design defines scores without eviction.

    Parameters
    ----------
    trace : Trace
        The recording.
    layers : tuple of int
        Its eligible layers, K of them.
    source : ScoreSource
        The scorer's.
    """

    def __init__(self, trace: Trace, layers: tuple[int, ...], source: ScoreSource) -> None:
        self._trace, self._source = trace, source
        self._groups = Groups("shared", layers, trace.num_heads, trace.num_kv_heads)
        self._anchors = _Anchors(source) if source.kind == "cosine" else None
        self._repeats = _Repeats(source) if source.redundancy is not None else None

    def at(self, step: int, rows: FloatArray) -> FloatArray:
        """Score a step; steps must ascend from one call to the next.

        Parameters
        ----------
        step : int
            Step t, from 1.
        rows : array
            What `shadow_rows` gives.

        Returns
        -------
        array
            [K + 1, n]: what each layer's own group would rank by, then what a group of all layers with equal weights
            would: the mean over layers, except that redundancy is taken off only after it.
        """
        source, groups = self._source, self._groups
        everything = np.arange(self._trace.prompt_length + step)
        if source.kind == "attention" and self._trace.capture == "scores":
            scores = head_mean_scores(source, rows, groups, 0, everything)
        elif source.kind == "attention":
            scores = attention_scores(source, rows, groups, 0, everything, renormalise=False)
        else:
            if self._anchors is not None:
                source = replace(source, kind="static", values=self._anchors.negative_cosines(everything.size))
            scores = independent_scores(source, groups, 0, everything, step)
        scores = np.concatenate([scores, scores.mean(axis=0, keepdims=True)])
        if self._repeats is None:
            return scores
        mixed, repeated = self._source.redundancy, self._repeats.at(everything.size)
        assert mixed is not None
        return np.stack([less_redundancy(mixed, s, float(s.sum()), r) for s, r in zip(scores, repeated, strict=True)])


class _Anchors:
    """Cosines with the mean of the first n unit vectors, without summing them again at every step."""

    def __init__(self, source: ScoreSource) -> None:
        assert source.values is not None
        self._units = unit_vectors(source.values)
        self._sum = np.zeros((*self._units.shape[:2], self._units.shape[3]))
        self._seen = 0

    def negative_cosines(self, n: int) -> FloatArray:
        """Give minus the cosine of each of the first n vectors, [K, Hk, n]."""
        self._sum += self._units[:, :, self._seen : n].sum(axis=2)
        self._seen = n
        norm = np.linalg.norm(self._sum, axis=-1)[..., None]
        products = (self._units[:, :, :n] @ self._sum[..., None])[..., 0]
        cosines = np.divide(products, norm, out=np.zeros_like(products), where=norm > 0)
        negative: FloatArray = -cosines.astype(np.float32).astype(np.float64)
        return negative


class _Repeats:
    """Redundancy of the first n keys, kept up to date as n grows; see `kvsim.plan.Redundancy`."""

    def __init__(self, source: ScoreSource) -> None:
        assert source.redundancy is not None
        units = source.redundancy.units
        self._threshold = source.redundancy.threshold
        self._depth, self._positions = units.shape[0], np.arange(units.shape[2])
        self._units = np.ascontiguousarray(units.reshape(-1, *units.shape[2:]))
        self._sums = np.zeros(self._units.shape[:2])
        self._last = np.full(self._units.shape[:2], -1, dtype=np.int64)
        self._spared = np.zeros(self._units.shape[:2])
        self._seen = 0

    def at(self, n: int) -> FloatArray:
        """Give the redundancy [K + 1, n] of each layer, then of all of them."""
        from kvsim.engines.cpu.redundancy import include, redundancy

        for p in range(self._seen, n):
            include(self._units, self._threshold, self._positions, p, p, self._sums, self._last, self._spared)
        self._seen = n
        found = np.empty((self._depth + 1, n))
        for layer, sums in enumerate(np.split(self._sums, self._depth)):
            redundancy(sums, self._positions, n, found[layer])
        found[-1] = found[:-1].mean(axis=0)
        return found
