"""Column sums of causal attention in two passes over its logits: the first sums rows, the second columns."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.attention_rows.reference import group_size
from kvsim_kernels.decode_attention.kernel import capped

__all__ = ["prompt_mass"]


@triton.jit
def _logits(q, k, rows, columns, length, scaling, softcap, window, chunk):
    """Logits [rows, columns] of queries [rows, d] and keys [d, columns], minus infinity where one is not seen."""
    a = tl.dot(q, k, input_precision="ieee") * scaling
    if softcap is not None:
        a = capped(a, softcap)
    i, j = rows[:, None], columns[None, :]
    seen = (j <= i) & (i < length)
    if window is not None:
        seen = seen & (j > i - window)
    if chunk is not None:
        seen = seen & (j // chunk == i // chunk)
    return tl.where(seen, a, float("-inf"))


@triton.jit(do_not_specialize=["length", "window", "chunk"])
def _row_sums(
    queries,
    keys,
    sinks,
    lse,
    length,
    scaling,
    softcap,
    window,
    chunk,
    stride_query_head,
    stride_query,
    stride_key_head,
    stride_key,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    start, head = tl.program_id(0) * ROWS, tl.program_id(1)
    row, dim = start + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = row < length, dim < DIM
    queries += head.to(tl.int64) * stride_query_head
    keys += (head // GROUP).to(tl.int64) * stride_key_head
    q = tl.load(
        queries + row.to(tl.int64)[:, None] * stride_query + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    first = 0
    if window is not None:
        first = tl.maximum(first, start - window + 1)
    if chunk is not None:
        first = tl.maximum(first, start // chunk * chunk)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for at in tl.range(first // COLUMNS * COLUMNS, tl.minimum(start + ROWS, length), COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        k = tl.load(
            keys + column.to(tl.int64)[None, :] * stride_key + dim[:, None],
            mask=(column < length)[None, :] & is_dim[:, None],
            other=0.0,
        )
        a = _logits(q, k, row, column, length, scaling, softcap, window, chunk)
        higher = tl.maximum(top, tl.max(a, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(a - base[:, None]), 1)
        top = higher
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        total = total * tl.exp(top - higher) + tl.exp(sink - higher)
        top = higher
    tl.store(lse + head.to(tl.int64) * length + row, top + tl.log(total), mask=is_row)


@triton.jit(do_not_specialize=["length", "window", "chunk"])
def _column_sums(
    queries,
    keys,
    lse,
    mass,
    length,
    scaling,
    softcap,
    window,
    chunk,
    stride_query_head,
    stride_query,
    stride_key_head,
    stride_key,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    start, head = tl.program_id(0) * COLUMNS, tl.program_id(1)
    column, dim = start + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    is_column, is_dim = column < length, dim < DIM
    queries += head.to(tl.int64) * stride_query_head
    keys += (head // GROUP).to(tl.int64) * stride_key_head
    lse += head.to(tl.int64) * length
    k = tl.load(
        keys + column.to(tl.int64)[None, :] * stride_key + dim[:, None],
        mask=is_column[None, :] & is_dim[:, None],
        other=0.0,
    )
    last = tl.minimum(start + COLUMNS, length) - 1
    end = length
    if window is not None:
        end = tl.minimum(end, last + window)
    if chunk is not None:
        end = tl.minimum(end, (last // chunk + 1) * chunk)
    received = tl.zeros([COLUMNS], tl.float32)
    for at in tl.range(start // ROWS * ROWS, end, ROWS):
        row = at + tl.arange(0, ROWS)
        is_row = row < length
        q = tl.load(
            queries + row.to(tl.int64)[:, None] * stride_query + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        taken = tl.load(lse + row, mask=is_row, other=0.0)
        a = _logits(q, k, row, column, length, scaling, softcap, window, chunk)
        received += tl.sum(tl.exp(a - taken[:, None]), 0)
    tl.store(mass + head.to(tl.int64) * length + column, received, mask=is_column)


def prompt_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over all queries of a prompt of the attention each position received.

    See `kvsim_kernels.attention_rows.reference.prompt_mass`. Beside the result only one number for each query and head
    is kept, whatever the length. Everything is computed in float32 from products in the type of the keys.

    Parameters
    ----------
    queries, keys, scaling, softcap, sliding_window, chunk_size, sink_logits
        As in the reference; queries and keys share a type, and their last dimension is contiguous.

    Returns
    -------
    Tensor [H, L]
        Float32.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    group = group_size(queries, keys)
    if queries.dtype != keys.dtype or queries.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"queries and keys must share a type of at most 32 bits, got {queries.dtype} and {keys.dtype}")
    if queries.stride(-1) != 1 or keys.stride(-1) != 1:
        raise ValueError("the last dimension of queries and keys must be contiguous")
    heads, length, dim = queries.shape
    lse, mass = torch.empty(2, heads, length, dtype=torch.float32, device=queries.device)
    width = max(16, triton.next_power_of_2(dim))
    small = queries.element_size() == 2 and width <= 128
    # 32-bit numbers are not multiplied by the matrix units: what a thread holds of a tile are its registers.
    rows, columns = (128, 64) if small else (64, 32) if queries.element_size() == 2 else (32, 32)
    shared = (
        length, float(dim**-0.5 if scaling is None else scaling), softcap, sliding_window, chunk_size,
        queries.stride(0), queries.stride(1), keys.stride(0), keys.stride(1),
    )  # fmt: skip
    options = {"GROUP": group, "DIM": dim, "WIDTH": width, "num_warps": 8 if small else 4}
    _row_sums[(triton.cdiv(length, rows), heads)](
        queries, keys, sink_logits, lse, *shared, ROWS=rows, COLUMNS=columns, num_stages=3, **options
    )
    rows, columns = columns, rows
    _column_sums[(triton.cdiv(length, columns), heads)](
        queries, keys, lse, mass, *shared, ROWS=rows, COLUMNS=columns, num_stages=3, **options
    )
    return mass
