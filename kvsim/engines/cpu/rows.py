"""Token-major rows: a step's scores of one token lie together, so that reading survivors skips the evicted."""

import atexit
import contextlib
import json
import mmap
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numba
import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, TraceError
from kvsim_traces.files import read_json

from kvsim.engines.cpu.half import LANES, load

__all__ = ["TokenRows", "bounded", "token_rows"]

IN_MEMORY = 256 * 2**20
"""Rows up to this size are kept in memory; larger ones go to a file beside the trace."""

DROP_EVERY = 0.005
"""Seconds between two droppings of mapped pages: what memory can deliver meanwhile bounds what stays."""

VERSION = 1

FILES = ("rows", "rows.json")


@dataclass(frozen=True)
class TokenRows:
    """All rows of a trace's eligible layers, token-major.

    Step t (from 0) has L0 + t + 1 tokens; token i's K * H elements (K alone for a `scores` capture), layer after
    layer, start at ``data[bases[t] + i * stride]``.

    Attributes
    ----------
    data : array
        uint16 bits of float16 values times 2^15 as recorded, or float32 probabilities for rows computed from queries.
    bases : array of int64
        [T] offset of each step.
    stride : int
        Elements from one token to the next, a multiple of `kvsim.engines.cpu.half.LANES`; the padding is zero.
    heads : int
        Elements a layer: H, or 1 for a `scores` capture.
    scale : float
        What an element is to be multiplied by.
    """

    data: npt.NDArray[Any]
    bases: npt.NDArray[np.int64]
    stride: int
    heads: int
    scale: float


class _Store:
    """Rows in use by this process: the in-memory ones up to a bound, the mapped ones by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: OrderedDict[str, TokenRows] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, trace: Trace) -> TokenRows:
        with self._lock:
            key = f"{trace.hash} {trace.path}"
            rows = self._rows.pop(key, None) or _open_or_build(trace)
            self._rows[key] = rows
            held = [r for r in self._rows.values() if not isinstance(r.data, np.memmap)]
            while sum(r.data.nbytes for r in held) > self._limit and len(held) > 1:
                oldest = held.pop(0)
                self._rows = OrderedDict((k, r) for k, r in self._rows.items() if r is not oldest)
            return rows


_STORE = _Store(2 * IN_MEMORY)


def token_rows(trace: Trace) -> TokenRows:
    """Give a trace's token-major rows, built on first use.

    Small ones live in memory. Large ones lie in ``<trace>.tokens/`` beside the trace (in a temporary directory where
    that cannot be written), checksummed by step and checked when opened; the directory may be deleted at any time.

    Parameters
    ----------
    trace : Trace
        The recording.

    Raises
    ------
    TraceError
        If the recording is damaged.
    """
    return _STORE.get(trace)


def _open_or_build(trace: Trace) -> TokenRows:
    layers = len(trace.eligible_layers)
    heads = 1 if trace.capture == "scores" else trace.num_heads
    halves = trace.capture in ("scores", "heads")
    stride = -(-layers * heads // LANES) * LANES
    lengths = trace.prompt_length + np.arange(1, trace.num_steps + 1)
    bases = np.concatenate([[0], np.cumsum(lengths * stride)]).astype(np.int64)
    dtype = np.dtype(np.uint16 if halves else np.float32)
    shape = int(bases[-1]) + LANES
    if shape * dtype.itemsize <= IN_MEMORY:
        data = np.zeros(shape, dtype)
        for t in range(trace.num_steps):
            _fill(trace, t, heads, data[bases[t] : bases[t + 1]].reshape(-1, stride))
    else:
        data = _mapped(trace, heads, stride, bases, shape, dtype)
    return TokenRows(data, bases[:-1], stride, heads, 2.0**-15 if halves else 1.0)


def _fill(trace: Trace, t: int, heads: int, out: npt.NDArray[Any]) -> None:
    """Write step t's rows into `out`, [tokens, stride]."""
    layers = list(trace.eligible_layers)
    if out.dtype == np.uint16:
        rows: npt.NDArray[Any] = trace.stored_rows(t + 1, layers).view(np.uint16)
    else:
        rows = trace.attention_rows(t + 1, layers)
    _transpose(rows.reshape(len(layers) * heads, -1), out)


@numba.njit(cache=True, nogil=True)
def _transpose(rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Write rows [elements, tokens] into out [tokens, stride], in blocks that stay in the first-level cache."""
    elements, tokens = rows.shape
    for first in range(0, tokens, 32):
        last = min(tokens, first + 32)
        for e in range(elements):
            for i in range(first, last):
                out[i, e] = rows[e, i]


def _mapped(
    trace: Trace, heads: int, stride: int, bases: npt.NDArray[np.int64], size: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    want = {"version": VERSION, "hash": trace.hash, "stride": stride, "dtype": dtype.name, "size": size}
    beside = trace.path.with_name(trace.path.name + ".tokens")
    if _is_ours(beside) and _is_intact(beside, want, trace, bases, heads, dtype):
        return np.memmap(beside / "rows", dtype, mode="r")
    # Never into the place of something that kvsim did not make.
    writable = os.access(beside.parent, os.W_OK) and (_is_ours(beside) or not os.path.lexists(beside))
    parent = beside.parent if writable else Path(tempfile.gettempdir())
    aside = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", suffix=".tmp", dir=parent))
    try:
        checksums = []
        with open(aside / "rows", "wb") as file:
            for t in range(trace.num_steps):
                block = np.zeros((trace.prompt_length + t + 1, stride), dtype)
                _fill(trace, t, heads, block)
                payload = block.tobytes()
                checksums.append(google_crc32c.value(payload))
                file.write(payload)
            file.write(bytes(LANES * dtype.itemsize))
        (aside / "rows.json").write_text(json.dumps({**want, "crc32c": checksums}))
        if not writable:
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
            return np.memmap(aside / "rows", dtype, mode="r")
        # Mapped before it is renamed: another process may put its own, equal one into this place at once.
        data = np.memmap(aside / "rows", dtype, mode="r")
        if _is_ours(beside):
            shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(aside, beside)
            return data
        shutil.rmtree(aside, ignore_errors=True)
        return data
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TraceError(f"{aside}: cannot write token-major rows ({error.strerror})") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _is_ours(directory: Path) -> bool:
    """Whether a directory is one of rows: a real directory with nothing in it but the two files of one."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    with os.scandir(directory) as entries:
        return all(entry.name in FILES and entry.is_file(follow_symlinks=False) for entry in entries)


def _is_intact(
    directory: Path,
    want: dict[str, Any],
    trace: Trace,
    bases: npt.NDArray[np.int64],
    heads: int,
    dtype: np.dtype[Any],
) -> bool:
    """Whether rows that an earlier process built are this trace's, undamaged, and sum to what the trace says."""
    try:
        facts = read_json(directory / "rows.json")
        checksums = facts.pop("crc32c", None)
        if facts != want or not isinstance(checksums, list) or len(checksums) != trace.num_steps:
            return False
        if os.path.getsize(directory / "rows") != want["size"] * dtype.itemsize:
            return False
        layers = list(trace.eligible_layers)
        with open(directory / "rows", "rb") as file:
            for t, expected in enumerate(checksums):
                payload = file.read(int(bases[t + 1] - bases[t]) * dtype.itemsize)
                if google_crc32c.value(payload) != expected:
                    return False
                block = np.frombuffer(payload, dtype).reshape(-1, want["stride"])
                sums = _sums(block, len(layers) * heads).reshape(len(layers), heads)
                wanted = trace.row_sums(t + 1)[layers]
                scale = 2.0**-15 if dtype == np.uint16 else 1.0
                if not np.allclose(
                    sums * scale, wanted if heads > 1 else wanted.mean(axis=1, keepdims=True), atol=2e-3
                ):
                    return False
    except (OSError, TraceError):
        return False
    return True


@numba.njit(cache=True, nogil=True)
def _sums(block: npt.NDArray[Any], elements: int) -> npt.NDArray[np.float64]:
    """Sum the first elements of a block [tokens, stride] over its tokens; a negative one makes its sum NaN."""
    sums = np.zeros(elements)
    flat, stride = block.ravel(), block.shape[1]
    for i in range(block.shape[0]):
        for e in range(elements):
            x = load(flat, i * stride + e)
            sums[e] += x if x >= 0 else np.nan
    return sums


@contextlib.contextmanager
def bounded(rows: TokenRows) -> Iterator[None]:
    """Keep the pages of mapped rows from piling up in memory while kernels run through them.

    Pages that are dropped are still in the page cache; the kernels that need them again map them again.
    """
    mapped = getattr(rows.data, "_mmap", None)
    if mapped is None or not hasattr(mapped, "madvise"):
        yield
        return
    done = threading.Event()

    def drop() -> None:
        while not done.wait(DROP_EVERY):
            mapped.madvise(mmap.MADV_DONTNEED)

    thread = threading.Thread(target=drop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        mapped.madvise(mmap.MADV_DONTNEED)
