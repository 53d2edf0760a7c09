"""The most recent of what was read."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from numpy.typing import NDArray

CACHE_BYTES: Final = 2**30
"""Bound on the keys and values a trace keeps converted; one layer is always kept."""


class Recent:
    """The most recent arrays.

    Parameters
    ----------
    limit : int
        The most bytes held; one array is always kept.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[tuple[str, int], NDArray[Any]] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: tuple[str, int], make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return the array of a key, made if it is not held; read-only."""
        with self._lock:
            found = self._held.pop(key, None)
            if found is None:
                found = make()
                found.setflags(write=False)
            self._held[key] = found
            while len(self._held) > 1 and sum(one.nbytes for one in self._held.values()) > self._limit:
                self._held.popitem(last=False)
            return found
