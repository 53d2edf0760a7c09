"""Token-major rows: a step's scores of one token lie together, so that reading survivors skips the evicted."""

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, TraceError

from kvsim.engines.cpu.half import LANES

__all__ = ["TokenRows", "token_rows"]

IN_MEMORY = 256 * 2**20
"""Rows up to this size are kept in memory; larger ones go to a file beside the trace."""

VERSION = 1


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
    out[:, : len(layers) * heads] = rows.reshape(len(layers) * heads, -1).T


def _mapped(
    trace: Trace, heads: int, stride: int, bases: npt.NDArray[np.int64], size: int, dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    want = {"version": VERSION, "hash": trace.hash, "stride": stride, "dtype": dtype.name, "size": size}
    beside = trace.path.with_name(trace.path.name + ".tokens")
    found = _verified(beside, want, bases, dtype)
    if found is not None:
        return found
    parent = beside.parent if os.access(beside.parent, os.W_OK) else Path(tempfile.gettempdir())
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
        if parent == beside.parent:
            with contextlib.suppress(OSError):
                shutil.rmtree(beside)
            os.rename(aside, beside)
            aside = beside
        else:
            atexit.register(shutil.rmtree, aside, ignore_errors=True)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise TraceError(f"{aside}: cannot write token-major rows ({error.strerror})") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return np.memmap(aside / "rows", dtype, mode="r")


def _verified(
    directory: Path, want: dict[str, Any], bases: npt.NDArray[np.int64], dtype: np.dtype[Any]
) -> npt.NDArray[Any] | None:
    """Map rows that an earlier process built, if they are this trace's and whole; otherwise they are built again."""
    try:
        facts = json.loads((directory / "rows.json").read_text())
        checksums = facts.pop("crc32c")
        if facts != want or os.path.getsize(directory / "rows") != want["size"] * dtype.itemsize:
            return None
        data = np.memmap(directory / "rows", dtype, mode="r")
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    if len(checksums) != len(bases) - 1:
        return None
    for t, expected in enumerate(checksums):
        if google_crc32c.value(data[bases[t] : bases[t + 1]].tobytes()) != expected:
            return None
    return data
