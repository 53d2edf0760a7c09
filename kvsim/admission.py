"""What a plan says of the way into the cache and of reading it: `Admission` and `Selection` are plain data."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

__all__ = ["Admission", "Selection"]


@dataclass(frozen=True)
class Admission:
    """Which positions stay when they leave the local window (WG-KV 3.1); groups are of kind ``head``.

    The query at position p sees the last `window` positions, p - window + 1 .. p with itself among them, and of earlier
    ones those that were admitted and not evicted since. So after the eviction of step t (of the prompt, for t = 0)
    position L0 + t - window is promoted or gone, with ``evicted_at = t``; prompt positions before it were resolved
    during prefill and are gone with ``evicted_at = 0``.

    Attributes
    ----------
    window : int
        W, at least 1: how many recent positions every query sees. They count within the budget and are not evicted.
    admitted : array of bool
        [G, L0+T]; True for a position that is promoted when it leaves the window.
    scores : array or None
        [G, L0+T] what was compared with a threshold, such as the gates of a write gate; engines do not read it.
    """

    window: int
    admitted: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float64] | None = None

    def leaving(self, prompt_length: int, t: int) -> int:
        """Give the position that leaves the window after step t (0 for the prompt); negative while none does."""
        return prompt_length + t - self.window

    def of_groups(self, own: slice) -> "Admission":
        """Give the admission of some groups alone."""
        scores = None if self.scores is None else self.scores[own]
        return replace(self, admitted=self.admitted[own], scores=scores)


@dataclass(frozen=True)
class Selection:
    """Which visible positions a query reads, S_t within V_t; the retained sets are untouched.

    Attributes
    ----------
    kind : {"quest", "topk"}
        ``quest``: the pages with the highest upper bounds of a logit, the newest token's page among them (Quest).
        ``topk``: the positions with the highest attention, averaged over a KV head's query heads.
    tokens : int
        Positions read in each step by each KV head, at least 1; a multiple of `page` for ``quest``.
    page : int
        ``quest``: consecutive visible positions of one page.
    """

    kind: Literal["quest", "topk"]
    tokens: int
    page: int = 16
