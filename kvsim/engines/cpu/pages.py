"""Lowest and highest keys of pages, for the bounds of Quest."""

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["extremes"]


@numba.njit(cache=True, nogil=True)
def extremes(
    keys: npt.NDArray[np.float32],
    paged: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.int64],
    size: int,
    low: npt.NDArray[np.float32],
    high: npt.NDArray[np.float32],
) -> None:
    """Set low and high, [pages, d], to the extremes of keys [heads, n, d] over pages of `size` marked positions.

    A head's pages start at ``starts[head]`` and take its marked positions in order; the last one may be shorter.
    """
    heads, n, dim = keys.shape
    for head in range(heads):
        page, held = starts[head] - 1, size
        for i in range(n):
            if not paged[head, i]:
                continue
            if held == size:
                page, held = page + 1, 0
                for d in range(dim):
                    low[page, d] = keys[head, i, d]
                    high[page, d] = keys[head, i, d]
            else:
                for d in range(dim):
                    low[page, d] = min(low[page, d], keys[head, i, d])
                    high[page, d] = max(high[page, d], keys[head, i, d])
            held += 1
