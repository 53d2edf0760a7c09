"""An array on disk, memory-mapped piece by piece; each chunk's checksum is checked the first time it is touched."""

import mmap
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import ASIDE_SUFFIX, open_regular, os_reason
from kvsim_traces.layout import METADATA_NAME, ArrayLayout
from kvsim_traces.paths import path_kind
from kvsim_traces.pieces import Bytes, chunk_view, crc32c, crc_bytes

_MAPPED_PIECES: Final = 32
"""Pieces of one array mapped at a time; each costs a file descriptor."""


@dataclass(frozen=True)
class Listing:
    """What lies in an array's directory.

    Attributes
    ----------
    pieces : dict of int to str
        File names of the pieces by number.
    leftovers : list of str
        Files that a killed writer left aside.
    unknown : list of str
        Anything else but ``zarr.json``.
    """

    pieces: dict[int, str]
    leftovers: list[str]
    unknown: list[str]


def list_pieces(layout: ArrayLayout, directory: Path) -> Listing:
    """List an array's directory once.

    Raises
    ------
    TraceError
        If the directory cannot be listed.
    """
    check_directory(directory)
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise TraceError(f"{directory}: cannot be listed: {os_reason(error)}") from error
    listing = Listing({}, [], [])
    for name in names:
        aside = name.endswith(ASIDE_SUFFIX)
        base = name.removesuffix(ASIDE_SUFFIX)
        numbers = re.fullmatch(r"c((?:\.\d{1,10})+)", base, re.ASCII)
        parts = [int(part) for part in numbers[1][1:].split(".")] if numbers else []
        piece = parts[layout.axis] if len(parts) == len(layout.shape) else -1
        is_piece = piece >= 0 and layout.piece_name(piece) == base
        if aside and (is_piece or base == METADATA_NAME):
            listing.leftovers.append(name)
        elif is_piece:
            listing.pieces[piece] = name
        elif name != METADATA_NAME:
            listing.unknown.append(name)
    return listing


def check_directory(path: Path) -> None:
    """Check that a path is a directory and not a link to one.

    Raises
    ------
    TraceError
        If it is missing, a symbolic link or not a directory.
    """
    kind = path_kind(path, follow=False)
    if kind != "directory":
        words = {"missing": "missing", "link": "a symbolic link; a trace holds no links"}
        raise TraceError(f"{path}: is {words.get(kind, 'not a directory')}")


class _Piece:
    """One mapped piece."""

    def __init__(self, layout: ArrayLayout, path: Path, least: int) -> None:
        descriptor = open_regular(path)
        try:
            size = os.fstat(descriptor).st_size
            self.chunks = stored_chunks(layout, path, size, least)
            mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            if isinstance(error, TraceError):
                raise
            raise TraceError(f"{path}: cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        data: Bytes = np.frombuffer(mapped, np.uint8)
        end = self.chunks * layout.slot_bytes
        index = data[end:-4]
        if crc_bytes(index) != data[-4:].tobytes():
            raise TraceError(f"{path}: index: checksum does not match; the file is damaged")
        if not np.array_equal(index.view("<u8").reshape(-1, 2), layout.index(self.chunks)):
            raise TraceError(f"{path}: index: must list {self.chunks} chunks one after the other")
        self.slots = data[:end].reshape(self.chunks, layout.slot_bytes)
        self.view = chunk_view(layout, data[:end], self.chunks)


def stored_chunks(layout: ArrayLayout, path: Path, size: int, least: int) -> int:
    """Return how many chunks a piece of `size` bytes holds.

    Raises
    ------
    TraceError
        If the size fits no number of chunks, or fewer than `least`.
    """
    chunks, rest = divmod(size - layout.index_bytes, layout.slot_bytes)
    row = layout.chunks // layout.grid[0]
    if rest or not least <= chunks <= layout.chunks or chunks % row:
        wanted = layout.file_bytes(least)
        more = "" if least == layout.chunks else " or more"
        raise TraceError(f"{path}: size: must be {wanted}{more} bytes, got {size}; the file is truncated or damaged")
    return chunks


class StoredArray:
    """One array of a trace, read through checksums.

    Parameters
    ----------
    layout : ArrayLayout
        How it lies on disk.
    directory : Path
        Where.
    rows : int
        Rows along its growing axis that are there.
    verify : bool
        Whether to check checksums.

    Raises
    ------
    TraceError
        If the directory cannot be listed.
    """

    def __init__(self, layout: ArrayLayout, directory: Path, rows: int, *, verify: bool = True) -> None:
        self.layout = layout
        self.directory = directory
        self.rows = rows
        self.verify = verify
        self.listing = list_pieces(layout, directory)
        self._mapped: OrderedDict[int, _Piece] = OrderedDict()
        self._checked: dict[int, NDArray[np.bool_]] = {}
        self._lock = threading.Lock()

    @property
    def pieces(self) -> int:
        """Number of pieces that hold the rows."""
        return self.layout.pieces(self.rows)

    def check_files(self) -> "StoredArray":
        """Check that every piece is there, a regular file and of the right size; return the array.

        Raises
        ------
        TraceError
            Naming the first file that is not.
        """
        found = self.listing.pieces
        # A claim of any size ends at the first piece that is not there.
        for piece in range(min(self.pieces, len(found) + 1)):
            path = self.path(piece)
            if piece not in found:
                raise TraceError(f"{path}: is missing; {self.rows} rows need {self.pieces} pieces")
            try:
                status = os.lstat(path)
            except OSError as error:
                raise TraceError(f"{path}: cannot be read: {os_reason(error)}") from error
            if not stat.S_ISREG(status.st_mode):
                raise TraceError(f"{path}: is not a regular file; a trace holds no links")
            stored_chunks(self.layout, path, status.st_size, self._least(piece))
        return self

    def path(self, piece: int) -> Path:
        """Return the file of a piece."""
        return self.directory / self.layout.piece_name(piece)

    def _least(self, piece: int) -> int:
        return self.layout.chunks_for(self.layout.rows_in(piece, self.rows))

    def _piece(self, piece: int) -> _Piece:
        with self._lock:
            if piece in self._mapped:
                self._mapped.move_to_end(piece)
                return self._mapped[piece]
            mapped = self._mapped[piece] = _Piece(self.layout, self.path(piece), self._least(piece))
            if len(self._mapped) > _MAPPED_PIECES:
                self._mapped.popitem(last=False)
            return mapped

    def _check(self, number: int, piece: _Piece, chunks: Iterable[int]) -> None:
        if not self.verify:
            return
        checked = self._checked.get(number)
        if checked is None or len(checked) < piece.chunks:
            checked = self._checked[number] = np.zeros(piece.chunks, np.bool_)
        size = self.layout.chunk_bytes
        for chunk in chunks:
            if not checked[chunk]:
                slot = piece.slots[chunk]
                if crc32c(slot[:size]) != int.from_bytes(slot[size:].tobytes(), "little"):
                    place = f"{self.path(number)}: {self._describe(number, chunk)}"
                    raise TraceError(f"{place}: checksum does not match; the file is damaged")
                checked[chunk] = True

    def _describe(self, piece: int, chunk: int) -> str:
        layout = self.layout
        place = np.unravel_index(chunk, layout.grid)
        starts = [int(at) * size for at, size in zip(place, layout.chunk, strict=True)]
        starts[layout.axis] += piece * layout.piece_rows
        names = layout.metadata()["dimension_names"]
        spans = [
            f"{name} {start}" + (f"..{start + size - 1}" if size > 1 else "")
            for name, start, size, count in zip(names, starts, layout.chunk, layout.grid, strict=True)
            if count > 1 or len(layout.grid) == 1
        ]
        return f"chunk {chunk}" + (f" ({', '.join(spans)})" if spans else "")

    def row(self, index: int, layers: list[int] | None = None) -> NDArray[Any]:
        """Return one row of an array whose axis 0 is steps or layers, checked.

        Parameters
        ----------
        index : int
            The row, from 0.
        layers : list of int, optional
            Which entries of axis 1; all by default.

        Returns
        -------
        ndarray
            A read-only view without axis 0 (a copy if `layers` are given), as wide as stored.
        """
        layout = self.layout
        number, inside = divmod(index, layout.piece_rows)
        piece = self._piece(number)
        group, offset = divmod(inside, layout.chunk[0])
        row = layout.chunks // layout.grid[0]
        cut = layout.grid[1] > 1
        base = group * row
        some = range(row) if layers is None or not cut else layers
        self._check(number, piece, (base + one for one in some))
        rank = len(layout.chunk)
        view = piece.view[group][(slice(None),) * (rank - 1) + (offset,)]
        found: NDArray[Any] = view[(slice(None),) + (0,) * (rank - 1)] if cut else view[(0,) * (rank - 1)]
        return found if layers is None else found[layers]

    def layer(self, layer: int) -> NDArray[Any]:
        """Return one layer of keys or values over all positions, checked; a copy of shape [Hk, rows, d]."""
        layout = self.layout
        result = np.empty((layout.shape[1], self.rows, layout.shape[3]), layout.numpy_dtype.newbyteorder("="))
        for number in range(self.pieces):
            piece = self._piece(number)
            self._check(number, piece, (layer,))
            start = number * layout.piece_rows
            count = layout.rows_in(number, self.rows)
            result[:, start : start + count] = piece.view[layer, 0, 0, 0, 0, :, :count]
        return result

    def whole(self) -> NDArray[Any]:
        """Return a whole flat or prompt array, checked; a copy."""
        if len(self.layout.shape) == 1:
            return self.front(self.rows)
        return np.stack([self.row(index) for index in range(self.rows)])

    def front(self, rows: int) -> NDArray[Any]:
        """Return the first rows of a flat array, checked; a copy."""
        parts = [np.empty(0, self.layout.dtype)]
        for number in range(self.layout.pieces(rows)):
            count = self.layout.rows_in(number, rows)
            piece = self._piece(number)
            self._check(number, piece, range(self.layout.chunks_for(count)))
            parts.append(piece.view.reshape(-1)[:count].astype(self.layout.dtype))
        return np.concatenate(parts)

    def check_piece(self, number: int) -> int:
        """Check every chunk of a piece and return how many it holds.

        Raises
        ------
        TraceError
            Naming the file and the first damaged chunk.
        """
        piece = self._piece(number)
        self._check(number, piece, range(piece.chunks))
        return piece.chunks

    def chunks(self) -> Iterator[Bytes]:
        """Yield the bytes of every chunk in the order on disk, checked; read-only views."""
        for number in range(self.pieces):
            piece = self._piece(number)
            for chunk in range(piece.chunks):
                self._check(number, piece, (chunk,))
                yield piece.slots[chunk, : self.layout.chunk_bytes]

    def checksums(self) -> Iterator[bytes]:
        """Yield the stored checksums of the chunks that hold the rows, a piece at a time; only they are read."""
        for number in range(self.pieces):
            yield self._piece(number).slots[: self._least(number), self.layout.chunk_bytes :].tobytes()
