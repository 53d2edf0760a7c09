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

import numba
import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError, unknown_name

__all__ = ["LAYOUTS", "PAGE_SIZE", "Layout", "Paging", "paginate"]

PAGE_SIZE = 16
"""Slots of a page (WG-KV 4.1)."""

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
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    gone = np.ascontiguousarray(evicted_at, dtype=np.int32)
    groups, positions = gone.shape
    steps = positions - prompt_length
    if page_size < 1 or window < 0:
        raise KvsimError(f"page size must be at least 1 and window at least 0, got {page_size} and {window}")
    if not 0 < prompt_length <= positions or (positions and int(gone.max()) > steps):
        raise KvsimError(f"evicted_at of {positions} positions and {prompt_length} of the prompt goes to step {steps}")
    if admitted is None:
        leaves = np.maximum(0, np.arange(positions) - prompt_length + window)
        admitted = gone != leaves if window else np.ones((1, 1), dtype=np.bool_)
    ends = 2 * (steps + 1)
    alive, pages = (np.zeros((groups, ends), dtype=np.int64) for _ in range(2))
    evicted, moved = (np.zeros((groups, steps + 1), dtype=np.int64) for _ in range(2))
    marks = np.ascontiguousarray(admitted, dtype=np.bool_)
    wrong = int(_fill(gone, marks, prompt_length, window, page_size, alive, pages, evicted))
    if wrong >= 0:
        raise KvsimError(f"group {wrong // positions}: position {wrong % positions} is gone before it can be")
    alive, pages = alive.cumsum(axis=1), pages.cumsum(axis=1)
    if layout == "compact":
        pages = -(-alive // page_size)
        _move(gone, marks, prompt_length, window, moved)
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


# Time runs in half steps: 2 t while step t's query attends, 2 t + 1 after its eviction and the window's move.


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _fill(
    gone: npt.NDArray[np.int32],
    admitted: npt.NDArray[np.bool_],
    prompt: int,
    window: int,
    size: int,
    alive: IntArray,
    pages: IntArray,
    evicted: IntArray,
) -> int:
    """Note where tokens and pages come and go; give the first position that is gone too early, or -1."""
    groups, positions = gone.shape
    steps = positions - prompt
    for g in range(groups):
        slot, last, forever = 0, 0, False
        for j in range(positions):
            end = gone[g, j]
            leaves = max(0, j - prompt + (window if window else 1))
            if window and leaves > steps:
                if end >= 0:
                    return int(g * positions + j)
                continue
            if window and not admitted[g, j]:
                if end != leaves:
                    return int(g * positions + j)
                continue
            born = 0 if leaves == 0 else (2 * leaves + 1 if window else 2 * leaves)
            if end >= 0 and 2 * end + 1 <= born:
                return int(g * positions + j)
            alive[g, born] += 1
            if slot % size == 0:
                pages[g, born] += 1
                last, forever = 0, False
            if end < 0:
                forever = True
            else:
                alive[g, 2 * end + 1] -= 1
                evicted[g, end] += 1
                last = max(last, 2 * end + 1)
            slot += 1
            if slot % size == 0 and not forever:
                pages[g, last] -= 1
    return -1


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _move(
    gone: npt.NDArray[np.int32], admitted: npt.NDArray[np.bool_], prompt: int, window: int, moved: IntArray
) -> None:
    """Count the tokens that fill the holes of each step's evictions from the end."""
    groups, positions = gone.shape
    steps = positions - prompt
    slot_of, held = np.empty(positions, dtype=np.int32), np.empty(positions, dtype=np.int32)
    order, starts = np.empty(positions, dtype=np.int32), np.empty(steps + 2, dtype=np.int64)
    for g in range(groups):
        _by_step(gone[g], starts, order)
        count = 0
        for j in range(prompt - window + 1 if window else prompt):
            if not window or admitted[g, j]:
                slot_of[j], held[count] = count, j
                count += 1
        for t in range(steps + 1):
            if t and not window:
                slot_of[prompt + t - 1], held[count] = count, prompt + t - 1
                count += 1
            left = count
            for place in range(starts[t], starts[t + 1]):
                if not window or admitted[g, order[place]]:
                    held[slot_of[order[place]]] = -1
                    left -= 1
            tail = count - 1
            for place in range(starts[t], starts[t + 1]):
                if window and not admitted[g, order[place]]:
                    continue
                hole = slot_of[order[place]]
                if hole < left:
                    while held[tail] < 0:
                        tail -= 1
                    held[hole] = held[tail]
                    slot_of[held[tail]] = hole
                    tail -= 1
                    moved[g, t] += 1
            count = left
            leaves = prompt + t - window
            if window and t and leaves >= 0 and admitted[g, leaves]:
                slot_of[leaves], held[count] = count, leaves
                count += 1


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _by_step(gone: npt.NDArray[np.int32], starts: IntArray, order: npt.NDArray[np.int32]) -> None:
    """Sort the positions that are ever gone by the step after which they are; `starts` says where each step begins."""
    starts[:] = 0
    for end in gone:
        if end >= 0:
            starts[end + 1] += 1
    for t in range(1, starts.size):
        starts[t] += starts[t - 1]
    free = starts[:-1].copy()
    for j in range(gone.size):
        if gone[j] >= 0:
            order[free[gone[j]]] = j
            free[gone[j]] += 1
