"""Where tokens and pages come and go, counted by Numba; see `kvsim.paging`, which imports this when it is needed."""

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["count_moves", "fill"]

IntArray = npt.NDArray[np.int64]

# Time runs in half steps: 2 t while step t's query attends, 2 t + 1 after its eviction and the window's move.


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def fill(
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
def count_moves(
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
