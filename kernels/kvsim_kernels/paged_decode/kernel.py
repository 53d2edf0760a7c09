"""Paged decode attention: the tiles of all rows are shared out evenly, then each row's parts are combined.

Heads that admit much have rows many times as long as others. Split row by row, the longest row's programs would decide
how long a step takes; here all rows' tiles form one line and every program takes the same count of them, which may end
one row and begin the next. A program's part of a row has slot ``program + row``: along the line one of the two grows
from part to part, so that no two parts share a slot.
"""

import torch
import triton
import triton.language as tl

from kvsim_kernels.decode_attention.kernel import capped
from kvsim_kernels.launch import early_launch, multiprocessors
from kvsim_kernels.paged_decode.reference import PAGE, check

__all__ = ["paged_decode"]

_TILE_BYTES = 16384
_PROGRAMS_PER_MULTIPROCESSOR = 3
_PARTS = 32
# Loads of pages and of what lies in them share the stages: two blocks of keys and values are in flight.
_STAGES = 5


@triton.jit
def _line(lengths, rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr, ROWS_2: tl.constexpr):
    """Give the rows' lengths, tiles and ends on the line of all tiles, and the tiles of a program."""
    lane = tl.arange(0, ROWS_2)
    length = tl.load(lengths + lane, mask=lane < rows, other=0).to(tl.int32)
    tiles = tl.cdiv(length, BLOCK)
    return length, tiles, tl.cumsum(tiles, 0), tl.maximum(tl.cdiv(tl.sum(tiles, 0), SPLITS), 1)


@triton.jit
def _at(values, index, ROWS_2: tl.constexpr):
    """Read one of a vector's numbers."""
    return tl.sum(tl.where(tl.arange(0, ROWS_2) == index, values, 0), 0)


@triton.jit
def _attend(
    query,
    keys,
    values,
    table,
    lengths,
    part_output,
    part_max,
    part_sum,
    scaling,
    softcap,
    rows,
    stride_query,
    stride_query_head,
    stride_key,
    stride_value,
    stride_table,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS_2: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    length, tiles, ends, share = _line(lengths, rows, SPLITS, BLOCK, ROWS_2)
    start = program * share
    stop = tl.minimum(start + share, tl.sum(tiles, 0))
    head, dim, lane = tl.arange(0, HEADS), tl.arange(0, WIDTH), tl.arange(0, BLOCK)
    is_head, is_dim = head < GROUP, dim < DIM
    both = is_head[:, None] & is_dim[None, :]
    first_row = tl.sum((ends <= start).to(tl.int32), 0)
    past_row = tl.sum(((ends - tiles < stop) & (tl.arange(0, ROWS_2) < rows)).to(tl.int32), 0)
    for row in tl.range(first_row, past_row):
        far = tl.cast(row, tl.int64)
        own, begin = _at(length, row, ROWS_2), _at(ends - tiles, row, ROWS_2)
        at = query + far * stride_query + head[:, None] * stride_query_head + dim[None, :]
        q = tl.load(at, mask=both, other=0.0)
        top = tl.full([HEADS], float("-inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        output = tl.zeros([HEADS, WIDTH], tl.float32)
        low, high = tl.maximum(start - begin, 0) * BLOCK, tl.minimum((stop - begin) * BLOCK, own)
        for first in tl.range(low, high, BLOCK):
            token = first + lane
            inside = token < high
            slot = token
            if RING % PAGE != 0:
                slot += tl.where(token >= RING, PAGE - RING % PAGE, 0)
            page = tl.load(table + far * stride_table + slot // PAGE, mask=inside, other=0).to(tl.int64)
            within = (slot % PAGE) * DIM
            key = (page * stride_key + within)[None, :] + dim[:, None]
            k = tl.load(keys + key, mask=inside[None, :] & is_dim[:, None], other=0.0)
            a = tl.dot(q, k, input_precision="ieee") * scaling
            if softcap is not None:
                a = capped(a, softcap)
            a = tl.where(inside[None, :], a, float("-inf"))
            higher = tl.maximum(top, tl.max(a, 1))
            p = tl.exp(a - higher[:, None])
            fade = tl.exp(top - higher)
            total = total * fade + tl.sum(p, 1)
            value = (page * stride_value + within)[:, None] + dim[None, :]
            v = tl.load(values + value, mask=inside[:, None] & is_dim[None, :], other=0.0)
            output = tl.dot(p.to(v.dtype), v, output * fade[:, None], input_precision="ieee")
            top = higher
        part = (far + program) * GROUP + head
        tl.store(part_max + part, top, mask=is_head)
        tl.store(part_sum + part, total, mask=is_head)
        tl.store(part_output + part[:, None] * DIM + dim[None, :], output, mask=both)


@triton.jit
def _combine(
    lengths,
    part_output,
    part_max,
    part_sum,
    output,
    rows,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS_2: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    dim = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    _, tiles, ends, share = _line(lengths, rows, SPLITS, BLOCK, ROWS_2)
    end, count = _at(ends, row, ROWS_2), _at(tiles, row, ROWS_2)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    found = tl.zeros([PIECE], tl.float32)
    last = tl.where(count > 0, (end - 1) // share, -1)
    for first in tl.range((end - count) // share, last + 1, PARTS):
        program = first + tl.arange(0, PARTS)
        known = program <= last
        part = (program + row).to(tl.int64) * GROUP + head
        tops = tl.load(part_max + part, mask=known, other=float("-inf"))
        sums = tl.load(part_sum + part, mask=known, other=0.0)
        parts = tl.load(
            part_output + part[:, None] * DIM + dim[None, :], mask=known[:, None] & (dim < DIM)[None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(tops, 0))
        weight, fade = tl.exp(tops - higher), tl.exp(top - higher)
        total = total * fade + tl.sum(sums * weight, 0)
        found = found * fade + tl.sum(parts * weight[:, None], 0)
        top = higher
    found = found / tl.where(total > 0, total, 1.0)
    tl.store(output + tl.program_id(0).to(tl.int64) * DIM + dim, found.to(output.dtype.element_ty), mask=dim < DIM)


def paged_decode(
    query: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    ring: int | None = None,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query a row; see `kvsim_kernels.paged_decode.reference.paged_decode`.

    Products are taken in the type of the keys and summed in float32, and the weights are rounded to the type of the
    values before the second product. Tables and lengths are read by the GPU only, and the grid depends on shapes alone,
    so that the call can be captured in a CUDA graph. The time depends on the sum of the lengths, however they differ.

    Parameters
    ----------
    query, pool_keys, pool_values, table, lengths, scaling, softcap, ring
        As in the reference; the last dimension of queries is contiguous, and so are pages, tables' rows and lengths.
    splits : int, optional
        Programs that share all rows; three for each multiprocessor by default.
    out : Tensor [R, G, d], optional
        Where to write; contiguous.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(query, pool_keys, pool_values, table, lengths, ring)
    if query.dtype != pool_keys.dtype or pool_keys.dtype != pool_values.dtype:
        raise ValueError(
            f"query and pools must share a type, got {query.dtype}, {pool_keys.dtype}, {pool_values.dtype}"
        )
    if table.dtype != torch.int32 or lengths.dtype != torch.int32:
        raise ValueError(f"table and lengths must be int32, got {table.dtype} and {lengths.dtype}")
    rows, group, dim = query.shape
    pools = (pool_keys, pool_values)
    if any(x.stride(2) != 1 or x.stride(1) != dim for x in pools) or not lengths.is_contiguous():
        raise ValueError("pages and lengths must be contiguous")
    if query.stride(-1) != 1 or table.stride(-1) != 1:
        raise ValueError("the last dimension of query and table must be contiguous")
    width = max(16, triton.next_power_of_2(dim))
    block = min(128, max(PAGE, _TILE_BYTES // (width * query.element_size())))
    if splits is None:
        most = rows * triton.cdiv(table.shape[1] * PAGE, block)
        splits = max(1, min(_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(query.device), most))
    single = {"dtype": torch.float32, "device": query.device}
    part_output = torch.empty(splits + rows, group, dim, **single)
    part_max, part_sum = torch.empty(2, splits + rows, group, **single)
    out = torch.empty(rows, group, dim, dtype=query.dtype, device=query.device) if out is None else out
    shared = {"GROUP": group, "DIM": dim, "BLOCK": block, "SPLITS": splits, "ROWS_2": triton.next_power_of_2(rows)}
    shared |= early_launch(query.device)
    _attend[(splits,)](
        query, *pools, table, lengths, part_output, part_max, part_sum,
        float(dim**-0.5 if scaling is None else scaling), softcap, rows,
        *query.stride()[:2], pool_keys.stride(0), pool_values.stride(0), table.stride(0),
        HEADS=max(16, triton.next_power_of_2(group)), WIDTH=width, PAGE=PAGE, RING=0 if ring is None else ring,
        num_warps=4, num_stages=_STAGES, **shared,
    )  # fmt: skip
    piece = min(64, width)
    _combine[(rows * group, triton.cdiv(dim, piece))](
        lengths, part_output, part_max, part_sum, out, rows, PIECE=piece, PARTS=_PARTS, num_warps=4, **shared
    )
    return out
