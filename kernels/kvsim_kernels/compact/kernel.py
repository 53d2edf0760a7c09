"""Compaction of a cache of slots: keys and values in one launch."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.compact.reference import check

__all__ = ["compact"]

_ELEMENTS = 8192


@triton.jit
def _move(old, new, slot, place, stride_slot, width, DIM: tl.constexpr, WIDTH: tl.constexpr):
    dim = tl.arange(0, WIDTH)
    x = tl.load(
        old + slot.to(tl.int64)[:, None] * stride_slot + dim[None, :],
        mask=(slot >= 0)[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    tl.store(new + place[:, None] * DIM + dim[None, :], x, mask=(place < width)[:, None] & (dim < DIM)[None, :])


@triton.jit
def _compact(
    keys,
    values,
    slots,
    new_keys,
    new_values,
    count,
    width,
    stride_key_batch,
    stride_key_head,
    stride_key_slot,
    stride_value_batch,
    stride_value_head,
    stride_value_slot,
    stride_batch,
    stride_head,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + batch * stride_batch + head * stride_head + place, mask=place < count, other=-1)
    keys += batch * stride_key_batch + head * stride_key_head
    values += batch * stride_value_batch + head * stride_value_head
    _move(keys, new_keys + pair * width * DIM, slot, place, stride_key_slot, width, DIM, WIDTH)
    _move(values, new_values + pair * width * VALUE_DIM, slot, place, stride_value_slot, width, VALUE_DIM, WIDTH)


def compact(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    width: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of some slots; see `kvsim_kernels.compact.reference.compact`.

    Parameters
    ----------
    keys, values, slots, width
        As in the reference; the last dimension of keys and values is contiguous.
    out : pair of Tensor [batch, Hk, width, d], optional
        Where to write keys and values; contiguous, and not the old cache.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    width = slots.shape[2] if width is None else width
    check(keys, values, slots, width)
    if keys.stride(-1) != 1 or values.stride(-1) != 1:
        raise ValueError("the last dimension of keys and values must be contiguous")
    slots = slots.contiguous()
    batch, kv_heads = keys.shape[:2]
    if out is None:
        new_keys, new_values = (
            torch.empty(batch, kv_heads, width, old.shape[3], dtype=old.dtype, device=old.device)
            for old in (keys, values)
        )
    else:
        new_keys, new_values = out
    lanes = triton.next_power_of_2(max(keys.shape[3], values.shape[3]))
    block = max(1, _ELEMENTS // lanes)
    _compact[(triton.cdiv(width, block), batch * kv_heads)](
        keys,
        values,
        slots,
        new_keys,
        new_values,
        slots.shape[2],
        width,
        *keys.stride()[:3],
        *values.stride()[:3],
        slots.stride(0),
        slots.stride(1) if slots.shape[1] > 1 else 0,
        KV_HEADS=kv_heads,
        DIM=keys.shape[3],
        VALUE_DIM=values.shape[3],
        WIDTH=lanes,
        BLOCK=block,
        num_warps=4,
    )
    return new_keys, new_values
