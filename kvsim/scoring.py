"""Scores of one step in float64: the definition every engine is held to (design: Score, Scorers)."""

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray, Groups, Plan, Redundancy, ScoreSource

__all__ = [
    "attention_scores",
    "head_mean_scores",
    "independent_scores",
    "less_redundancy",
    "pooled",
    "ranking",
    "unit_vectors",
]


def attention_scores(
    source: ScoreSource,
    rows: FloatArray,
    groups: Groups,
    group: int,
    visible: npt.NDArray[np.intp],
    *,
    renormalise: bool = True,
) -> FloatArray:
    """Score one group's visible positions by attention, averaged over its heads (InertiaKV Eq. 1).

    Parameters
    ----------
    source : ScoreSource
        A source of kind ``attention``.
    rows : array
        [K, H, n] attention of the eligible layers over all positions of the step.
    groups : Groups
        The retention groups.
    group : int
        Which one to score.
    visible : array of int
        Positions to score, ascending.
    renormalise : bool
        Divide each head's row by its mass over `visible`; a row whose visible mass is zero scores 0.

    Returns
    -------
    array
        [K_g, len(visible)], K_g the group's layers.
    """
    layers, heads, kv_heads = groups.members(group)
    a = rows[layers, heads][:, :, visible]
    if renormalise:
        mass = a.sum(axis=-1, keepdims=True)
        a = np.divide(a, mass, out=np.zeros_like(a), where=mass > 0)
    if source.weight is not None:
        weight = source.weight[layers, kv_heads][:, :, visible]
        mean = weight.mean(axis=-1, keepdims=True)
        weight = np.divide(weight, mean, out=np.zeros_like(weight), where=mean > 0)
        a = a * np.repeat(weight, a.shape[1] // weight.shape[1], axis=1)
    return _finish(source, _over_heads(source, a))


def head_mean_scores(
    source: ScoreSource, rows: FloatArray, groups: Groups, group: int, visible: npt.NDArray[np.intp]
) -> FloatArray:
    """Score one group's visible positions from a `scores` capture: the recorded head mean as it is, [K_g, n_visible].

    An approximation: without heads nothing can be renormalised over the visible set.
    """
    layers, _, _ = groups.members(group)
    return _finish(source, rows[layers][:, visible])


def independent_scores(
    source: ScoreSource, groups: Groups, group: int, visible: npt.NDArray[np.intp], step: int = 0
) -> FloatArray:
    """Score one group's visible positions by a source that needs no attention, averaged over its KV heads.

    Parameters
    ----------
    source : ScoreSource
        A source of another kind than ``attention``.
    groups : Groups
        The retention groups.
    group : int
        Which one to score.
    visible : array of int
        Positions to score, ascending.
    step : int
        Step t, from 1, for a ``bilinear`` source.

    Returns
    -------
    array
        [K_g, len(visible)].
    """
    assert source.values is not None
    layers, _, kv_heads = groups.members(group)
    values = source.values[layers, kv_heads][:, :, visible]
    if source.kind == "cosine":
        unit = unit_vectors(values)
        anchor = unit.mean(axis=2, keepdims=True)
        norm = np.linalg.norm(anchor, axis=-1)
        cosine = np.divide((unit * anchor).sum(-1), norm, out=np.zeros(unit.shape[:-1]), where=norm > 0)
        # To float32, so that cosines equal in mathematics, as those of two keys to their mean, tie in every engine.
        values = -cosine.astype(np.float32).astype(np.float64)
    elif source.kind == "bilinear":
        assert source.queries is not None
        values = np.einsum("lhnd,lhd->lhn", values, source.queries[step - 1, layers, kv_heads])
    return _finish(source, _over_heads(source, values))


def ranking(plan: Plan, group: int, m: FloatArray, visible: npt.NDArray[np.intp]) -> FloatArray:
    """Give what eviction compares: the state, pooled, and less the redundancy where the plan has one.

    Parameters
    ----------
    plan : Plan
        Whose ranking it is.
    group : int
        Which group to rank.
    m : array
        State of the visible positions.
    visible : array of int
        Those positions, ascending.
    """
    rank = pooled(m, plan.pool)
    mixed = plan.score.redundancy
    if mixed is None:
        return rank
    free = (visible >= plan.n_sink[group]) & (visible <= visible[-1] - plan.n_recent[group])
    total = m[free].sum()
    return less_redundancy(mixed, rank, float(total), redundancy(mixed, plan.groups, group, visible))


def less_redundancy(mixed: Redundancy, rank: FloatArray, total: float, repeated: FloatArray) -> FloatArray:
    """Take redundancy off what positions are ranked by, once that is divided by `total`, the sum of the states."""
    importance = rank / total if total > 0 else rank
    return mixed.mix * importance - (1 - mixed.mix) * repeated


def redundancy(source: Redundancy, groups: Groups, group: int, visible: npt.NDArray[np.intp]) -> FloatArray:
    """Say how much of each visible key the other visible keys repeat; see `kvsim.plan.Redundancy`."""
    layers, _, kv_heads = groups.members(group)
    units = source.units[layers, kv_heads][:, :, visible]
    similarity = units @ units.swapaxes(-1, -2)
    diagonal = np.arange(visible.size)
    similar = similarity > source.threshold
    similarity[..., diagonal, diagonal], similar[..., diagonal, diagonal] = 0, False
    recent = np.where(similar, diagonal, -1).max(axis=-1)
    spared = (diagonal == recent[..., None]) & (recent[..., None] >= 0)
    repeated = np.where(spared, 0, similarity).mean(axis=-2)
    weights = np.exp(repeated - repeated.max(axis=-1, keepdims=True))
    shares: FloatArray = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=(0, 1))
    return shares


def unit_vectors(values: FloatArray) -> FloatArray:
    """Scale vectors along the last axis to length 1; zero stays zero."""
    units: FloatArray = values / np.maximum(np.linalg.norm(values, axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return units


def pooled(m: FloatArray, size: int) -> FloatArray:
    """Give each element the maximum over the `size` neighbours around it (odd), fewer at the ends."""
    if size == 1:
        return m
    half = size // 2
    padded = np.concatenate([np.full(half, -np.inf), m, np.full(half, -np.inf)])
    highest: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, size).max(axis=-1)
    return highest


def _over_heads(source: ScoreSource, s: FloatArray) -> FloatArray:
    combined: FloatArray = s.max(axis=1) if source.heads == "max" else s.mean(axis=1)
    return combined


def _finish(source: ScoreSource, s: FloatArray) -> FloatArray:
    if source.entropy and s.shape[-1] > 1:
        mass = s.sum(axis=-1, keepdims=True)
        p = np.divide(s, mass, out=np.zeros_like(s), where=mass > 0)
        entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1, keepdims=True)
        s = s * (entropy / np.log(s.shape[-1]))
    if source.pivotal:
        # A hair above the mean, so that equal scores are below it whatever the order of summation.
        s = (s > s.mean(axis=-1, keepdims=True) * (1 + 1e-9)).astype(np.float64)
    if source.signed:
        s = s - s.min(axis=-1, keepdims=True)
    return s
