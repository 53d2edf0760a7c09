"""Reading the arrays of an .npz file without trusting its headers, and without holding a whole array in memory."""

import io
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.paths import path_kind

_SUFFIX: Final = ".npy"
_HEADER_BYTES: Final = 2**14
_IN_MEMORY: Final = 2**26
_READ_BYTES: Final = 2**22
# Deflate cannot shrink data further than this; a larger claim is false.
_MOST_DEFLATED: Final = 1040


@dataclass(frozen=True)
class Member:
    """One array of an .npz file.

    Attributes
    ----------
    info : ZipInfo
        Its place in the archive.
    name : str
        Its name.
    shape : tuple of int
        Its shape, checked against the size of its file.
    dtype : dtype
        Its type: numbers, never objects.
    fortran : bool
        Whether it lies in Fortran order.
    start : int
        Where its numbers start.
    """

    info: zipfile.ZipInfo
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class NpzFile:
    """An .npz file, opened for reading; a context manager.

    Parameters
    ----------
    path : Path
        The file.

    Raises
    ------
    TraceError
        If it is not a zip archive, or a member is not an array of numbers or not as large as its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if (kind := path_kind(path)) != "file":
            raise TraceError(f"{path}: is {'missing' if kind == 'missing' else 'not a file'}")
        try:
            self._zip = zipfile.ZipFile(path)
            self._size = os.path.getsize(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise TraceError(f"{path}: is not an .npz file: {error}") from None
        try:
            infos = [info for info in self._zip.infolist() if info.filename.endswith(_SUFFIX)]
            self.members = {member.name: member for member in map(self._describe, infos)}
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> "NpzFile":
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._zip.close()

    def _describe(self, info: zipfile.ZipInfo) -> Member:
        name = info.filename.removesuffix(_SUFFIX)
        where = f"{self.path}: {name}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise TraceError(f"{where}: is compressed by a method NumPy does not use")
        try:
            with self._zip.open(info) as stream:
                shape, fortran, dtype, start = _header(stream)
        except Exception as error:
            # zipfile raises whatever its decompressor does on damaged data.
            raise TraceError(f"{where}: has no readable header: {error or 'it ends early'}") from None
        if dtype.hasobject or dtype.kind not in "biuf":
            raise TraceError(f"{where}: must be numbers, got {dtype}; object arrays are never loaded")
        member = Member(info, name, shape, dtype, fortran, start)
        most = info.compress_size if info.compress_type == zipfile.ZIP_STORED else info.compress_size * _MOST_DEFLATED
        held = min(info.file_size, most if info.compress_size <= self._size else 0) - start
        if member.nbytes != held:
            claim = f"its header claims {list(shape)} of {dtype}, {member.nbytes} bytes"
            raise TraceError(f"{where}: {claim}; the file holds {max(0, held)}")
        return member

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        """Yield a member's numbers as bytes, `size` at a time in the order of the file.

        Raises
        ------
        TraceError
            If the file is damaged.
        """
        member = self.members[name]
        try:
            with self._zip.open(member.info) as stream:
                # zipfile forgets to check a stored member whose header is sought past, since Python 3.12.
                crc = zlib.crc32(_read(stream, member.start).data)
                for start in range(0, member.nbytes, max(1, size)):
                    block = _read(stream, min(size, member.nbytes - start))
                    crc = zlib.crc32(block.data, crc)
                    if start + len(block) == member.nbytes and crc != member.info.CRC:
                        raise zipfile.BadZipFile("its checksum does not match")
                    yield block
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
            raise TraceError(f"{self.path}: {name}: is damaged: {error}") from None

    def rows(self, name: str, scratch: Path) -> Iterator[NDArray[Any]]:
        """Yield an array's entries along axis 0; an array in C order is streamed.

        Parameters
        ----------
        name : str
            The array.
        scratch : Path
            A directory for a temporary file, used for a large array in Fortran order.
        """
        member = self.members[name]
        if member.fortran:
            yield from self.whole(name, scratch)
            return
        for block in self.blocks(name, math.prod(member.shape[1:]) * member.dtype.itemsize):
            yield block.view(member.dtype).reshape(member.shape[1:])

    def whole(self, name: str, scratch: Path) -> NDArray[Any]:
        """Return a whole array; a large one lies in a nameless temporary file, mapped into memory.

        Parameters
        ----------
        name : str
            The array.
        scratch : Path
            A directory on a disk with room for it.

        Raises
        ------
        TraceError
            If the file is damaged.
        OSError
            If the disk is full.
        """
        member = self.members[name]
        flat: NDArray[Any]
        if member.nbytes <= _IN_MEMORY:
            flat = np.concatenate([np.empty(0, np.uint8), *self.blocks(name, _READ_BYTES)]).view(member.dtype)
        else:
            with tempfile.TemporaryFile(dir=scratch) as file:
                for block in self.blocks(name, _READ_BYTES):
                    file.write(block.data)
                file.flush()
                flat = np.memmap(file, member.dtype, "r")
        return flat.reshape(member.shape, order="F" if member.fortran else "C")


def _read(stream: IO[bytes], count: int) -> NDArray[np.uint8]:
    data = np.empty(count, np.uint8)
    done = 0
    while done < count:
        part = stream.read(min(count - done, _READ_BYTES))
        if not part:
            raise EOFError("it ends early")
        data[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    return data


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read an .npy header, and where the numbers start."""
    front = io.BytesIO(stream.read(_HEADER_BYTES))
    version = np.lib.format.read_magic(front)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(front)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(front)
    else:
        raise ValueError(f"version {version} of the .npy format is not supported")
    if any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"shape {shape} is impossible")
    return shape, fortran, dtype, front.tell()
