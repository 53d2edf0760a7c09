"""How much two scorings of the same positions agree."""

import numpy as np
import numpy.typing as npt

__all__ = ["spearman", "top_jaccard"]


def spearman(x: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Give Spearman's rank correlation of two scorings, equal scores sharing their mean rank; NaN if one is constant.

    Parameters
    ----------
    x, y : array
        [n] scores of the same positions.
    """
    from scipy.stats import rankdata

    a, b = (rankdata(np.asarray(scores, np.float32)) for scores in (x, y))
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale > 0 else float("nan")


def top_jaccard(x: npt.ArrayLike, y: npt.ArrayLike, budget: int) -> float:
    """Give the Jaccard index of the `budget` highest positions of two scorings; equal scores keep the newest."""
    top = [set(np.argsort(np.asarray(scores, np.float32), kind="stable")[-budget:].tolist()) for scores in (x, y)]
    return len(top[0] & top[1]) / len(top[0] | top[1])
