"""Heat maps of few rectangles: neighbouring cells of equal value drawn as one."""

import numpy as np

from kvsim.plan import FloatArray

__all__ = ["Rectangle", "rectangles"]

Rectangle = tuple[int, int, int, int, float]
"""Columns x0 to x1 and rows y0 to y1 of a grid, ends excluded, and their value."""


def rectangles(grid: FloatArray) -> list[Rectangle]:
    """Cover a grid with rectangles of equal value, exactly; not the fewest, but few where runs are long.

    Parameters
    ----------
    grid : array
        [down, across]; NaN where there is no cell.

    Returns
    -------
    list of Rectangle
        From the top, then from the left. Equal runs of successive rows are joined, or of successive columns,
        whichever gives fewer.
    """
    by_rows = _join(grid)
    by_columns = [(x0, x1, y0, y1, value) for y0, y1, x0, x1, value in _join(grid.T)]
    fewer = by_rows if len(by_rows) <= len(by_columns) else by_columns
    return sorted(fewer, key=lambda one: (one[2], one[0]))


def _join(grid: FloatArray) -> list[Rectangle]:
    """Cut every row into runs, and join those that the next rows repeat."""
    closed: list[Rectangle] = []
    standing: dict[tuple[int, int, float], int] = {}
    for y in range(len(grid) + 1):
        runs = _runs(grid[y]) if y < len(grid) else []
        ended = standing.keys() - runs
        closed += [(x0, x1, standing[x0, x1, value], y, value) for x0, x1, value in ended]
        standing = {run: standing.get(run, y) for run in runs}
    return closed


def _runs(row: FloatArray) -> list[tuple[int, int, float]]:
    known = np.nan_to_num(row, nan=-1.0)
    edges = [0, *(np.flatnonzero(np.diff(known)) + 1).tolist(), len(row)]
    values = known[edges[:-1]].tolist()
    return [(a, b, v) for a, b, v in zip(edges, edges[1:], values, strict=False) if v >= 0]
