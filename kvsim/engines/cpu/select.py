"""Choosing whom to evict: an argmin in the steady state, a quickselect at the first eviction."""

import numba
import numpy as np

__all__ = ["drop_lowest", "kth_smallest", "lowest"]


@numba.njit(cache=True, nogil=True)
def kth_smallest(values, k):
    """Give the k-th smallest (from 0) of a float32 array, which is reordered (Hoare's quickselect)."""
    low, high = 0, values.size - 1
    while low < high:
        middle = (low + high) >> 1
        a, b, c = values[low], values[middle], values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while pivot < values[j]:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return values[k]


@numba.njit(cache=True, nogil=True)
def drop_lowest(m, pos, n, budget, n_sink, n_recent, keys, scratch, drop):
    """Mark whom to evict so that `budget` of the n positions stay; give (how many, tied positions).

    Lowest float32 state first, among equals the lowest position, protected positions last. `pos` ascends; `keys`,
    `scratch` and `drop` are work space of at least n elements, `drop` being the answer.
    """
    newest = pos[n - 1]
    free = 0
    for j in range(n):
        drop[j] = False
        if pos[j] < n_sink or pos[j] > newest - n_recent:
            keys[j] = np.float32(np.inf)
        else:
            keys[j] = np.float32(m[j])
            free += 1
    excess = min(n - budget, free)
    if excess <= 0:
        return 0, 0
    if excess == 1:
        cut = keys[0]
        for j in range(n):
            cut = min(cut, keys[j])
    else:
        for j in range(n):
            scratch[j] = keys[j]
        cut = kth_smallest(scratch[:n], excess - 1)
    below, equal = 0, 0
    for j in range(n):
        below += keys[j] < cut
        equal += keys[j] == cut
    quota = excess - below
    ties = equal if equal > quota and excess < free else 0
    for j in range(n):
        if keys[j] < cut:
            drop[j] = True
        elif keys[j] == cut and quota > 0:
            drop[j] = True
            quota -= 1
    return excess, ties


@numba.njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})
def lowest(keys, n):
    """Give the place of the lowest of n float32 keys, the first among equals, and how many share it."""
    low = keys[0]
    for j in range(n):
        low = min(low, keys[j])
    equal, first = 0, n
    for j in range(n):
        equal += keys[j] == low
        first = min(first, j if keys[j] == low else n)
    return first, equal
