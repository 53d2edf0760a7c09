"""Token-major rows on the GPU: all of a recording where it fits, else a piece of its steps at a time."""

# mypy: disable-error-code="import-untyped"

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvsim_traces import Trace

from kvsim.engines.cpu.rows import Layout, TokenRows, token_rows

__all__ = ["Piece", "device", "free_bytes", "pieces", "release"]

PIECE_BYTES = 2**40
"""Most bytes of rows that are uploaded at once, and never more than a third of the free memory."""


@dataclass(frozen=True)
class Piece:
    """The rows of some successive steps.

    Attributes
    ----------
    data : Tensor
        float16 as recorded, or float32.
    words : Tensor
        The same memory as int64.
    bases : Tensor of int64
        [T] offset of each step in `data`; of no meaning beyond the piece.
    first, last : int
        Its steps are first..last - 1, counted from 0.
    stride, heads, scale
        As in `kvsim.engines.cpu.rows.TokenRows`.
    """

    data: Any
    words: Any
    bases: Any
    first: int
    last: int
    stride: int
    heads: int
    scale: float


def device() -> Any:
    """Give the device that replays run on: the current GPU, or the CPU if Triton interprets its kernels."""
    import triton

    return torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")


_HELD: dict[str, Piece] = {}
_LOCK = threading.Lock()


def release() -> None:
    """Forget the rows kept on the GPU."""
    with _LOCK:
        _HELD.clear()


def pieces(trace: Trace) -> Iterator[Piece]:
    """Give a trace's rows, uploaded, in the order of their steps; a trace that fits in one piece stays there."""
    key = f"{trace.hash} {trace.path} {PIECE_BYTES}"
    with _LOCK:
        held = _HELD.get(key)
    if held is not None:
        yield held
        return
    release()
    rows, layout = token_rows(trace), Layout.of(trace)
    starts = layout.starts
    limit = min(PIECE_BYTES, free_bytes() // 3) // rows.data.itemsize
    block = 0
    while block < layout.tokens.size:
        end = max(block + 1, int(np.searchsorted(starts, starts[block] + limit, side="right")) - 1)
        piece = _upload(rows, layout, trace.num_steps, block, end)
        if block == 0 and end == layout.tokens.size and trace.on_disk:
            with _LOCK:
                _HELD[key] = piece
        yield piece
        block = end


def free_bytes() -> int:
    """Say how much memory of the GPU is free, or held by PyTorch for reuse; without one, 1 GiB."""
    if device().type == "cpu":
        return 2**30
    return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated())


def _upload(rows: TokenRows, layout: Layout, steps: int, block: int, end: int) -> Piece:
    start, stop = int(layout.starts[block]), int(layout.starts[end])
    data = rows.data[start:stop]
    if data.dtype == np.uint16:
        data = data.view(np.float16)
    if not data.flags.writeable:
        # A mapped file: torch would warn of memory that it must not write to.
        data = np.array(data)
    uploaded = torch.from_numpy(data).to(device())
    return Piece(
        uploaded,
        uploaded.view(torch.int64),
        torch.from_numpy(rows.bases - start).to(device()),
        block * layout.steps,
        min(end * layout.steps, steps),
        rows.stride,
        rows.heads,
        rows.scale,
    )
