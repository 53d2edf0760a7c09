"""How fast traces are written and read, beside what the machine can do in the same minute."""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import os_reason
from kvsim_traces.layout import SCALE
from kvsim_traces.manifest import Manifest
from kvsim_traces.paths import hidden_directory, local_path
from kvsim_traces.reader import open_trace
from kvsim_traces.writer import TraceWriter

SHAPE: Final = (128, 30, 16, 4096)
"""Steps, layers, heads, positions: 503 MB of float16."""

_BASELINE_BYTES: Final = 2**28
_PIECE_BYTES: Final = 31_500_000


def bench_trace(
    directory: str | Path,
    *,
    shape: tuple[int, int, int, int] = SHAPE,
    repeats: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure appending to and reading from a `heads` trace.

    Parameters
    ----------
    directory : str or Path
        An existing directory on the disk to measure; twice the trace's size must be free. What is written is removed.
    shape : tuple of int
        T, K, H and L0 + T of the trace.
    repeats : int
        Runs of each measurement; medians are returned.
    progress : callable, optional
        Called with the runs done and their number.

    Returns
    -------
    dict
        Decimal rates. ``append_mb_s``: float16 rows appended, checked, checksummed, flushed and committed, up to and
        with `close`; ``append_float32_mb_s``: the same from float32 probabilities, counted in float16 bytes;
        ``read_checked_gb_s``: every chunk of a freshly opened trace through its checksum; ``read_unchecked_gb_s``:
        every chunk read once without; ``rows_gb_s``: `Trace.attention_rows` of every step, in float16 bytes. The
        baselines: ``write_fsync_mb_s`` (plain files as large as a piece), ``memory_read_gb_s``, ``memcpy_gb_s``.
        ``runs`` has every run.

    Raises
    ------
    TraceError
        If the directory cannot be written, or the disk is full.
    """
    steps, layers, heads, positions = shape
    size = 2 * steps * layers * heads * positions
    runs: dict[str, list[float]] = {}
    block = np.ones(_BASELINE_BYTES // 8, np.uint64)
    copy = np.zeros_like(block)

    def rate(name: str, count: int, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        unit = 1e6 if name.endswith("_mb_s") else 1e9
        runs.setdefault(name, []).append(count / (time.perf_counter() - start) / unit)

    try:
        with hidden_directory(local_path(directory) / "kvsim-bench") as root:
            exact = _rows(layers, heads, positions, positions - steps)
            stored = [(rows * np.float32(SCALE)).astype(np.float16) for rows in exact]
            for repeat in range(repeats):
                path = root / f"trace{repeat}"
                rate("write_fsync_mb_s", size, lambda path=path: write_plain(path, size))  # type: ignore[misc]
                shutil.rmtree(path)
                rate("append_float32_mb_s", size, lambda path=path: _append(path, shape, exact, False))  # type: ignore[misc]
                shutil.rmtree(path)
                rate("append_mb_s", size, lambda path=path: _append(path, shape, stored, True))  # type: ignore[misc]
                rate("read_checked_gb_s", size, lambda path=path: _read(path, True))  # type: ignore[misc]
                rate("read_unchecked_gb_s", size, lambda path=path: _read(path, False))  # type: ignore[misc]
                rate("rows_gb_s", size, lambda path=path: _read_rows(path))  # type: ignore[misc]
                shutil.rmtree(path)
                rate("memory_read_gb_s", block.nbytes, block.sum)
                rate("memcpy_gb_s", block.nbytes, lambda: np.copyto(copy, block))
                if progress is not None:
                    progress(repeat + 1, repeats)
    except OSError as error:
        raise TraceError(f"{error.filename or directory}: {os_reason(error)}; nothing was measured") from error
    figures = {name: round(statistics.median(values), 3) for name, values in sorted(runs.items())}
    every = {name: [round(value, 3) for value in values] for name, values in sorted(runs.items())}
    return {"shape": list(shape), "bytes": size, "repeats": repeats, "cpus": os.cpu_count(), **figures, "runs": every}


def _rows(layers: int, heads: int, positions: int, seen: int) -> list[NDArray[np.float32]]:
    """Return rows whose mass lies on the first `seen` positions, so that every step's part of them sums to 1."""
    generator = np.random.default_rng(0)
    made = []
    for _ in range(4):
        rows = np.zeros((layers, heads, positions), np.float32)
        rows[..., :seen] = generator.exponential(size=(layers, heads, seen))
        rows /= rows.sum(axis=-1, keepdims=True)
        made.append(rows)
    return made


def _append(path: Path, shape: tuple[int, int, int, int], rows: list[NDArray[Any]], scaled: bool) -> None:
    steps, layers, heads, positions = shape
    manifest = Manifest(
        capture="heads",
        prompt_length=positions - steps,
        planned_steps=steps,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        arrays=["attention", "row_sums"],
    )
    with TraceWriter(path, manifest) as writer:
        for step in range(1, steps + 1):
            row = rows[step % len(rows)][..., : positions - steps + step]
            writer.append(attention=row, scaled=scaled)


def _read(path: Path, verify: bool) -> None:
    for chunk in open_trace(path, verify=verify).stored("attention").chunks():
        if not verify:
            chunk.max()


def _read_rows(path: Path) -> None:
    trace = open_trace(path)
    for step in range(1, trace.num_steps + 1):
        trace.attention_rows(step)


def write_plain(path: Path, size: int, piece: int = _PIECE_BYTES) -> None:
    """Write files of `piece` bytes into a new directory, each flushed to the disk, `size` bytes in all."""
    path.mkdir()
    data = np.ones(piece, np.uint8)
    for number in range(-(-size // piece)):
        with open(path / str(number), "wb") as file:
            file.write(data[: size - number * piece].data)
            file.flush()
            os.fsync(file.fileno())
