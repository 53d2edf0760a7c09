"""A ring of buffers between a GPU that computes and a thread that writes: the one never waits for a copy of the other.

Each place of the ring is a buffer on the device and one in the host's memory. The caller fills the first and goes on; a
second stream copies it into the other, and a thread takes the steps from there in their order. On a CPU the same ring
has plain memory, and the copy is done at once.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["Pipeline", "Place", "places_for"]

_RING_BYTES = 2**28
_MOST_PLACES = 8


def places_for(nbytes: int) -> int:
    """Choose how many steps of `nbytes` the ring holds: two at least, eight at most, about 256 MiB of them."""
    return max(2, min(_MOST_PLACES, _RING_BYTES // max(1, nbytes)))


class Place:
    """A place of the ring.

    Attributes
    ----------
    device, host : Tensor of uint8
        The buffer to fill, and the one it is copied to.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        # A thread that waits for it sleeps.
        self.copied = torch.cuda.Event(blocking=True) if on_gpu else None


class Pipeline:
    """Steps on their way to the disk.

    Parameters
    ----------
    device : torch.device
        Where steps are computed.
    nbytes : int
        Bytes of the largest step.
    places : int, optional
        `places_for` by default.
    """

    def __init__(self, device: torch.device, nbytes: int, places: int | None = None) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free = deque(Place(nbytes, device) for _ in range(places or places_for(nbytes)))
        self._waiting: deque[tuple[Place, Any]] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ending = self._stopped = False
        self._consumed = 0

    @property
    def stopped(self) -> bool:
        """Whether `consume` asked to stop."""
        return self._stopped

    @property
    def consumed(self) -> int:
        """Steps consumed so far."""
        return self._consumed

    def acquire(self) -> Place:
        """Wait for a free place.

        Raises
        ------
        BaseException
            What `consume` raised, if it did.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._error is not None)
            if self._error is not None:
                raise self._error
            return self._free.popleft()

    def submit(self, place: Place, used: int, item: Any) -> None:
        """Hand over a place that is filled by what has been launched so far.

        Parameters
        ----------
        place : Place
            From `acquire`.
        used : int
            Bytes that are filled.
        item : object
            Handed to `consume`.
        """
        if self._stream is not None and place.copied is not None:
            self._stream.wait_stream(torch.cuda.current_stream(place.device.device))
            with torch.cuda.stream(self._stream):
                place.host[:used].copy_(place.device[:used], non_blocking=True)
                place.copied.record(self._stream)
        else:
            place.host[:used].copy_(place.device[:used])
        with self._changed:
            self._waiting.append((place, item))
            self._changed.notify_all()

    def release(self) -> None:
        """Let go of the buffers; the pipeline is of no further use."""
        self._free.clear()
        self._waiting.clear()

    @contextlib.contextmanager
    def feeding(self, consume: Callable[[torch.Tensor, Any], bool]) -> Iterator[None]:
        """Have a thread consume what is submitted inside the block.

        Leaving the block waits until every submitted step is consumed, also after an exception; after a second one
        (another Ctrl-C) only until the step in hand is.

        Parameters
        ----------
        consume : callable
            Called in the thread, with a step's buffer in the host's memory and what `submit` was given; returns whether
            to stop: steps that follow are dropped.

        Raises
        ------
        BaseException
            What `consume` raised, if it did.
        """
        thread = threading.Thread(target=self._work, args=(consume,), name="kvsim-writer", daemon=True)
        thread.start()
        try:
            yield
            self._end()
            thread.join()
            if self._error is not None:
                raise self._error
        finally:
            # Nothing may be written any more once this returns.
            self._end()
            while thread.is_alive():
                try:
                    thread.join()
                except KeyboardInterrupt:
                    self._waiting.clear()
            if self._stream is not None:
                self._stream.synchronize()

    def _end(self) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def _work(self, consume: Callable[[torch.Tensor, Any], bool]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ending)
                if not self._waiting:
                    return
                place, item = self._waiting.popleft()
            try:
                if not self._stopped:
                    if place.copied is not None:
                        place.copied.synchronize()
                    self._stopped = consume(place.host, item)
                    self._consumed += 1
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._free.append(place)
                self._changed.notify_all()
