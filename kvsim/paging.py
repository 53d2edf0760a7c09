"""How a paged cache holds what a run retains: pages, ring pages of a local window, and which pages become free.

Everything follows from `evicted_at`, the one history that every engine gives, and for admission from the window and
from what was admitted. A page is `page_size` slots of one layer and KV head, as WG-KV 4.1 lays them out.

>>> import numpy as np
>>> from kvsim.paging import paginate
>>> paginate(np.array([[0, 0, 0, -1, -1]]), prompt_length=4, page_size=2).pages
array([[1, 2]])
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError, unknown_name

__all__ = ["LAYOUTS", "PAGE_SIZE", "Layout", "Paging", "paginate"]

PAGE_SIZE = 16
"""Slots of a page (WG-KV 4.1)."""

_MOST = 2**31

Layout = Literal["append", "compact"]
LAYOUTS: tuple[Layout, ...] = ("append", "compact")
"""``append``: a token stays in the slot that it was written to, in order of position (under admission in order of
promotion, which is the same); a page is free when it is full and all its tokens are gone. ``compact``: after every
eviction the last tokens move into the holes, so that only a head's last page has free slots."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Paging:
    """Tokens and pages of each retention group, for one layer and KV head of it, over the steps.

    Attributes
    ----------
    page_size, window : int
        Slots of a page; W of the local window, 0 where there is no admission.
    layout : {"append", "compact"}
        See `LAYOUTS`.
    tokens, pages : array of int
        [G, T+1] held after the eviction of step t (of the prompt, for t = 0); `tokens` is ``|R_t|``. Pages include the
        ``ceil(W / page_size)`` of the ring, which are there from the start.
    visible, written : array of int
        [G, T+1] tokens and pages while the query of step t attends, before the eviction: `visible` is ``|V_t|``. At
        t = 0 the end of the prefill: the whole prompt, or under admission what was admitted and the window. The most
        pages ever held is the maximum of `pages` and `written`.
    evicted, moved : array of int
        [G, T+1] tokens evicted after step t, without those that admission let go; and with ``compact`` the tokens that
        had to move, the fewest that fill all holes.
    """

    page_size: int
    window: int
    layout: Layout
    tokens: IntArray = field(repr=False)
    pages: IntArray = field(repr=False)
    visible: IntArray = field(repr=False)
    written: IntArray = field(repr=False)
    evicted: IntArray = field(repr=False)
    moved: IntArray = field(repr=False)


def paginate(
    evicted_at: npt.NDArray[np.integer],
    prompt_length: int,
    *,
    page_size: int = PAGE_SIZE,
    window: int = 0,
    admitted: npt.NDArray[np.bool_] | None = None,
    layout: Layout = "append",
) -> Paging:
    """Lay the history of a run out in pages.

    Parameters
    ----------
    evicted_at : array of int
        [G, L0+T]: the step after which a position was gone, 0 before the first step, -1 for never.
    prompt_length : int
        L0.
    page_size : int
        Slots of a page.
    window : int
        W of the local window; 0 without admission. Position ``L0 + t - W`` leaves it after step t, and moves to the
        global pages or is gone.
    admitted : array of bool, optional
        [G, L0+T]: which positions move there. Without it, those that were not gone when they left, so that a prompt
        position evicted before the first step counts as never admitted.
    layout : {"append", "compact"}
        See `LAYOUTS`.

    Raises
    ------
    KvsimError
        If a size is out of range, the layout is unknown, or a position is gone before it could be: while it was not
        there yet, or within the window.
    """
    from kvsim.page_counts import count_moves, fill  # Numba takes half a second to load

    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    gone = np.ascontiguousarray(evicted_at, dtype=np.int32)
    groups, positions = gone.shape
    steps = positions - prompt_length
    if page_size < 1 or window < 0:
        raise KvsimError(f"page size must be at least 1 and window at least 0, got {page_size} and {window}")
    if max(page_size, window) > _MOST:
        raise KvsimError(f"page size and window must be at most {_MOST} tokens, got {page_size} and {window}")
    if not 0 < prompt_length <= positions or (positions and int(gone.max()) > steps):
        raise KvsimError(f"evicted_at of {positions} positions and {prompt_length} of the prompt goes to step {steps}")
    if admitted is None:
        leaves = np.maximum(0, np.arange(positions) - prompt_length + window)
        admitted = gone != leaves if window else np.ones((1, 1), dtype=np.bool_)
    ends = 2 * (steps + 1)
    alive, pages = (np.zeros((groups, ends), dtype=np.int64) for _ in range(2))
    evicted, moved = (np.zeros((groups, steps + 1), dtype=np.int64) for _ in range(2))
    marks = np.ascontiguousarray(admitted, dtype=np.bool_)
    wrong = int(fill(gone, marks, prompt_length, window, page_size, alive, pages, evicted))
    if wrong >= 0:
        raise KvsimError(f"group {wrong // positions}: position {wrong % positions} is gone before it can be")
    alive, pages = alive.cumsum(axis=1), pages.cumsum(axis=1)
    if layout == "compact":
        pages = -(-alive // page_size)
        count_moves(gone, marks, prompt_length, window, moved)
    ring = -(-window // page_size)
    seen = prompt_length + np.arange(steps + 1)
    resting = np.minimum(max(0, window - 1), seen)
    attending = np.minimum(window, seen)
    attending[0] = resting[0]
    return Paging(
        page_size=page_size,
        window=window,
        layout=layout,
        tokens=alive[:, 1::2] + resting,
        pages=pages[:, 1::2] + ring,
        visible=alive[:, ::2] + attending,
        written=pages[:, ::2] + ring,
        evicted=evicted,
        moved=moved,
    )
