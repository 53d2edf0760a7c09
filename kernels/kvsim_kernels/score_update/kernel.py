"""Scores of cached slots and their aggregation: all layers of a step in one launch, from logits to state."""

from typing import Literal

import torch
import triton
import triton.language as tl

from kvsim_kernels.score_update.reference import check

__all__ = ["score_update", "unscored_update"]

# A warp works on as many logits as it can hold, and a program on so many layers at a time that enough loads are under
# way: at 6,400 slots there are but 200 programs of 32 slots.
_ELEMENTS = 1024
_LAYERS = 8
_LEAST_BLOCK = 32
_MOST_BLOCK = 256
_PIECE = 1024


@triton.jit
def _times(left, right):
    return left * right


@triton.jit
def _scores(
    logits,
    lse,
    norms,
    norm_means,
    row,
    is_row,
    group,
    slot,
    length,
    slots,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBERS_2: tl.constexpr,
    VECTOR: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    """Scores [rows, slots] of a group by some rows [layer, batch] of the logits, and which slots are visible."""
    member = tl.arange(0, MEMBERS_2)
    head = group * MEMBERS + member
    is_head = is_row[:, None] & (member < MEMBERS)[None, :]
    inside = is_head[:, :, None] & (slot < length)[None, None, :]
    # A mask that changes within 16 bytes would split their load.
    near = is_head[:, :, None] & (slot // VECTOR * VECTOR < length)[None, None, :]
    query = row[:, None] * HEADS + head[None, :]
    x = tl.load(logits + query[:, :, None] * slots + slot[None, None, :], mask=near, other=float("-inf"))
    x = tl.where(inside, x, float("-inf"))
    z = tl.load(lse + query, mask=is_head, other=0.0)
    seen = x != float("-inf")
    p = tl.where(seen, tl.exp(x - z[:, :, None]), 0.0)
    if norms is not None:
        key = row[:, None] * KV_HEADS + (head // SHARE)[None, :]
        norm = tl.load(norms + key[:, :, None] * slots + slot[None, None, :], mask=near, other=0.0).to(tl.float32)
        mean = tl.load(norm_means + key, mask=is_head, other=0.0)
        scale = tl.where(mean > 0, 1 / tl.where(mean > 0, mean, 1.0), 0.0)
        p = tl.where(seen, p * norm * scale[:, :, None], 0.0)
    s = tl.max(tl.where(inside, p, float("-inf")), 1) if MAXIMUM else tl.sum(p, 1) / MEMBERS
    return tl.where((slot < length)[None, :], s, 0.0), tl.max(seen.to(tl.int32), 1)


@triton.jit
def _norm_means(
    logits,
    norms,
    lengths,
    norm_means,
    slots,
    BATCH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + key // KV_HEADS % BATCH)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, length, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < length
        x = tl.load(logits + key * SHARE * slots + slot, mask=inside, other=float("-inf"))
        norm = tl.load(norms + key * slots + slot, mask=inside, other=0.0).to(tl.float32)
        seen = x != float("-inf")
        total += tl.where(seen, norm, 0.0)
        count += seen.to(tl.int32)
    tl.store(norm_means + key, tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1))


@triton.jit
def _spread(
    logits,
    lse,
    norms,
    norm_means,
    lengths,
    parts,
    slots,
    BATCH: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBERS_2: tl.constexpr,
    VECTOR: tl.constexpr,
    MAXIMUM: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum s and s * log s over a piece of the slots, and count the visible ones."""
    piece, place = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, group = place // GROUPS, place % GROUPS
    length = tl.load(lengths + row % BATCH)
    mass = tl.zeros([BLOCK], tl.float32)
    logged = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, length), BLOCK):
        slot = first + tl.arange(0, BLOCK)
        s, seen = _scores(
            logits, lse, norms, norm_means, row + tl.arange(0, 1), tl.arange(0, 1) == 0, group, slot, length, slots,
            KV_HEADS, SHARE, HEADS, MEMBERS, MEMBERS_2, VECTOR, MAXIMUM,
        )  # fmt: skip
        s = tl.sum(s, 0)
        mass += s
        logged += tl.where(s > 0, s * tl.log(tl.where(s > 0, s, 1.0)), 0.0)
        count += tl.sum(seen, 0).to(tl.float32)
    parts += place * 3 * PIECES + piece
    tl.store(parts, tl.sum(mass, 0))
    tl.store(parts + PIECES, tl.sum(logged, 0))
    tl.store(parts + 2 * PIECES, tl.sum(count, 0))


@triton.jit
def _update(
    state,
    logits,
    lse,
    norms,
    norm_means,
    parts,
    lengths,
    a,
    b,
    new_slots,
    layers,
    slots,
    stride_a,
    stride_b,
    BATCH: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEADS: tl.constexpr,
    MEMBERS: tl.constexpr,
    MEMBERS_2: tl.constexpr,
    VECTOR: tl.constexpr,
    MAXIMUM: tl.constexpr,
    RESET: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_2: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(1).to(tl.int64)
    batch, group = place // GROUPS, place % GROUPS
    length = tl.load(lengths + batch)
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = tl.zeros([BLOCK], tl.float32)
    if not RESET:
        m = tl.load(state + place * slots + slot, mask=slot < length, other=0.0)
    if new_slots is not None:
        m = tl.where(slot == tl.load(new_slots + place), 0.0, m)
    visible = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, layers, LAYERS):
        layer = first + tl.arange(0, LAYERS)
        is_layer = layer < layers
        row = layer.to(tl.int64) * BATCH + batch
        s, seen = _scores(
            logits, lse, norms, norm_means, row, is_layer, group, slot, length, slots,
            KV_HEADS, SHARE, HEADS, MEMBERS, MEMBERS_2, VECTOR, MAXIMUM,
        )  # fmt: skip
        s = tl.where(is_layer[:, None], s, 0.0)
        visible = tl.maximum(visible, tl.max(seen, 0))
        if parts is not None:
            piece = tl.arange(0, PIECES_2)[None, :]
            part = parts + (row * GROUPS + group)[:, None] * 3 * PIECES + piece
            known = is_layer[:, None] & (piece < PIECES)
            mass = tl.sum(tl.load(part, mask=known, other=0.0), 1)
            logged = tl.sum(tl.load(part + PIECES, mask=known, other=0.0), 1)
            count = tl.sum(tl.load(part + 2 * PIECES, mask=known, other=0.0), 1)
            # The entropy of s over its sum, from unnormalised sums.
            some = tl.where(mass > 0, mass, 1.0)
            spread = tl.where(mass > 0, tl.log(some) - logged / some, 0.0)
            weight = tl.where(count > 1, spread / tl.log(tl.maximum(count, 2.0)), 1.0)
            s *= weight[:, None]
        # The recurrence is linear: a layer's score counts with its own b times the a of the layers after it.
        own_b = tl.load(b + batch * stride_b + layer, mask=is_layer, other=0.0)
        later = (tl.arange(0, LAYERS) + 1 < LAYERS) & (layer + 1 < layers)
        later_a = tl.load(a + batch * stride_a + layer + 1, mask=later, other=1.0)
        own_b *= tl.cumprod(later_a, 0, reverse=True)
        every_a = tl.load(a + batch * stride_a + layer, mask=is_layer, other=1.0)
        m = tl.reduce(every_a, 0, _times) * m + tl.sum(s * own_b[:, None], 0)
    tl.store(state + place * slots + slot, m, mask=visible > 0)


@triton.jit
def _fill(
    state, lengths, new_slots, positions, slots, stride_batch, stride_group, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + place // GROUPS)
    new = tl.load(new_slots + place)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in tl.range(0, length, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        other = (slot < length) & (slot != new)
        if positions is not None:
            at = positions + place // GROUPS * stride_batch + place % GROUPS * stride_group + slot
            other = other & (tl.load(at, mask=slot < length, other=-1) >= 0)
        total += tl.load(state + place * slots + slot, mask=other, other=0.0)
        count += other.to(tl.int32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1)
    tl.store(state + place * slots + new, mean, mask=(new >= 0) & (new < length))


def score_update(
    state: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    lengths: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    new_slots: torch.Tensor | None = None,
    heads: Literal["mean", "max"] = "mean",
    value_norms: torch.Tensor | None = None,
    entropy: bool = False,
    reset: bool = False,
) -> None:
    """Score the visible slots and update their state; see `kvsim_kernels.score_update.reference.score_update`.

    The state is float32 where the engines' reference keeps float64 and rounds to compare, so states closer than about
    1e-6 of their size may be ranked the other way round: each layer rounds its score (sums over heads, exponential,
    log-sum-exp) to 24 bits, and the recurrence is summed eight layers at a time. An entropy near zero, of attention on
    a single slot, has an absolute error of that size. Sums run in a fixed order: the same input gives the same bits.

    Coefficients, lengths and slots are read by the GPU only, so that the call can be captured in a CUDA graph. Loads
    are 16 bytes wide where the number of slots is a multiple of 4, which a cache can be padded to.

    Parameters
    ----------
    state, logits, lse, lengths, a, b, new_slots, heads, value_norms, entropy, reset
        As in the reference; state, logits and lse are float32, and all tensors contiguous.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    members = check(state, logits, lse, heads, value_norms)
    _check_state(state)
    if {logits.dtype, lse.dtype, a.dtype, b.dtype} != {torch.float32}:
        raise ValueError(f"logits, lse, a and b must be float32, got {[x.dtype for x in (logits, lse, a, b)]}")
    if not (logits.is_contiguous() and lse.is_contiguous() and a.stride(-1) == b.stride(-1) == 1):
        raise ValueError("logits, lse, and the last dimension of a and b must be contiguous")
    batch, groups, slots = state.shape
    layers, _, count, _ = logits.shape
    kv_heads = groups if value_norms is None else value_norms.shape[2]
    shape = {
        "BATCH": batch,
        "GROUPS": groups,
        "KV_HEADS": kv_heads,
        "SHARE": count // kv_heads,
        "HEADS": count,
        "MEMBERS": members,
        "MEMBERS_2": triton.next_power_of_2(members),
        "VECTOR": 1 if slots % 4 else 4,
        "MAXIMUM": heads == "max",
    }
    means = parts = None
    if value_norms is not None:
        value_norms = value_norms.contiguous()
        means = torch.empty(layers * batch * kv_heads, dtype=torch.float32, device=state.device)
        _norm_means[(means.numel(),)](
            logits, value_norms, lengths, means, slots, batch, kv_heads, count // kv_heads, BLOCK=_PIECE, num_warps=4
        )
    pieces = triton.cdiv(slots, _PIECE)
    if entropy:
        parts = torch.empty(layers * batch * groups, 3, pieces, dtype=torch.float32, device=state.device)
        _spread[(pieces, parts.shape[0])](
            logits, lse, value_norms, means, lengths, parts, slots,
            **shape, PIECES=pieces, PIECE=_PIECE, BLOCK=_LEAST_BLOCK * 2, num_warps=4,
        )  # fmt: skip
    block = max(_LEAST_BLOCK, min(_MOST_BLOCK, _ELEMENTS // shape["MEMBERS_2"]))
    together = min(_LAYERS, triton.next_power_of_2(layers))
    _update[(triton.cdiv(slots, block), batch * groups)](
        state,
        logits,
        lse,
        value_norms,
        means,
        parts,
        lengths,
        a,
        b,
        new_slots,
        layers,
        slots,
        a.stride(0) if a.ndim > 1 else 0,
        b.stride(0) if b.ndim > 1 else 0,
        **shape,
        RESET=reset,
        PIECES=pieces,
        PIECES_2=triton.next_power_of_2(pieces),
        LAYERS=together,
        BLOCK=block,
        num_warps=max(1, min(8, together * shape["MEMBERS_2"] * block // _ELEMENTS)),
    )


def unscored_update(
    state: torch.Tensor,
    lengths: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
) -> None:
    """Give the new position of an unscored step the mean of the others' states.

    See `kvsim_kernels.score_update.reference.unscored_update`; the state is float32, and all tensors are contiguous.
    """
    _check_state(state)
    batch, groups, slots = state.shape
    spread = (0, 0)
    if positions is not None:
        positions = positions.contiguous()
        spread = (positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0)
    _fill[(batch * groups,)](
        state, lengths, new_slots, positions, slots, *spread, GROUPS=groups, BLOCK=_PIECE, num_warps=8
    )


def _check_state(state: torch.Tensor) -> None:
    if state.dtype != torch.float32 or not state.is_contiguous():
        raise ValueError(f"state must be contiguous float32, got {state.dtype} with strides {state.stride()}")
