"""What every engine returns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["METRICS", "MODES", "Mode", "Outcome", "Progress"]

Mode = Literal["exact", "fast"]
MODES: tuple[Mode, ...] = ("exact", "fast")

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""

METRICS = {
    "kept_mass": "attention that step t's query could still see, averaged over a group's layers and heads",
    "churn": "1 - Jaccard of the retained sets of two successive steps (0 if both are empty)",
    "raw_churn": "1 - Jaccard of the raw top-B sets of two successive steps",
    "raw_agreement": "Jaccard of the raw top-B set and the retained set",
    "raw_top_evicted": "share of the raw top-B set that is not retained",
    "newest_kept": "share of groups that retain the step's own position (its mean: generated tokens ever kept)",
    "newest_wronged": "share of groups that evict the step's own position although it is in the raw top-B set",
    "ties": "positions on both sides of the cut with the float32 state of the cut",
    "retained": "tokens retained after the step",
    "output_error": "relative error of the attention output, renormalised over the visible set (needs values)",
}
"""Name and meaning of each metric; all are averaged over groups, one number a step."""


@dataclass(frozen=True)
class Outcome:
    """The history of one replay.

    Attributes
    ----------
    evicted_at : array of int32, or None in shadow mode
        [G, L0+T]: the step after which a position was gone, 0 for one evicted before the first step, -1 for one
        that was never evicted. Because eviction is irreversible, this is the whole history.
    retained : array of bool, or None unless in shadow mode
        [T, G, L0+T]: the set of every step; shadow sets can return.
    metrics : dict of str to array
        [T] float64 for each name of `METRICS`; NaN where a metric is not defined (churn at step 1).
    selected : array or None
        [T] positions that a KV head reads, ``|S_t|``, averaged over layers and KV heads; None without a selection.
    """

    evicted_at: npt.NDArray[np.int32] | None
    retained: npt.NDArray[np.bool_] | None
    metrics: dict[str, npt.NDArray[np.float64]]
    selected: npt.NDArray[np.float64] | None = None
