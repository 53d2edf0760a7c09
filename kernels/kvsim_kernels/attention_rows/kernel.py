"""Attention probabilities of a single query: logits split along the keys, then normalised; of a layer, or of many.

The keys of many layers lie wherever their caches have them: programs read where from a table.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvsim_kernels.attention_rows.reference import group_size
from kvsim_kernels.decode_attention.kernel import capped
from kvsim_kernels.launch import split_count

__all__ = ["attention_row", "layer_rows"]

_TILE_BYTES = 16384
_BLOCK = 1024
_MEAN_ITEMS = 4096
_LOGITS_BYTES = 2**26


# Lengths and views of rows change from step to step: programs are not compiled anew for those divisible by 16.
@triton.jit(do_not_specialize=["length"])
def _logits(
    query,
    keys,
    table,
    mask,
    logits,
    part_max,
    part_sum,
    length,
    scaling,
    softcap,
    stride_query,
    stride_key_head,
    stride_key,
    stride_mask,
    stride_logits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    split, head = tl.program_id(0), tl.program_id(1)
    if table is not None:
        layer = tl.program_id(2)
        heads = tl.num_programs(1) * GROUP
        query += layer * heads * stride_query
        keys = tl.load(table + layer).to(tl.pointer_type(query.dtype.element_ty))
        if ALIGNED:
            keys = tl.multiple_of(keys, 16)
        logits += layer.to(tl.int64) * heads * stride_logits
        part_max += layer * heads * SPLITS
        part_sum += layer * heads * SPLITS
    share = tl.cdiv(tl.cdiv(length, SPLITS), 16) * 16
    end = tl.minimum(split * share + share, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = row < GROUP, dim < DIM
    own = head * GROUP + row
    q = tl.load(query + own[:, None] * stride_query + dim[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    keys += head.to(tl.int64) * stride_key_head + dim[:, None]
    logits += own.to(tl.int64)[:, None] * stride_logits
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(split * share, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < end
        far = place.to(tl.int64)[None, :]
        k = tl.load(keys + far * stride_key, mask=inside[None, :] & is_dim[:, None], other=0.0)
        a = tl.dot(q, k, input_precision="ieee") * scaling
        if softcap is not None:
            a = capped(a, softcap)
        known = is_row[:, None] & inside[None, :]
        if mask is not None:
            added = tl.load(mask + own[:, None] * stride_mask + place[None, :], mask=known, other=0)
            if mask.dtype.element_ty == tl.uint8:
                a = tl.where(added != 0, a, float("-inf"))
            else:
                a += added.to(tl.float32)
        a = tl.where(known, a, float("-inf"))
        tl.store(logits + far, a, mask=known)
        higher = tl.maximum(top, tl.max(a, 1))
        # Minus infinity less itself is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(a - base[:, None]), 1)
        top = higher
    part = own * SPLITS + split
    tl.store(part_max + part, top, mask=is_row)
    tl.store(part_sum + part, total, mask=is_row)


@triton.jit
def _totals(tops, sums, sinks):
    """Give what to take from the logits of each row, the sum of its softmax's terms, and that with the sink's."""
    top = tl.max(tops, 1)
    if sinks is not None:
        top = tl.maximum(top, sinks.to(tl.float32))
    base = tl.where(top == float("-inf"), 0.0, top)
    kept = tl.sum(sums * tl.exp(tops - base[:, None]), 1)
    total = kept
    if sinks is not None:
        total += tl.exp(sinks.to(tl.float32) - base)
    return base, kept, tl.where(total > 0, total, 1.0)


@triton.jit
def _of_layer(table, heads, logits, part_max, part_sum, out, stride_logits, stride_layer, SPLITS):
    """Move to one of many layers, whose rows go to a place that the table names; give that, too."""
    layer = tl.program_id(2)
    place = tl.load(table + tl.num_programs(2) + layer)
    logits += layer.to(tl.int64) * heads * stride_logits
    part_max += layer * heads * SPLITS
    part_sum += layer * heads * SPLITS
    out += place * stride_layer
    return logits, part_max, part_sum, out, place


@triton.jit(
    do_not_specialize=["length", "stride_out", "stride_layer"], do_not_specialize_on_alignment=["out", "row_sums"]
)
def _normalise(
    logits,
    part_max,
    part_sum,
    sinks,
    table,
    out,
    row_sums,
    length,
    scale,
    stride_logits,
    stride_out,
    stride_layer,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if table is not None:
        logits, part_max, part_sum, out, place = _of_layer(
            table, tl.num_programs(1), logits, part_max, part_sum, out, stride_logits, stride_layer, SPLITS
        )
        if sinks is not None:
            sinks += tl.program_id(2) * tl.num_programs(1)
        if row_sums is not None:
            row_sums += place * tl.num_programs(1)
    own = tl.program_id(1) + tl.arange(0, 1)
    split = tl.arange(0, SPLITS_2)[None, :]
    part, is_part = own[:, None] * SPLITS + split, split < SPLITS
    tops = tl.load(part_max + part, mask=is_part, other=float("-inf"))
    sums = tl.load(part_sum + part, mask=is_part, other=0.0)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + own)
    base, kept, total = _totals(tops, sums, sink)
    if row_sums is not None and tl.program_id(0) == 0:
        tl.store(row_sums + own, kept / total)
    far = own.to(tl.int64)[:, None]
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    a = tl.load(logits + far * stride_logits + place, mask=place < length, other=float("-inf"))
    p = tl.exp(a - base[:, None]) / total[:, None] * scale
    tl.store(out + far * stride_out + place, p.to(out.dtype.element_ty), mask=place < length)


@triton.jit(do_not_specialize=["length", "stride_layer"], do_not_specialize_on_alignment=["out", "row_sums"])
def _mean(
    logits,
    part_max,
    part_sum,
    sinks,
    table,
    out,
    row_sums,
    length,
    scale,
    stride_logits,
    stride_layer,
    HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if table is not None:
        logits, part_max, part_sum, out, place = _of_layer(
            table, HEADS, logits, part_max, part_sum, out, stride_logits, stride_layer, SPLITS
        )
        if sinks is not None:
            sinks += tl.program_id(2) * HEADS
        if row_sums is not None:
            row_sums += place * HEADS
    own, split = tl.arange(0, HEADS_2), tl.arange(0, SPLITS_2)[None, :]
    is_own = own < HEADS
    part, is_part = own[:, None] * SPLITS + split, is_own[:, None] & (split < SPLITS)
    tops = tl.load(part_max + part, mask=is_part, other=float("-inf"))
    sums = tl.load(part_sum + part, mask=is_part, other=0.0)
    sink = None
    if sinks is not None:
        sink = tl.load(sinks + own, mask=is_own, other=float("-inf"))
    base, kept, total = _totals(tops, sums, sink)
    if row_sums is not None and tl.program_id(0) == 0:
        tl.store(row_sums + own, kept / total, mask=is_own)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seen = is_own[:, None] & (place < length)[None, :]
    a = tl.load(logits + own.to(tl.int64)[:, None] * stride_logits + place[None, :], mask=seen, other=float("-inf"))
    p = tl.sum(tl.exp(a - base[:, None]) / total[:, None], 0) / HEADS * scale
    tl.store(out + place, p.to(out.dtype.element_ty), mask=place < length)


def attention_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    mean: bool = False,
    out: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Attention probabilities of a single query; see `kvsim_kernels.attention_rows.reference.attention_row`.

    Everything is computed in float32 from products in the type of the keys; a row without any visible key is zero.

    Parameters
    ----------
    query, keys, scaling, softcap, mask, sink_logits
        As in the reference; query and keys share a type, and their last dimension is contiguous, as is the mask's.
    dtype : torch.dtype
        Of the result.
    scale : float
        Factor on the probabilities: 2**15 with float16 is how traces store them.
    mean : bool
        Give the mean over the heads, [n].
    out : Tensor [H, n] or [n], optional
        Where to write, in its own type; its last dimension is contiguous.
    sums : Tensor [H], optional
        Where to write each row's sum, in float32: 1 without sinks, 0 where nothing is visible.
    splits : int, optional
        Programs for each KV head; chosen for the GPU by default.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    group = group_size(query, keys)
    if query.dtype != keys.dtype or query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"query and keys must share a type of at most 32 bits, got {query.dtype} and {keys.dtype}")
    if any(tensor is not None and tensor.stride(-1) != 1 for tensor in (query, keys, mask)):
        raise ValueError("the last dimension of query, keys and mask must be contiguous")
    heads, dim = query.shape
    kv_heads, length = keys.shape[:2]
    splits = split_count(kv_heads, length, query.device) if splits is None else splits
    if out is None:
        out = torch.empty((length,) if mean else (heads, length), dtype=dtype, device=query.device)
    elif out.shape != ((length,) if mean else (heads, length)) or out.stride(-1) != 1:
        raise ValueError(f"out must be [{'' if mean else f'{heads}, '}{length}] with a contiguous last dimension")
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    factor = float(dim**-0.5 if scaling is None else scaling)
    _launch(query, keys, None, 1, mask, factor, softcap, sink_logits, mean, float(scale), out, sums, splits, group)
    return out


def layer_rows(
    queries: torch.Tensor,
    keys: Sequence[torch.Tensor],
    *,
    places: Sequence[int],
    out: torch.Tensor,
    sums: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: Sequence[torch.Tensor] | None = None,
    scale: float = 1.0,
    splits: int | None = None,
) -> None:
    """Write the rows of several layers' single queries in two launches; see `attention_row`.

    Layers are taken together as long as their logits take 64 MiB at most.

    Parameters
    ----------
    queries : Tensor [G, H, d]
        One for each layer; contiguous.
    keys : sequence of Tensor [Hk, n, d]
        Of one shape, type and layout; their last dimension is contiguous.
    places : sequence of int
        Where in `out` and `sums` each layer's rows go.
    out : Tensor [K, H, m] or [K, m]
        Gets the rows times `scale` at its last n positions, in its own type; or their mean. Contiguous.
    sums : Tensor [K, H]
        Gets each row's sum, in float32. Contiguous.
    scaling, softcap
        As in `attention_row`.
    sink_logits : sequence of Tensor [H], optional
        One for each layer.
    scale, splits
        As in `attention_row`.

    Raises
    ------
    ValueError
        If shapes, types or layouts do not fit.
    """
    first = keys[0]
    group = group_size(queries[0], first)
    count, heads, dim = queries.shape
    kv_heads, length = first.shape[:2]
    mean = out.ndim == 2
    if queries.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"queries and keys must share a type of at most 32 bits, got {queries.dtype}")
    layout = first.shape, first.stride(), queries.dtype, queries.device
    if any((one.shape, one.stride(), one.dtype, one.device) != layout for one in keys):
        raise ValueError("keys must have the queries' type and device, one shape and one layout")
    if first.stride(-1) != 1 or not queries.is_contiguous():
        raise ValueError("queries, and the last dimension of keys, must be contiguous")
    sinks_given = count if sink_logits is None else len(sink_logits)
    if not count == len(keys) == len(places) == len(set(places)) == sinks_given:
        raise ValueError("there must be one query, keys, place of its own and sinks for each layer")
    if not out.is_contiguous() or not sums.is_contiguous() or not out.device == sums.device == queries.device:
        raise ValueError("outputs must be contiguous, on the queries' device")
    wanted = (len(sums),) if mean else (len(sums), heads)
    if out.shape[:-1] != wanted or out.shape[-1] < length or sums.shape[1:] != (heads,):
        raise ValueError(f"out and sums of shapes {tuple(out.shape)} and {tuple(sums.shape)} do not fit")
    if min(places) < 0 or max(places) >= len(sums):
        raise ValueError(f"places must be in 0..{len(sums) - 1}, got {list(places)}")
    splits = split_count(kv_heads, length, queries.device) if splits is None else splits
    factor = float(dim**-0.5 if scaling is None else scaling)
    addresses = [one.data_ptr() for one in keys]
    aligned = all(address % 16 == 0 for address in addresses)
    together = max(1, _LOGITS_BYTES // (4 * heads * length))
    for start in range(0, count, together):
        own = slice(start, start + together)
        table = torch.tensor([addresses[own], [*places[own]]], dtype=torch.int64)
        if queries.device.type != "cpu":
            table = table.pin_memory().to(queries.device, non_blocking=True)
        sinks = None if sink_logits is None else torch.stack(list(sink_logits[own]))
        _launch(
            queries[own], first, table, table.shape[1], None, factor, softcap, sinks, mean, float(scale),
            out[..., out.shape[-1] - length :], sums, splits, group, aligned,
        )  # fmt: skip


def _launch(
    query: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor | None,
    layers: int,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mean: bool,
    scale: float,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    splits: int,
    group: int,
    aligned: bool = True,
) -> None:
    heads, dim = query.shape[-2:]
    kv_heads, length = keys.shape[:2]
    stride = triton.cdiv(length, 16) * 16
    logits = torch.empty(layers * heads * stride, dtype=torch.float32, device=query.device)
    parts = torch.empty(2 * layers * heads * splits, dtype=torch.float32, device=query.device)
    part_max, part_sum = parts[: parts.numel() // 2], parts[parts.numel() // 2 :]
    width = max(16, triton.next_power_of_2(dim))
    block = min(128, max(16, _TILE_BYTES // (width * query.element_size())))
    _logits[(splits, kv_heads, layers)](
        query, keys, table, mask, logits, part_max, part_sum, length, scaling, softcap,
        query.stride(-2), keys.stride(0), keys.stride(1),
        mask.stride(0) if mask is not None and mask.ndim > 1 else 0, stride,
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, WIDTH=width, BLOCK=block, SPLITS=splits,
        ALIGNED=aligned, num_warps=4, num_stages=4,
    )  # fmt: skip
    given = logits, part_max, part_sum, sinks, table, out, sums, length, scale, stride
    stride_layer = 0 if table is None else out.stride(0)
    splits_2 = triton.next_power_of_2(splits)
    if mean:
        heads_2 = triton.next_power_of_2(heads)
        block = max(16, _MEAN_ITEMS // heads_2)
        _mean[(triton.cdiv(length, block), 1, layers)](
            *given, stride_layer,
            HEADS=heads, HEADS_2=heads_2, SPLITS=splits, SPLITS_2=splits_2, BLOCK=block, num_warps=4,
        )  # fmt: skip
    else:
        _normalise[(triton.cdiv(length, _BLOCK), heads, layers)](
            *given, out.stride(-2), stride_layer, SPLITS=splits, SPLITS_2=splits_2, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
