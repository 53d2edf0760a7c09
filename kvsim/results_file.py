"""Parquet files of results, one row each: read with suspicion, written whole or not at all."""

import contextlib
import fcntl
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim_traces.files import os_reason, sync_directory, write_whole

from kvsim.engines.outcome import METRICS
from kvsim.errors import KvsimError

if TYPE_CHECKING:
    import polars as pl

__all__ = ["RESULT_KEY", "SETTING", "frame_of", "locked", "read_results", "write_results"]

RESULT_KEY = ("trace_hash", "policy", "mode", "loop", "version")
"""What a result is a function of; see `kvsim.result.Result.key`."""

SETTING = "set_"
"""Prefix of the columns that hold the settings of a sweep."""


def read_results(
    path: str | Path, columns: Sequence[str] = (), *, what: str = "file of kvsim results"
) -> "pl.DataFrame":
    """Read a file of results.

    Parameters
    ----------
    path : path
        A Parquet file that a sweep or `kvsim.tables.write_parquet` wrote, or the directory of the latter.
    columns : sequence of str
        Text columns that it must have besides `RESULT_KEY` and ``trace``.
    what : str
        How an error calls the file that was expected.

    Raises
    ------
    KvsimError
        If it cannot be read, is not Parquet, or lacks a column or a value of one.
    """
    import polars as pl

    path = Path(path)
    file = path / "results.parquet" if path.is_dir() else path
    try:
        with open(file, "rb") as source:
            frame = pl.read_parquet(source)
    except OSError as error:
        raise KvsimError(f"{file}: cannot be read ({error.strerror or error})") from error
    except pl.exceptions.PolarsError:
        raise KvsimError(f"{file}: is not a whole Parquet file") from None
    for name in (*RESULT_KEY, "trace", *columns):
        if frame.schema.get(name) != pl.String or frame[name].null_count():
            raise KvsimError(f"{file}: is not a {what}: it has no text column {name!r}")
    for name in ("budget", *METRICS):
        if name in frame.schema and not (frame.schema[name].is_numeric() or frame.schema[name] == pl.Null):
            raise KvsimError(f"{file}: is not a {what}: column {name!r} does not hold numbers")
    for name, kind in frame.schema.items():
        if name.startswith(SETTING) and not (kind.is_numeric() or kind in (pl.String, pl.Null)):
            raise KvsimError(f"{file}: is not a {what}: column {name!r} holds neither numbers nor text")
    return frame


def frame_of(rows: Iterable[dict[str, Any]]) -> "pl.DataFrame":
    """Build a frame of rows whose metrics may be undefined everywhere, and whose settings may be numbers or text."""
    import polars as pl

    rows = list(rows)
    names = {name for row in rows for name in row if name.startswith(SETTING)}
    texts = {name for name in names if any(isinstance(row.get(name), str) for row in rows)}
    for row in rows:
        row.update({name: str(row[name]) for name in texts if row.get(name) is not None})
    frame = pl.DataFrame(rows, infer_schema_length=None)
    return frame.with_columns(pl.col(pl.Null).cast(pl.Float64), pl.col("budget").cast(pl.Float64))


def write_results(frame: "pl.DataFrame", out: Path) -> None:
    """Write a frame aside and rename it into place.

    Raises
    ------
    KvsimError
        If it cannot be written; what was there before is still there then.
    """
    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    try:
        write_whole(out, [buffer.getbuffer()])
        sync_directory(out.parent)
    except OSError as error:
        raise KvsimError(f"{out}: cannot be written ({os_reason(error)})") from error


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create a file's directory, and keep every other process that asks from writing the file meanwhile.

    Raises
    ------
    KvsimError
        If another process is writing it, or nobody can.
    """
    lock = out.with_name(f".{out.name}.lock")
    created = [directory for directory in out.parents if not directory.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise KvsimError(f"{out}: cannot be written ({os_reason(error)})") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise KvsimError(f"{out}: another process is writing it") from None
        except OSError:
            # A file system without locks; go on without one.
            pass
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
        for directory in created:
            # Stays where something was written.
            with contextlib.suppress(OSError):
                directory.rmdir()
