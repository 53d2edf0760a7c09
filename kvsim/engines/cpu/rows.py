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

BLOCK_BYTES = 512
"""Bytes of a token's records that lie together: as many steps as fit in them."""

VERSION = 2

FILES = ("rows", "rows.json")


@dataclass(frozen=True)
class Layout:
    """Where the elements of a trace's eligible layers lie.

    Steps are stored in blocks of `steps` of them. A block holds, token after token, the records of its steps: a record
    is the token's K * H elements at one step, layer after layer, padded with zeros to `width`. Survivors hardly change
    from one step to the next, so a token's next record is the next cache line.

    Attributes
    ----------
    steps : int
        Steps in a block (the last may have fewer tokens' worth of them).
    width : int
        Elements of a record, a multiple of `kvsim.engines.cpu.half.LANES`.
    layers, heads : int
        K, and H or 1 for a `scores` capture.
    tokens : array of int64
        Tokens of each block, those of its last step.
    dtype : dtype
        uint16 bits of float16 values times 2^15 as recorded, or float32 probabilities for rows computed from queries.
    """

    steps: int
    width: int
    layers: int
    heads: int
    tokens: npt.NDArray[np.int64]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, trace: Trace) -> "Layout":
        """Lay out a trace."""
        layers, heads = len(trace.eligible_layers), 1 if trace.capture == "scores" else trace.num_heads
        dtype = np.dtype(np.uint16 if trace.capture in ("scores", "heads") else np.float32)
        width = -(-layers * heads // LANES) * LANES
        steps = max(1, BLOCK_BYTES // (width * dtype.itemsize))
        last = np.minimum(np.arange(1, -(-trace.num_steps // steps) + 1) * steps, trace.num_steps)
        return cls(steps, width, layers, heads, trace.prompt_length + last, dtype)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Offset of each block, and of the end."""
        return np.concatenate([[0], np.cumsum(self.tokens * self.steps * self.width)]).astype(np.int64)

    @property
    def size(self) -> int:
        """Elements in all, with room for reading a whole record beyond the last."""
        return int(self.starts[-1]) + self.width


@dataclass(frozen=True)
class TokenRows:
    """All rows of a trace's eligible layers, token-major.

    Step t (from 0) has L0 + t + 1 tokens; token i's elements start at ``data[bases[t] + i * stride]``.

    Attributes
    ----------
    data : array
        As `Layout` says.
    bases : array of int64
        [T] offset of each step.
    stride : int
        Elements from one token to the next.
    width : int
        Elements of a token at a step, padding included.
    heads : int
        Elements a layer: H, or 1 for a `scores` capture.
    scale : float
        What an element is to be multiplied by.
    """

    data: npt.NDArray[Any]
    bases: npt.NDArray[np.int64]
    stride: int
    width: int
    heads: int
    scale: float


class _Store:
    """Rows in use by this process: the in-memory ones up to a bound, the mapped ones by name."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: OrderedDict[str, TokenRows] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, trace: Trace) -> TokenRows:
        if not trace.on_disk:
            # A run that is in memory itself, and is soon replaced by another.
            return _open_or_build(trace)
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
    that cannot be written), checksummed and checked when opened; the directory may be deleted at any time.

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
    layout = Layout.of(trace)
    starts = layout.starts
    if layout.size * layout.dtype.itemsize <= IN_MEMORY or not trace.on_disk:
        data = np.zeros(layout.size, layout.dtype)
        for block in range(layout.tokens.size):
            _fill(trace, layout, block, data[starts[block] : starts[block + 1]])
    else:
        data = _mapped(trace, layout)
    steps = np.arange(trace.num_steps)
    bases = starts[steps // layout.steps] + steps % layout.steps * layout.width
    scale = 2.0**-15 if layout.dtype == np.uint16 else 1.0
    return TokenRows(data, bases, layout.steps * layout.width, layout.width, layout.heads, scale)


def _fill(trace: Trace, layout: Layout, block: int, out: npt.NDArray[Any]) -> None:
    """Write the records of a block's steps into `out`, which is zero."""
    layers = list(trace.eligible_layers)
    records = out.reshape(-1, layout.steps, layout.width)
    first = block * layout.steps
    for t in range(first, min(first + layout.steps, trace.num_steps)):
        if layout.dtype == np.uint16:
            rows: npt.NDArray[Any] = trace.stored_rows(t + 1, layers).view(np.uint16)
        else:
            rows = trace.attention_rows(t + 1, layers)
        _transpose(rows.reshape(layout.layers * layout.heads, -1), records[:, t - first])


@numba.njit(cache=True, nogil=True)
def _transpose(rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
    """Write rows [elements, tokens] into out [tokens, width], in blocks that stay in the first-level cache."""
    elements, tokens = rows.shape
    for first in range(0, tokens, 32):
        last = min(tokens, first + 32)
        for e in range(elements):
            for i in range(first, last):
                out[i, e] = rows[e, i]


def _mapped(trace: Trace, layout: Layout) -> npt.NDArray[Any]:
    dtype, starts = layout.dtype, layout.starts
    want = {
        "version": VERSION,
        "hash": trace.hash,
        "steps": layout.steps,
        "width": layout.width,
        "dtype": dtype.name,
        "size": layout.size,
    }
    beside = trace.path.with_name(trace.path.name + ".tokens")
    if _is_ours(beside) and _is_intact(beside, want, trace, layout):
        return np.memmap(beside / "rows", dtype, mode="r")
    # Never into the place of something that kvsim did not make.
    writable = os.access(beside.parent, os.W_OK) and (_is_ours(beside) or not os.path.lexists(beside))
    parent = beside.parent if writable else Path(tempfile.gettempdir())
    aside = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", suffix=".tmp", dir=parent))
    try:
        checksums = []
        with open(aside / "rows", "wb") as file:
            for block in range(layout.tokens.size):
                records = np.zeros(starts[block + 1] - starts[block], dtype)
                _fill(trace, layout, block, records)
                payload = records.tobytes()
                checksums.append(google_crc32c.value(payload))
                file.write(payload)
            file.write(bytes(layout.width * dtype.itemsize))
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


def _is_intact(directory: Path, want: dict[str, Any], trace: Trace, layout: Layout) -> bool:
    """Whether rows that an earlier process built are this trace's, undamaged, and sum to what the trace says."""
    starts, layers = layout.starts, list(trace.eligible_layers)
    scale = 2.0**-15 if layout.dtype == np.uint16 else 1.0
    try:
        facts = read_json(directory / "rows.json")
        checksums = facts.pop("crc32c", None)
        if facts != want or not isinstance(checksums, list) or len(checksums) != layout.tokens.size:
            return False
        if os.path.getsize(directory / "rows") != layout.size * layout.dtype.itemsize:
            return False
        with open(directory / "rows", "rb") as file:
            for block, expected in enumerate(checksums):
                payload = file.read(int(starts[block + 1] - starts[block]) * layout.dtype.itemsize)
                if google_crc32c.value(payload) != expected:
                    return False
                records = np.frombuffer(payload, layout.dtype)
                first = block * layout.steps
                for t in range(first, min(first + layout.steps, trace.num_steps)):
                    stride, count = layout.steps * layout.width, layout.layers * layout.heads
                    sums = _sums(records, (t - first) * layout.width, stride, int(layout.tokens[block]), count)
                    wanted = trace.row_sums(t + 1)[layers]
                    if layout.heads == 1:
                        wanted = wanted.mean(axis=1, keepdims=True)
                    if not np.allclose(sums.reshape(layout.layers, layout.heads) * scale, wanted, atol=2e-3):
                        return False
    except (OSError, TraceError):
        return False
    return True


@numba.njit(cache=True, nogil=True)
def _sums(data: npt.NDArray[Any], base: int, stride: int, tokens: int, elements: int) -> npt.NDArray[np.float64]:
    """Sum the elements of a step's records over its tokens; a negative one makes its sum NaN."""
    sums = np.zeros(elements)
    for i in range(tokens):
        for e in range(elements):
            x = load(data, base + i * stride + e)
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
