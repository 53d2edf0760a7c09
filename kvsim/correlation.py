"""How much two scorings of the same positions agree."""

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray

__all__ = ["centred_ranks", "correlation", "jaccard", "pearson", "spearman", "top", "top_jaccard"]


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give Spearman's rank correlation of two scorings, equal scores sharing their mean rank; NaN if one is constant.

    Parameters
    ----------
    x, y : array
        [n] scores of the same positions.
    """
    return float(correlation(centred_ranks(x), centred_ranks(y)))


def top_jaccard(x: npt.ArrayLike, y: npt.ArrayLike, budget: int) -> float:
    """Give the Jaccard index of the `budget` highest positions of two scorings; equal scores keep the newest."""
    return float(jaccard(top(x, budget), top(y, budget)))


def centred_ranks(scores: npt.ArrayLike) -> FloatArray:
    """Rank scores [..., n] along the last axis in float32, equal ones sharing their mean rank; less the mean of all."""
    from scipy.stats import rankdata

    ranks: FloatArray = rankdata(np.asarray(scores, np.float32), axis=-1)
    ranks -= (ranks.shape[-1] + 1) / 2
    return ranks


def correlation(a: FloatArray, b: FloatArray) -> FloatArray:
    """Correlate centred numbers [..., n] along the last axis, Spearman's rho if they are ranks; NaN if constant."""
    scale = np.sqrt((a * a).sum(axis=-1) * (b * b).sum(axis=-1))
    rho: FloatArray = np.divide((a * b).sum(axis=-1), scale, out=np.full(np.shape(scale), np.nan), where=scale > 0)
    return rho.clip(-1, 1)


def pearson(x: npt.ArrayLike, y: npt.ArrayLike) -> FloatArray:
    """Give Pearson's correlation of numbers [..., n] along the last axis; NaN if one is constant."""
    return correlation(_centred(x), _centred(y))


def top(scores: npt.ArrayLike, budget: int) -> npt.NDArray[np.bool_]:
    """Mark the `budget` highest of scores [..., n] along the last axis, in float32; among equal ones the last."""
    values = np.asarray(scores, np.float32)
    marks = np.zeros(values.shape, np.bool_)
    np.put_along_axis(marks, np.argsort(values, axis=-1, kind="stable")[..., -budget:], True, axis=-1)
    return marks


def jaccard(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> FloatArray:
    """Give the Jaccard index of sets marked along the last axis of [..., n]; neither may be empty in both."""
    index: FloatArray = (a & b).sum(axis=-1) / (a | b).sum(axis=-1)
    return index


def _centred(x: npt.ArrayLike) -> FloatArray:
    values = np.asarray(x, np.float64)
    # From the first one first, so that equal numbers give zeros whatever the rounding of their mean.
    values = values - values[..., :1]
    centred: FloatArray = values - values.mean(axis=-1, keepdims=True)
    return centred
