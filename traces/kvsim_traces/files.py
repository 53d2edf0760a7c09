"""Small, careful file operations: bounded reads that follow no links, and writes that are whole or absent."""

import contextlib
import errno
import fcntl
import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvsim_traces.errors import TraceError

MAX_METADATA_BYTES = 16 * 2**20
"""Metadata files larger than this are refused unread."""

MAX_DEPTH = 64
"""Metadata nested deeper than this are refused: not every reader and writer of JSON can walk them."""

ASIDE_SUFFIX = ".tmp"
"""Files are written under their name plus this suffix and renamed when they are whole and on disk."""

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def os_reason(error: OSError) -> str:
    """Say in words why an operation failed; a full disk is called one."""
    reason = error.strerror or str(error)
    return f"disk full ({reason})" if error.errno in _FULL else reason


def open_regular(path: Path) -> int:
    """Open a regular file for reading without following a symbolic link.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    int
        A file descriptor; the caller closes it.

    Raises
    ------
    TraceError
        If the file is missing, unreadable, a symbolic link or not a regular file.
    """
    try:
        # O_NONBLOCK: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TraceError(f"{path}: is a symbolic link; a trace holds no links") from None
        if error.errno == errno.ENOENT:
            raise TraceError(f"{path}: is missing") from None
        raise TraceError(f"{path}: cannot be read: {os_reason(error)}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise TraceError(f"{path}: is not a regular file")
    return descriptor


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is beyond what a float64 holds")
    return value


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON that can be written again: no infinities, no halves of surrogate pairs, no endless nesting.

    Parameters
    ----------
    data : bytes
        UTF-8 text.
    where : str
        What to call it in errors.

    Raises
    ------
    TraceError
        If it is not that.
    """
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\ud" in data.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise TraceError(f"{where}: is not valid JSON: a string holds half a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not valid JSON: {error}") from None
    if _deep(value):
        raise TraceError(f"{where}: is not valid JSON: nested deeper than {MAX_DEPTH} levels")
    return value


def _deep(value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [one for each in level if isinstance(each, dict | list | tuple) for one in _items(each)]
    return bool(level)


def _items(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 16 MiB.

    Parameters
    ----------
    path : Path
        The file.

    Returns
    -------
    dict
        The object.

    Raises
    ------
    TraceError
        If the file is missing, too large, not UTF-8, not JSON or not an object.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_METADATA_BYTES:
            raise TraceError(f"{path}: metadata of {size} bytes is larger than {MAX_METADATA_BYTES} bytes")
        parts = []
        # A file that grows while it is read is cut off here.
        left = size
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(descriptor)
    value = parse_json(b"".join(parts), str(path))
    if not isinstance(value, dict):
        raise TraceError(f"{path}: must hold a JSON object, got {type(value).__name__}")
    return value


def sync_directory(path: Path) -> None:
    """Flush a directory, so that the renames in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def made_directory(path: Path) -> Path:
    """Return the topmost of a path's directories that does not exist yet, or the path itself."""
    top = path
    for parent in path.parents:
        if parent.exists():
            break
        top = parent
    return top


def remove_made(path: Path, top: Path) -> None:
    """Remove a directory, and those above it up to `top` while they are empty."""
    shutil.rmtree(path, ignore_errors=True)
    if path != top:
        remove_empty(path.parent, top)


def remove_empty(path: Path, top: Path) -> None:
    """Remove a directory and those above it up to `top`, while they are empty."""
    with contextlib.suppress(OSError):
        path.rmdir()
        while path != top:
            path = path.parent
            path.rmdir()


def lock_directory(path: Path) -> int:
    """Take the lock that a directory's writer holds while it lives; the kernel drops it when the process dies.

    Returns
    -------
    int
        A file descriptor; closing it gives the lock back.

    Raises
    ------
    TraceError
        If another process is writing there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TraceError(f"{path}: is being written by another process") from None
    except OSError:
        # A file system without locks; go on without one.
        pass
    return descriptor


def write_whole(path: Path, parts: Sequence[Any]) -> None:
    """Write a file aside, flush it and rename it into place; on failure nothing is left.

    The caller flushes the directory (see `sync_directory`) when it has renamed all it wants.

    Parameters
    ----------
    path : Path
        The file to create or replace.
    parts : sequence of buffers
        Its contents, one after the other.

    Raises
    ------
    OSError
        If the file could not be written.
    """
    settle(path, write_aside(path, parts))


def write_report(path: Path, data: Any, *, allow_nan: bool = False) -> None:
    """Write data of any size as indented JSON with `write_whole`; metadata of traces is for `write_json`.

    Raises
    ------
    ValueError
        If there is a NaN or an infinity, which JSON does not have, and `allow_nan` is not set.
    """
    write_whole(path, [json.dumps(data, indent=1, allow_nan=allow_nan).encode() + b"\n"])


def write_aside(path: Path, parts: Sequence[Any]) -> int:
    """Do the first half of `write_whole`: write the file aside.

    Parameters
    ----------
    path : Path
        The file to create or replace in the end.
    parts : sequence of buffers
        Its contents, one after the other.

    Returns
    -------
    int
        The descriptor, for `settle`.

    Raises
    ------
    OSError
        If it could not be written; nothing is left then.
    """
    aside = path.with_name(path.name + ASIDE_SUFFIX)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    with _removed_on_failure(aside, path):
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[os.write(descriptor, view) :]
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def settle(path: Path, descriptor: int) -> None:
    """Do the second half of `write_whole`: flush what `write_aside` wrote and rename it into place.

    Raises
    ------
    OSError
        If that failed; nothing is left then.
    """
    aside = path.with_name(path.name + ASIDE_SUFFIX)
    with _removed_on_failure(aside, path):
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(aside, path)


@contextlib.contextmanager
def _removed_on_failure(aside: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = error.filename or os.fspath(path)
        raise


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object with `write_whole` and flush its directory.

    Raises
    ------
    OSError
        If the file could not be written.
    TraceError
        If the object is larger or deeper than a reader would accept, or not JSON.
    """
    if _deep(value):
        raise TraceError(f"{path}: metadata nested deeper than {MAX_DEPTH} levels")
    try:
        text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: metadata cannot be written as JSON: {error}") from None
    if len(text) > MAX_METADATA_BYTES:
        raise TraceError(f"{path}: metadata of {len(text)} bytes is larger than {MAX_METADATA_BYTES} bytes")
    write_whole(path, [text])
    sync_directory(path.parent)
