"""The alphas that analyses try when none is named, and whether a best one is only the last that was tried."""

from collections.abc import Sequence

__all__ = ["ALPHAS", "at_edge"]

ALPHAS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99)
"""Those of the paper's sweep (InertiaKV Table 5) and two more: on short recordings its last is often the best."""


def at_edge(best: Sequence[float], tried: Sequence[float]) -> bool:
    """Say whether an alpha beyond those tried might be better than the best of them.

    Parameters
    ----------
    best : sequence of float
        The alphas that share the best value.
    tried : sequence of float
        All of them.

    Returns
    -------
    bool
        True if the largest tried is among the best, or the smallest where it is above 0, below which there is none.
        False if all are equally good.
    """
    if len(best) == len(tried) > 1:
        return False
    return max(tried) in best or (min(tried) > 0 and min(tried) in best)
