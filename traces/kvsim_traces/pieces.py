"""Pieces being written: a buffer in its final on-disk order, flushed whole."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from kvsim_traces.files import write_whole
from kvsim_traces.layout import ArrayLayout

Bytes = NDArray[np.uint8]


def crc32c(data: Bytes) -> int:
    """Return the CRC-32C of contiguous bytes, without a copy."""
    return int(google_crc32c.value(data))


def crc_bytes(data: Bytes) -> bytes:
    """Return the CRC-32C as it is stored: four bytes, little-endian."""
    return crc32c(data).to_bytes(4, "little")


def chunk_view(layout: ArrayLayout, data: Bytes, chunks: int) -> NDArray[Any]:
    """View the chunks at the start of a piece as one array.

    Parameters
    ----------
    layout : ArrayLayout
        How the piece lies in memory.
    data : ndarray of uint8
        At least ``chunks * layout.slot_bytes`` bytes.
    chunks : int
        How many chunks there are; a multiple of those in one row of the grid.

    Returns
    -------
    ndarray
        Shape ``layout.grid + layout.chunk``, but for axis 0 of the grid, which is as long as there are chunks. The
        checksums between the chunks are skipped.
    """
    grid = (chunks // math.prod(layout.grid[1:]), *layout.grid[1:])
    item = layout.numpy_dtype.itemsize
    outer = [layout.slot_bytes * math.prod(layout.grid[axis + 1 :]) for axis in range(len(layout.grid))]
    inner = [item * math.prod(layout.chunk[axis + 1 :]) for axis in range(len(layout.chunk))]
    return np.ndarray(grid + layout.chunk, layout.numpy_dtype, data, strides=(*outer, *inner))


class PieceBuffer:
    """The piece of an array that is being filled.

    Parameters
    ----------
    layout : ArrayLayout
        How the array lies on disk.
    directory : Path
        The array's directory.
    """

    def __init__(self, layout: ArrayLayout, directory: Path) -> None:
        self.layout = layout
        self.directory = directory
        self.rows = 0
        """Rows of the whole array so far."""
        self._flushed = 0
        self._data: Bytes = np.zeros(layout.chunks * layout.slot_bytes, np.uint8)
        self._view = chunk_view(layout, self._data, layout.chunks)

    @property
    def filled(self) -> int:
        """Rows in the current piece."""
        return self.rows - self._current * self.layout.piece_rows

    @property
    def _current(self) -> int:
        # A full piece stays current until it has been flushed, so that a failed flush can be tried again.
        return self._flushed // self.layout.piece_rows

    @property
    def full(self) -> bool:
        """Whether the current piece must be flushed before another row fits."""
        return self.filled == self.layout.piece_rows

    @property
    def room(self) -> int:
        """Rows that still fit."""
        return self.layout.piece_rows - self.filled

    def slot(self) -> NDArray[Any]:
        """View the next step's place: one row of an array whose axis 0 grows, without that axis.

        Fill it, then call `advance`.
        """
        row, layout = self.filled, self.layout
        view = self._view[row // layout.chunk[0]]
        rank = len(layout.chunk)
        # Axes left: rank - 1 of the grid, then the chunk's; take the row, and drop the axes of length one.
        row_view = view[(slice(None),) * (rank - 1) + (row % layout.chunk[0],)]
        # Only the layers may be cut: [K, 1, ..., 1, rest] is [K, rest].
        uncut = layout.grid[1:] == (1,) * (rank - 1)
        place: NDArray[Any] = row_view[(0,) * (rank - 1) if uncut else (slice(None),) + (0,) * (rank - 1)]
        return place

    def advance(self, rows: int = 1) -> None:
        """Count rows that were put into the buffer."""
        self.rows += rows

    def put_positions(self, rows: NDArray[Any]) -> None:
        """Put [K, Hk, n, d] into an array whose axis 2 grows; n must fit into `room`. Call `advance` afterwards."""
        start = self.filled
        self._view[:, 0, 0, 0, 0, :, start : start + rows.shape[2]] = rows

    def put_items(self, items: NDArray[Any]) -> None:
        """Put [n] into a flat array; n must fit into `room`. Call `advance` afterwards."""
        done, start, size = 0, self.filled, self.layout.chunk[0]
        while done < len(items):
            chunk, offset = divmod(start + done, size)
            count = min(size - offset, len(items) - done)
            self._view[chunk, offset : offset + count] = items[done : done + count]
            done += count

    def flush(self, write: Callable[[Path, Sequence[Any]], None] = write_whole) -> bool:
        """Write the current piece if it holds rows that are not on disk.

        Parameters
        ----------
        write : callable
            Writes a file, given its path and the buffers that make it up; must be done with them when it returns.

        Returns
        -------
        bool
            Whether a file was written; the caller then flushes the directory.

        Raises
        ------
        OSError
            If it could not be written; the buffer is unchanged and the flush can be repeated.
        """
        if self.rows == self._flushed:
            return False
        layout, filled = self.layout, self.filled
        chunks = layout.chunks_for(filled)
        self._clear_after(filled)
        slots = self._data.reshape(layout.chunks, layout.slot_bytes)
        for slot in slots[:chunks]:
            slot[layout.chunk_bytes :] = np.frombuffer(crc_bytes(slot[: layout.chunk_bytes]), np.uint8)
        index = layout.index(chunks).view(np.uint8).reshape(-1)
        path = self.directory / layout.piece_name(self._current)
        write(path, [self._data[: chunks * layout.slot_bytes], index, crc_bytes(index)])
        self._flushed = self.rows
        return True

    def _clear_after(self, filled: int) -> None:
        """Zero what an earlier piece left behind the last row."""
        layout = self.layout
        if layout.axis:
            self._view[:, 0, 0, 0, 0, :, filled:] = 0
        elif filled % layout.chunk[0]:
            last = self._view[filled // layout.chunk[0]]
            rank = len(layout.chunk)
            last[(slice(None),) * (rank - 1) + (slice(filled % layout.chunk[0], None),)] = 0
