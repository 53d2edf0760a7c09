"""Lazy promotion: one program decides for all rows, so that a step is taken whole or not at all; then rows are moved.

Pages are given out by a prefix sum over the rows that need one, and not by atomic operations: which row gets which page
is the same in every run.
"""

import torch
import triton
import triton.language as tl

from kvsim_kernels.paged_decode import PAGE
from kvsim_kernels.promote.reference import EXHAUSTED, TABLE_FULL, check

__all__ = ["promote"]


@triton.jit
def _plan(
    ring_gates,
    table,
    pointer,
    counts,
    lengths,
    free,
    top,
    status,
    new_slots,
    sources,
    targets,
    tau,
    rows,
    width,
    stride_pointer,
    stride_gate,
    stride_table,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    EXHAUSTED: tl.constexpr,
    TABLE_FULL: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.arange(0, LANES)
    is_row = row < rows
    at = tl.load(pointer + row * stride_pointer, mask=is_row, other=0)
    victim = tl.load(ring_gates + row * stride_gate + at, mask=is_row, other=-1.0).to(tl.float32)
    count = tl.load(counts + row, mask=is_row, other=0)
    page = tl.load(table + row * stride_table + at // PAGE, mask=is_row, other=0)
    height, failed = tl.load(top), tl.load(status)
    if lengths is not None:
        length = tl.load(lengths + row, mask=is_row, other=0)
    promoted = is_row & (victim >= tau) & (victim >= 0)
    opening = promoted & (count % PAGE == 0)
    entry = tl.cdiv(WINDOW, PAGE) + count // PAGE
    order = tl.cumsum(opening.to(tl.int32), 0)
    needed = tl.sum(opening.to(tl.int32), 0)
    beyond = tl.sum((opening & (entry >= width)).to(tl.int32), 0)
    known = promoted & (entry < width)
    there = tl.load(table + row * stride_table + entry, mask=known & (count % PAGE != 0), other=0)
    fault = tl.where(beyond > 0, TABLE_FULL, tl.where(needed > height, EXHAUSTED, 0))
    fault = tl.where(failed != 0, failed, fault)
    written = is_row & (tl.zeros([LANES], tl.int32) + fault == 0)
    promoted, opening = promoted & written, opening & written
    there = tl.where(opening, tl.load(free + height - order, mask=opening, other=0), there)
    # The loads above must come before what they read is overwritten.
    tl.debug_barrier()
    tl.store(new_slots + row, tl.where(written, at, -1), mask=is_row)
    tl.store(sources + row, page * PAGE + at % PAGE, mask=is_row)
    tl.store(targets + row, tl.where(promoted, there * PAGE + count % PAGE, -1), mask=is_row)
    tl.store(table + row * stride_table + entry, there, mask=opening)
    tl.store(counts + row, count + promoted.to(tl.int32), mask=written)
    tl.store(pointer + row * stride_pointer, (at + 1) % WINDOW, mask=written)
    if lengths is not None:
        more = promoted | (victim < 0)
        tl.store(lengths + row, length + more.to(tl.int32), mask=written)
    tl.store(top, height - tl.sum(opening.to(tl.int32), 0))
    tl.store(status, fault)


@triton.jit
def _move(
    pool_keys,
    pool_values,
    sources,
    targets,
    stride_key_page,
    stride_value_page,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0)
    source, target = tl.load(sources + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    dim = tl.arange(0, WIDTH)
    is_dim = dim < DIM
    if target >= 0:
        k = tl.load(pool_keys + (source // PAGE) * stride_key_page + (source % PAGE) * DIM + dim, mask=is_dim)
        v = tl.load(pool_values + (source // PAGE) * stride_value_page + (source % PAGE) * DIM + dim, mask=is_dim)
        tl.store(pool_keys + (target // PAGE) * stride_key_page + (target % PAGE) * DIM + dim, k, mask=is_dim)
        tl.store(pool_values + (target // PAGE) * stride_value_page + (target % PAGE) * DIM + dim, v, mask=is_dim)


def promote(
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    ring_gates: torch.Tensor,
    table: torch.Tensor,
    pointer: torch.Tensor,
    counts: torch.Tensor,
    free: torch.Tensor,
    top: torch.Tensor,
    status: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    window: int,
    tau: float,
    lengths: torch.Tensor | None = None,
) -> None:
    """Make room for a decode step in all rows; see `kvsim_kernels.promote.reference.promote`.

    All is read and decided by the GPU, so that the call can be captured in a CUDA graph. Calls that share a pool must
    follow one another on a stream.

    Parameters
    ----------
    pool_keys, pool_values, ring_gates, table, pointer, counts, free, top, status, new_slots
        As in the reference; pages, and the last dimension of all tensors, are contiguous.
    window, tau, lengths
        As there.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(pool_keys, pool_values, ring_gates, table, pointer, counts, new_slots, lengths, window)
    rows, dim = len(counts), pool_keys.shape[2]
    whole = [table, pointer, counts, free, top, status, new_slots, *([] if lengths is None else [lengths])]
    if any(x.dtype != torch.int32 for x in whole):
        raise ValueError("table, pointer, counts, lengths, free, top, status and new_slots must be int32")
    given = [pool_keys, pool_values, ring_gates, *whole]
    if any(x.stride(-1) != 1 for x in given) or any(x.stride(1) != dim for x in (pool_keys, pool_values)):
        raise ValueError("pages and the last dimension of all tensors must be contiguous")
    sources, targets = torch.empty(2, rows, dtype=torch.int32, device=pool_keys.device)
    lanes = triton.next_power_of_2(rows)
    _plan[(1,)](
        ring_gates, table, pointer, counts, lengths, free, top, status, new_slots, sources, targets, float(tau), rows,
        table.shape[1], 0 if len(pointer) == 1 else 1, ring_gates.stride(0), table.stride(0),
        WINDOW=window, PAGE=PAGE, EXHAUSTED=EXHAUSTED, TABLE_FULL=TABLE_FULL, LANES=lanes,
        num_warps=max(1, min(16, lanes // 32)),
    )  # fmt: skip
    _move[(rows,)](
        pool_keys, pool_values, sources, targets, pool_keys.stride(0), pool_values.stride(0),
        DIM=dim, WIDTH=triton.next_power_of_2(dim), PAGE=PAGE, num_warps=1,
    )  # fmt: skip
