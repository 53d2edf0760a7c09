"""Files flushed to the disk by a thread, while more are written."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvsim_traces.files import settle, write_aside

__all__ = ["WriteBehind"]

_MOST_WAITING = 16


class WriteBehind:
    """Writes files in two steps: the caller hands the bytes to the kernel, a thread flushes and renames the file.

    After a failure everything else fails with the same error: what was not flushed is lost.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvsim-disk")
        self._waiting: list[Future[None]] = []
        self._error: BaseException | None = None
        self._places = threading.Semaphore(_MOST_WAITING)

    def write(self, path: Path, parts: Sequence[Any]) -> None:
        """Write a file aside and have it flushed; see `kvsim_traces.files.write_whole`.

        Raises
        ------
        OSError
            If it, or an earlier file, could not be written.
        """
        self._collect(lambda future: future.done())
        self._places.acquire()
        try:
            descriptor = write_aside(path, parts)
        except BaseException:
            self._places.release()
            raise
        self._waiting.append(self._pool.submit(self._settle, path, descriptor))

    def wait(self) -> None:
        """Wait until every file is on disk under its name.

        Raises
        ------
        OSError
            If one is not.
        """
        self._collect(lambda future: True)

    def close(self) -> None:
        """Wait for the thread and end it; errors are not raised any more."""
        self._pool.shutdown(wait=True)

    def _settle(self, path: Path, descriptor: int) -> None:
        try:
            settle(path, descriptor)
        finally:
            self._places.release()

    def _collect(self, ready: Callable[[Future[None]], bool]) -> None:
        left = []
        for future in self._waiting:
            if not ready(future):
                left.append(future)
            elif (error := future.exception()) is not None:
                self._error = self._error or error
        self._waiting = left
        if self._error is not None:
            raise self._error
