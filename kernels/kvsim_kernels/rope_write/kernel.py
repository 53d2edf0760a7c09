"""Norm, rotation and the write into slots in one launch: a program for each head."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.launch import early_launch
from kvsim_kernels.rope_write.reference import check

__all__ = ["rope_write"]


@triton.jit
def _turned(x, norm, cos, sin, eps, DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)
    inside = dim < DIM
    v = tl.load(x + dim, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if norm is not None:
        scale = tl.rsqrt(tl.sum(v * v, 0) / DIM + eps)
        v *= scale * tl.load(norm + dim, mask=inside, other=0.0).to(tl.float32)
    if cos is not None:
        turned = dim < 2 * HALF
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        w = tl.load(x + partner, mask=turned, other=0.0).to(tl.float32)
        if norm is not None:
            w *= scale * tl.load(norm + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos + dim, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin + dim, mask=turned, other=0.0).to(tl.float32)
        v = v * c + tl.where(dim < HALF, -w, w) * s
    return v


@triton.jit
def _rope_write(
    query,
    key,
    value,
    cos,
    sin,
    positions,
    first_position,
    query_norm,
    key_norm,
    eps,
    new_slots,
    turned_query,
    keys,
    values,
    value_norms,
    slots,
    stride_query_batch,
    stride_query_head,
    stride_key_batch,
    stride_key_head,
    stride_value_batch,
    stride_value_head,
    stride_slot_batch,
    stride_slot_head,
    stride_keys_batch,
    stride_keys_head,
    stride_keys_slot,
    stride_values_batch,
    stride_values_head,
    stride_values_slot,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, WIDTH)
    if cos is not None:
        place = (tl.load(positions + batch) - first_position) * (2 * HALF)
        cos += place
        sin += place
    if head < HEADS:
        if query is not None:
            own_query = query + batch * stride_query_batch + head * stride_query_head
            q = _turned(own_query, query_norm, cos, sin, eps, DIM, HALF, WIDTH)
            at = turned_query + (batch * HEADS + head) * DIM + dim
            tl.store(at, q.to(turned_query.dtype.element_ty), mask=dim < DIM)
    else:
        own = head - HEADS
        slot = tl.load(new_slots + batch * stride_slot_batch + own * stride_slot_head).to(tl.int64)
        if slot >= 0:
            own_key = key + batch * stride_key_batch + own * stride_key_head
            k = _turned(own_key, key_norm, cos, sin, eps, DIM, HALF, WIDTH)
            at_key = keys + batch * stride_keys_batch + own * stride_keys_head + slot * stride_keys_slot + dim
            tl.store(at_key, k.to(keys.dtype.element_ty), mask=dim < DIM)
            own_value = value + batch * stride_value_batch + own * stride_value_head + dim
            v = tl.load(own_value, mask=dim < VALUE_DIM, other=0.0)
            at_value = values + batch * stride_values_batch + own * stride_values_head + slot * stride_values_slot + dim
            tl.store(at_value, v.to(values.dtype.element_ty), mask=dim < VALUE_DIM)
            if value_norms is not None:
                v_wide = v.to(tl.float32)
                tl.store(value_norms + (batch * KV_HEADS + own) * slots + slot, tl.sqrt(tl.sum(v_wide * v_wide, 0)))


def rope_write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    value_norms: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write a step's keys and values into their slots; see `kvsim_kernels.rope_write.reference.rope_write`.

    Everything is computed in float32 and rounded once. Slots and positions are read by the GPU only, so that the call
    can be captured in a CUDA graph.

    Parameters
    ----------
    key, value, keys, values, new_slots, query, cos, sin, positions, first_position
        As in the reference; last dimensions, tables and `value_norms` are contiguous.
    query_norm, key_norm, eps, value_norms
        As in the reference.
    out : Tensor [batch, H, d], optional
        Where to write the query; contiguous.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(key, value, keys, values, new_slots, query, cos, sin)
    given = [x for x in (key, value, keys, values, query) if x is not None]
    whole = [x for x in (cos, sin, positions, value_norms, out) if x is not None]
    if any(x.stride(-1) != 1 for x in given) or not all(x.is_contiguous() for x in whole):
        raise ValueError("last dimensions must be contiguous, and tables, positions, norms and out wholly so")
    if cos is not None and positions is None:
        raise ValueError("cos and sin need positions")
    batch, kv_heads, dim = key.shape
    heads = 0 if query is None else query.shape[1]
    if query is not None and out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _rope_write[(batch, heads + kv_heads)](
        query,
        key,
        value,
        cos,
        sin,
        positions,
        first_position,
        query_norm,
        key_norm,
        eps,
        new_slots,
        out,
        keys,
        values,
        value_norms,
        keys.shape[2],
        *((0, 0) if query is None else query.stride()[:2]),
        *key.stride()[:2],
        *value.stride()[:2],
        new_slots.stride(0),
        new_slots.stride(1) if new_slots.shape[1] > 1 else 0,
        *keys.stride()[:3],
        *values.stride()[:3],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value.shape[2],
        HALF=0 if cos is None else cos.shape[1] // 2,
        WIDTH=triton.next_power_of_2(max(dim, value.shape[2])),
        num_warps=1,
        **early_launch(keys.device),
    )
    return out
