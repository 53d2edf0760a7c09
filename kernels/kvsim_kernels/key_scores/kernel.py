"""Scores of cached keys: the sum of unit keys split along the slots, then each key against it."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.key_scores.reference import Kind, check
from kvsim_kernels.launch import split_count

__all__ = ["key_scores"]

_TILE_BYTES = 16384


@triton.jit
def _units(keys, slot, end, stride_slot, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Give the unit keys of some slots and their norms; zero for a zero key."""
    dim = tl.arange(0, WIDTH)
    seen = (slot < end)[:, None] & (dim < DIM)[None, :]
    k = tl.load(keys + slot.to(tl.int64)[:, None] * stride_slot + dim[None, :], mask=seen, other=0.0).to(tl.float32)
    # Over the largest element first: squares of small ones would vanish.
    largest = tl.max(tl.abs(k), 1)
    k /= tl.where(largest > 0, largest, 1.0)[:, None]
    size = tl.sqrt(tl.sum(k * k, 1))
    return k / tl.where(size > 0, size, 1.0)[:, None], largest * size


@triton.jit
def _sum(
    keys,
    lengths,
    parts,
    stride_batch,
    stride_head,
    stride_slot,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + pair // KV_HEADS)
    keys += pair // KV_HEADS * stride_batch + pair % KV_HEADS * stride_head
    share = tl.cdiv(length, SPLITS)
    end = tl.minimum(split * share + share, length)
    total = tl.zeros([WIDTH], tl.float32)
    for first in tl.range(split * share, end, BLOCK):
        unit, _ = _units(keys, first + tl.arange(0, BLOCK), end, stride_slot, DIM, WIDTH)
        total += tl.sum(unit, 0)
    tl.store(parts + (pair * SPLITS + split) * WIDTH + tl.arange(0, WIDTH), total)


@triton.jit
def _score(
    keys,
    lengths,
    parts,
    out,
    slots,
    stride_batch,
    stride_head,
    stride_slot,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + pair // KV_HEADS)
    keys += pair // KV_HEADS * stride_batch + pair % KV_HEADS * stride_head
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    unit, s = _units(keys, slot, length, stride_slot, DIM, WIDTH)
    if parts is not None:
        split = tl.arange(0, SPLITS_2)
        part = parts + (pair * SPLITS + split)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        anchor = tl.sum(tl.load(part, mask=(split < SPLITS)[:, None], other=0.0), 0)
        size = tl.sqrt(tl.sum(anchor * anchor, 0))
        s = 0.0 - tl.sum(unit * anchor[None, :], 1) / tl.where(size > 0, size, float("inf"))
    tl.store(out + pair * slots + slot, s, mask=slot < length)


def key_scores(
    keys: torch.Tensor, lengths: torch.Tensor, kind: Kind, *, out: torch.Tensor | None = None, splits: int | None = None
) -> torch.Tensor:
    """Score the slots in use by their keys; see `kvsim_kernels.key_scores.reference.key_scores`.

    Reads the keys once for ``norm`` and twice for ``cosine``. Lengths are read by the GPU only, so that the call can be
    captured in a CUDA graph.

    Parameters
    ----------
    keys, lengths, kind
        As in the reference; the last dimension of the keys is contiguous.
    out : Tensor [batch, Hk, slots] float32, optional
        Where to write; contiguous. Scores from a sequence's length on are not written.
    splits : int, optional
        Programs for each KV head that add up unit keys; chosen for the GPU by default.

    Raises
    ------
    ValueError
        If shapes do not fit, or the kind is unknown.
    """
    check(keys, lengths, kind)
    batch, kv_heads, slots, dim = keys.shape
    if keys.stride(-1) != 1 or (out is not None and (out.shape != keys.shape[:3] or not out.is_contiguous())):
        raise ValueError(f"the last dimension of keys must be contiguous, and out a contiguous {tuple(keys.shape[:3])}")
    if out is None:
        out = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
    splits = split_count(batch * kv_heads, slots, keys.device) if splits is None else splits
    width = triton.next_power_of_2(dim)
    block = min(128, max(16, _TILE_BYTES // (width * 4)))
    shape = {"KV_HEADS": kv_heads, "DIM": dim, "WIDTH": width, "BLOCK": block, "SPLITS": splits}
    parts = None
    if kind == "cosine":
        parts = torch.empty(batch * kv_heads, splits, width, dtype=torch.float32, device=keys.device)
        _sum[(splits, batch * kv_heads)](keys, lengths, parts, *keys.stride()[:3], **shape, num_warps=4)
    _score[(triton.cdiv(slots, block), batch * kv_heads)](
        keys, lengths, parts, out, slots, *keys.stride()[:3],
        **shape, SPLITS_2=triton.next_power_of_2(splits), num_warps=4,
    )  # fmt: skip
    return out
