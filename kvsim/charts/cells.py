"""The cells of a retention map: which positions and steps it shows, in bins of what size, and what is kept of each."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["Window", "choose_bins", "kept_fractions", "window_of"]

Range = tuple[int, int]
IntArray = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Window:
    """What a map shows.

    Attributes
    ----------
    columns : array of int
        The positions of the columns shown, from the left.
    x : int
        Number of the first of them among all columns.
    first, last : int
        The steps shown, both included.
    group : int or None
        The retention group shown, None for the mean over all.
    """

    columns: IntArray
    x: int
    first: int
    last: int
    group: int | None = None

    @property
    def end(self) -> int:
        """Number of the column after the last one."""
        return self.x + self.columns.size

    @property
    def down(self) -> int:
        """Number of steps."""
        return self.last - self.first + 1

    def edges(self, wide: int, tall: int) -> tuple[list[int], list[int]]:
        """Give the edges of the bins: of columns, and of steps; the last one is the end."""
        across = [*range(self.x, self.end, wide), self.end]
        return across, [*range(self.first, self.last + 1, tall), self.last + 1]


def window_of(
    results: Sequence[Result], order: IntArray, positions: Range | None, steps: Range | None, group: int | None
) -> Window:
    """Check what is asked for; what is left open is whole.

    Parameters
    ----------
    results : sequence of Result
        Of one recording.
    order : array of int
        [L0 + T] all positions in the order of the columns.
    positions : (first, end), optional
        Numbers of columns, the end excluded.
    steps : (first, last), optional
        Both included.
    group : int, optional
        A retention group that all results have.

    Raises
    ------
    KvsimError
        If a range is empty or beyond the recording, or a result has no such group.
    """
    total, most = order.size, results[0].num_steps
    x, end = _range(positions, (0, total), "positions", f"(first, end) with 0 <= first < end <= {total}", 1)
    first, last = _range(steps, (1, most), "steps", f"(first, last) with 1 <= first <= last <= {most}", 0)
    for result in results if group is not None else ():
        groups = result.plan.groups
        if not 0 <= operator.index(group) < groups.count:  # type: ignore[arg-type]
            raise KvsimError(f"{result.policy}: group must be in 0..{groups.count - 1}, got {group}")
    return Window(order[x:end], x, first, last, group)


def _range(given: Range | None, whole: Range, name: str, wanted: str, least: int) -> Range:
    if given is None:
        return whole
    try:
        low, high = map(operator.index, given)
    except (TypeError, ValueError):
        raise KvsimError(f"{name} must be {wanted}, got {given!r}") from None
    if not (whole[0] <= low and low + least <= high <= whole[1]):
        raise KvsimError(f"{name} must be {wanted}, got ({low}, {high})")
    return low, high


def choose_bins(across: int, down: int, cells: int) -> tuple[int, int]:
    """Choose bin sizes, so that there are at most so many cells, about 2.5 times as many across as down."""
    if across * down <= cells:
        return 1, 1
    tall = -(-down // max(1, int((cells / 2.5) ** 0.5)))
    while True:
        rows = -(-down // tall)
        most = cells // rows
        if most >= 1:
            wide = _round(-(-across // most))
            if -(-across // wide) * rows <= cells:
                return wide, tall
        tall += 1


def _round(size: int) -> int:
    """Give the next size of 1, 2, 4, 5 or 8 times a power of ten."""
    base = 1
    while True:
        for factor in (1, 2, 4, 5, 8):
            if factor * base >= size:
                return factor * base
        base *= 10


def kept_fractions(result: Result, window: Window, wide: int, tall: int) -> FloatArray:
    """Give the kept fraction of every cell: the mean over its positions, its steps and the groups.

    Returns
    -------
    array
        [down, across]; NaN where no position of a cell exists yet.
    """
    born = np.maximum(1, window.columns - result.prompt_length + 1)
    across, down = window.edges(wide, tall)
    starts = np.asarray(across[:-1]) - window.x
    last = None if result.mode == "shadow" else _last_steps(result, window)
    grid = np.full((len(down) - 1, starts.size), np.nan)
    for row, start, after in zip(grid, down, down[1:], strict=False):
        exist = np.maximum(0, after - np.maximum(start, born))
        there = np.add.reduceat(exist, starts)
        if last is None:
            kept = _kept_in_shadow(result, window, start, after)
        else:
            kept = np.maximum(0, np.minimum(after, last + 1) - np.maximum(start, born)).mean(axis=0)
        np.divide(np.add.reduceat(kept, starts), there, out=row, where=there > 0)
    return grid


def _last_steps(result: Result, window: Window) -> npt.NDArray[np.int64]:
    """Give the last step after which each column is retained, a row a group."""
    gone = result.evicted_at if window.group is None else result.evicted_at[window.group : window.group + 1]
    own = gone[:, window.columns].astype(np.int64)
    return np.where(own < 0, result.num_steps, own - 1)


def _kept_in_shadow(result: Result, window: Window, start: int, after: int) -> FloatArray:
    """Count the steps of a row of cells after which each column is retained, averaged over groups."""
    assert result.outcome.retained is not None
    sets = result.outcome.retained[start - 1 : after - 1]
    if window.group is None and sets.shape[1] > 1:
        mean: FloatArray = sets.mean(axis=1)[:, window.columns].sum(axis=0, dtype=np.float64)
        return mean
    total: FloatArray = np.count_nonzero(sets[:, window.group or 0, window.columns], axis=0).astype(np.float64)
    return total
