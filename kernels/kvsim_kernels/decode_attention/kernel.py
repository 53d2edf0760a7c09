"""Decode attention over a cache of slots: split along the slots, then combined (Flash-Decoding)."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.decode_attention.reference import Attended, check
from kvsim_kernels.launch import early_launch, split_count

__all__ = ["capped", "decode_attention", "decode_logits"]

_TILE_BYTES = 16384
_SPLIT_STEP = 16


@triton.jit
def capped(a, softcap):
    """Give softcap * tanh(a / softcap): by its series near zero, where the closed form would lose digits."""
    x = a / softcap
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * 62 / 2835))))
    return softcap * tl.where(tl.abs(x) < 0.3, near, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def _attend(
    query,
    keys,
    values,
    lengths,
    positions,
    query_positions,
    logits,
    part_output,
    part_max,
    part_sum,
    scaling,
    softcap,
    window,
    stride_query_batch,
    stride_query_head,
    stride_key_batch,
    stride_key_head,
    stride_key_slot,
    stride_value_batch,
    stride_value_head,
    stride_value_slot,
    stride_position_batch,
    stride_position_head,
    stride_position_slot,
    slots,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, pair = tl.program_id(0), tl.program_id(1)
    batch, head = (pair // KV_HEADS).to(tl.int64), (pair % KV_HEADS).to(tl.int64)
    length = tl.load(lengths + batch).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), STEP) * STEP
    start = split * share
    end = tl.minimum(start + share, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = row < GROUP, dim < DIM
    query += batch * stride_query_batch + (head * GROUP + row[:, None]) * stride_query_head + dim[None, :]
    q = tl.load(query, mask=is_row[:, None] & is_dim[None, :], other=0.0)
    keys += batch * stride_key_batch + head * stride_key_head + dim[:, None]
    if logits is not None:
        logits += (pair.to(tl.int64) * GROUP + row[:, None]) * slots
    if positions is not None:
        positions += batch * stride_position_batch + head * stride_position_head
    if window is not None:
        oldest = tl.load(query_positions + batch).to(tl.int32) - window + 1
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    # Without values only logits and their sums are wanted.
    if values is not None:
        values += batch * stride_value_batch + head * stride_value_head + dim[None, :]
        output = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in tl.range(start, end, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < end
        seen = inside
        if positions is not None:
            position = tl.load(positions + slot * stride_position_slot, mask=inside, other=-1)
            seen = position >= 0
            if window is not None:
                seen = seen & (position >= oldest)
        k = tl.load(keys + slot[None, :] * stride_key_slot, mask=inside[None, :] & is_dim[:, None], other=0.0)
        a = tl.dot(q, k, input_precision="ieee") * scaling
        if softcap is not None:
            a = capped(a, softcap)
        a = tl.where(seen[None, :], a, float("-inf"))
        if logits is not None:
            tl.store(logits + slot[None, :], a, mask=is_row[:, None] & inside[None, :])
        higher = tl.maximum(top, tl.max(a, 1))
        # Minus infinity less itself is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(a - base[:, None])
        fade = tl.exp(top - base)
        total = total * fade + tl.sum(p, 1)
        if values is not None:
            v = tl.load(values + slot[:, None] * stride_value_slot, mask=seen[:, None] & is_dim[None, :], other=0.0)
            output = tl.dot(p.to(v.dtype), v, output * fade[:, None], input_precision="ieee")
        top = higher
    part = (pair.to(tl.int64) * SPLITS + split) * GROUP + row
    tl.store(part_max + part, top, mask=is_row)
    tl.store(part_sum + part, total, mask=is_row)
    if values is not None and start < end:
        tl.store(part_output + part[:, None] * DIM + dim[None, :], output, mask=is_row[:, None] & is_dim[None, :])


@triton.jit
def _combine(
    part_output,
    part_max,
    part_sum,
    sinks,
    output,
    lse,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    query = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, SPLITS_2), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    part = (query // GROUP * SPLITS + split) * GROUP + query % GROUP
    top = tl.load(part_max + part, mask=split < SPLITS, other=float("-inf"))
    filled = top > float("-inf")
    sums = tl.load(part_sum + part, mask=filled, other=0.0)
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp(top - base)
    total = tl.sum(sums * weight, 0)
    if lse is not None:
        # Every piece of a head writes the same number.
        tl.store(lse + query, tl.where(total > 0, base + tl.log(tl.maximum(total, 1e-38)), float("-inf")))
    if output is not None:
        parts = tl.load(
            part_output + part[:, None] * DIM + dim[None, :], mask=filled[:, None] & (dim < DIM)[None, :], other=0.0
        )
        found = tl.sum(parts * weight[:, None], 0)
        if sinks is not None:
            sink = tl.load(sinks + query % HEADS).to(tl.float32)
            level = tl.maximum(base, sink)
            found *= tl.exp(base - level)
            total = total * tl.exp(base - level) + tl.exp(sink - level)
        found = found / tl.where(total > 0, total, 1.0)
        tl.store(output + query * DIM + dim, found.to(output.dtype.element_ty), mask=dim < DIM)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    window: int | None = None,
    with_logits: bool = False,
    out: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
) -> Attended:
    """Attend with one query a sequence; see `kvsim_kernels.decode_attention.reference.decode_attention`.

    Products are taken in the type of the keys and summed in float32, and the weights are rounded to the type of the
    values before the second product, as in FlashAttention. Lengths and positions are read by the GPU only, so that the
    call can be captured in a CUDA graph. Logits from a sequence's length on are not written.

    Parameters
    ----------
    query, keys, values, lengths, scaling, softcap, sink_logits, positions, query_positions, window, with_logits
        As in the reference; the last dimension of queries, keys and values must be contiguous.
    out : Tensor [batch, H, d], optional
        Where to write the output; contiguous.
    logits : Tensor [batch, H, slots] float32, optional
        Where to write the logits; contiguous.
    lse : Tensor [batch, H] float32, optional
        Where to write the log-sum-exp; contiguous.
    splits : int, optional
        Programs for each KV head; chosen for the GPU by default.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    if query.dtype != keys.dtype or keys.dtype != values.dtype:
        raise ValueError(f"query, keys and values must share a type, got {query.dtype}, {keys.dtype}, {values.dtype}")
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if with_logits:
        logits, lse = _allocated(query, keys, logits, lse)
    _launch(
        query, keys, values, lengths, scaling, softcap, sink_logits, positions, query_positions, window, out,
        logits if with_logits else None, lse if with_logits else None, splits,
    )  # fmt: skip
    return Attended(out, logits if with_logits else None, lse if with_logits else None)


def decode_logits(
    query: torch.Tensor,
    keys: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    positions: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what `decode_attention` gives beside its output, without reading values: for attention computed elsewhere.

    Parameters
    ----------
    query, keys, lengths, scaling, softcap, positions, logits, lse, splits
        As for `decode_attention`.

    Returns
    -------
    logits : Tensor [batch, H, slots] float32
    lse : Tensor [batch, H] float32

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    if query.dtype != keys.dtype:
        raise ValueError(f"query and keys must share a type, got {query.dtype} and {keys.dtype}")
    logits, lse = _allocated(query, keys, logits, lse)
    _launch(query, keys, None, lengths, scaling, softcap, None, positions, None, None, None, logits, lse, splits)
    return logits, lse


def _allocated(
    query: torch.Tensor, keys: torch.Tensor, logits: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    single = {"dtype": torch.float32, "device": query.device}
    batch, heads, _ = query.shape
    return (
        torch.empty(batch, heads, keys.shape[2], **single) if logits is None else logits,
        torch.empty(batch, heads, **single) if lse is None else lse,
    )


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    lengths: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
    positions: torch.Tensor | None,
    query_positions: torch.Tensor | None,
    window: int | None,
    out: torch.Tensor | None,
    logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    splits: int | None,
) -> None:
    read = keys if values is None else values
    group = check(query, keys, read, positions, query_positions, window)
    if query.stride(-1) != 1 or keys.stride(-1) != 1 or read.stride(-1) != 1:
        raise ValueError("the last dimension of query, keys and values must be contiguous")
    batch, heads, dim = query.shape
    kv_heads, slots = keys.shape[1:3]
    splits = split_count(batch * kv_heads, slots, query.device) if splits is None else splits
    single = {"dtype": torch.float32, "device": query.device}
    part_output = None if out is None else torch.empty(batch * kv_heads, splits, group, dim, **single)
    part_max, part_sum = torch.empty(2, batch * kv_heads, splits, group, **single)
    width = max(16, triton.next_power_of_2(dim))
    block = min(128, max(16, _TILE_BYTES // (width * query.element_size())))
    early = early_launch(query.device)
    spread = (0, 0, 0)
    if positions is not None:
        by_head = positions.stride(1) if positions.shape[1] > 1 else 0
        by_batch = positions.stride(0) if positions.shape[0] > 1 else 0
        spread = (by_batch, by_head, positions.stride(2))
    _attend[(splits, batch * kv_heads)](
        query,
        keys,
        values,
        lengths,
        positions,
        query_positions if window is not None else None,
        logits,
        part_output,
        part_max,
        part_sum,
        float(dim**-0.5 if scaling is None else scaling),
        softcap,
        window,
        *query.stride()[:2],
        *keys.stride()[:3],
        *read.stride()[:3],
        *spread,
        slots,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        WIDTH=width,
        BLOCK=block,
        SPLITS=splits,
        STEP=_SPLIT_STEP,
        num_warps=4,
        num_stages=3,
        **early,
    )
    piece = min(64, width)
    _combine[(batch * heads, 1 if out is None else triton.cdiv(dim, piece))](
        part_output,
        part_max,
        part_sum,
        sink_logits,
        out,
        lse,
        HEADS=heads,
        GROUP=group,
        DIM=dim,
        PIECE=piece,
        SPLITS=splits,
        SPLITS_2=triton.next_power_of_2(splits),
        num_warps=4,
        **early,
    )
