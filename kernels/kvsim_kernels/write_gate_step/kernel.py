"""The write gates of a decode step, of all layers at once: of one layer alone a launch takes longer than its work.

A step reads the weights once, so that they set the time: programs take a block of units of a row each, and a second
launch adds up. Sums are in the same order however many programs there are at a time.
"""

import torch
import triton
import triton.language as tl

from kvsim_kernels.write_gate_step.reference import check

__all__ = ["write_gate_step"]

_TILE = 4096


@triton.jit(do_not_specialize=["first_position"])
def _gate_parts(
    keys,
    slots,
    cos,
    sin,
    positions,
    w1,
    b1,
    w2,
    parts,
    first_position,
    eps,
    table,
    stride_layer,
    stride_batch,
    stride_head,
    stride_slot,
    BATCH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    layer, batch = (row // KV_HEADS // BATCH).to(tl.int64), (row // KV_HEADS % BATCH).to(tl.int64)
    head = (row % KV_HEADS).to(tl.int64)
    network = layer * KV_HEADS + head
    unit, dim = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    is_unit, is_dim = unit < UNITS, dim < DIM
    weight = w1 + (network * UNITS + unit)[:, None] * (2 * DIM) + dim[None, :]
    known = is_unit[:, None] & is_dim[None, :]
    of_pre = tl.load(weight, mask=known, other=0.0).to(tl.float32)
    of_post = tl.load(weight + DIM, mask=known, other=0.0).to(tl.float32)
    at = tl.maximum(slot, 0) * stride_slot
    key = keys + layer * stride_layer + batch * stride_batch + head * stride_head + at
    post = tl.load(key + dim, mask=is_dim, other=0.0).to(tl.float32)
    # An element is turned together with the one half the rotated width away.
    is_turned, is_low = dim < 2 * HALF, dim < HALF
    other = tl.load(key + tl.where(is_low, dim + HALF, dim - HALF), mask=is_turned, other=0.0).to(tl.float32)
    turn = layer * table + tl.load(positions + batch).to(tl.int64) - first_position
    angle = turn * HALF + tl.where(is_low, dim, dim - HALF)
    c = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    pre = post * c + tl.where(is_low, other, -other) * s
    pre *= tl.rsqrt(tl.sum(pre * pre, 0) / DIM + eps)
    post *= tl.rsqrt(tl.sum(post * post, 0) / DIM + eps)
    a = tl.sum(of_pre * pre[None, :] + of_post * post[None, :], 1)
    a += tl.load(b1 + network * UNITS + unit, mask=is_unit, other=0.0).to(tl.float32)
    a = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
    total = tl.sum(a * tl.load(w2 + network * UNITS + unit, mask=is_unit, other=0.0).to(tl.float32), 0)
    tl.store(parts + row * tl.num_programs(1) + block, total)


@triton.jit
def _gate_sum(
    parts,
    slots,
    b2,
    gates,
    BATCH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCKS_2: tl.constexpr,
):
    row, block = tl.program_id(0), tl.arange(0, BLOCKS_2)
    total = tl.sum(tl.load(parts + row * BLOCKS + block, mask=block < BLOCKS, other=0.0), 0)
    network = row // KV_HEADS // BATCH * KV_HEADS + row % KV_HEADS
    gate = tl.sigmoid(total + tl.load(b2 + network).to(tl.float32))
    tl.store(gates + row, tl.where(tl.load(slots + row) >= 0, gate, 0.0))


def write_gate_step(
    keys: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    *,
    first_position: int = 0,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score the keys of a decode step; see `kvsim_kernels.write_gate_step.reference.write_gate_step`.

    Everything is computed in float32. Slots and positions are read by the GPU only, so that the call can be captured in
    a CUDA graph.

    Parameters
    ----------
    keys, slots, cos, sin, positions, w1, b1, w2, b2, first_position, eps
        As in the reference; the last dimension of keys is contiguous, and so is everything else.
    out : Tensor [K, batch, Hk] float32, optional
        Where to write; contiguous.

    Returns
    -------
    Tensor [K, batch, Hk] float32

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(keys, slots, cos, sin, positions, w1, b1, w2, b2)
    if keys.stride(-1) != 1 or not all(x.is_contiguous() for x in (slots, cos, sin, positions, w1, b1, w2, b2)):
        raise ValueError("the last dimension of keys, slots, tables, positions and weights must be contiguous")
    layers, batch, kv_heads, _, dim = keys.shape
    rows, units, width = layers * batch * kv_heads, w1.shape[2], triton.next_power_of_2(dim)
    block = max(1, min(_TILE // width, triton.next_power_of_2(units)))
    blocks = triton.cdiv(units, block)
    parts = torch.empty(rows, blocks, dtype=torch.float32, device=keys.device)
    if out is None:
        out = torch.empty(layers, batch, kv_heads, dtype=torch.float32, device=keys.device)
    _gate_parts[(rows, blocks)](
        keys, slots, cos, sin, positions, w1, b1, w2, parts, first_position, eps, cos.shape[1], *keys.stride()[:4],
        BATCH=batch, KV_HEADS=kv_heads, DIM=dim, HALF=cos.shape[2], WIDTH=width, UNITS=units, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
    _gate_sum[(rows,)](
        parts, slots, b2, out, BATCH=batch, KV_HEADS=kv_heads, BLOCKS=blocks, BLOCKS_2=triton.next_power_of_2(blocks),
        num_warps=1,
    )  # fmt: skip
    return out
