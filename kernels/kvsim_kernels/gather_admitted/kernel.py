"""Gathering admitted keys: blocks of positions are counted, the counts summed up, and each block moves its own rows."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.gather_admitted.reference import Admitted, check

__all__ = ["gather_admitted"]

_BLOCK = 64


@triton.jit(do_not_specialize=["length"])
def _count(mask, counts, length, blocks, BLOCK: tl.constexpr):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(mask + head * length + place, mask=place < length, other=0).to(tl.int32)
    tl.store(counts + head * blocks + block, tl.sum(chosen, 0))


@triton.jit(do_not_specialize=["length"])
def _gather(
    key,
    value,
    mask,
    ends,
    new_key,
    new_value,
    positions,
    starts,
    length,
    blocks,
    capacity,
    stride_key_head,
    stride_key,
    stride_value_head,
    stride_value,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(mask + head * length + place, mask=place < length, other=0).to(tl.int32)
    end = tl.load(ends + head * blocks + block).to(tl.int32)
    row = end - tl.sum(chosen, 0) + tl.cumsum(chosen, 0) - 1
    moved = (chosen != 0) & (row < capacity)
    tl.store(positions + row, place, mask=moved)
    if block == blocks - 1:
        tl.store(starts + head + 1, end)
        if head == 0:
            tl.store(starts, 0)
    dim = tl.arange(0, WIDTH)
    both = moved[:, None] & (dim < DIM)[None, :]
    near, far = place.to(tl.int64)[:, None], row.to(tl.int64)[:, None] * DIM + dim[None, :]
    k = tl.load(key + head * stride_key_head + near * stride_key + dim[None, :], mask=both, other=0.0)
    v = tl.load(value + head * stride_value_head + near * stride_value + dim[None, :], mask=both, other=0.0)
    tl.store(new_key + far, k, mask=both)
    tl.store(new_value + far, v, mask=both)


def gather_admitted(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, capacity: int | None = None
) -> Admitted:
    """Gather the keys and values that are admitted; see `kvsim_kernels.gather_admitted.reference.gather_admitted`.

    Parameters
    ----------
    key, value, mask
        As in the reference; the last dimension of keys and values is contiguous.
    capacity : int, optional
        Rows to give; the host then waits for nothing. Without it the host waits once, for the number of rows. What is
        admitted beyond it is left out: ``starts[Hk] > capacity`` tells.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(key, value, mask)
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("the last dimension of key and value must be contiguous")
    kv_heads, length, dim = key.shape
    device, blocks = key.device, triton.cdiv(length, _BLOCK)
    chosen = mask.contiguous().view(torch.uint8)
    counts = torch.empty(kv_heads * blocks, dtype=torch.int32, device=device)
    starts = torch.empty(kv_heads + 1, dtype=torch.int32, device=device)
    grid = (blocks, kv_heads)
    _count[grid](chosen, counts, length, blocks, BLOCK=_BLOCK, num_warps=1)
    ends = counts.cumsum(0)
    capacity = int(ends[-1]) if capacity is None else capacity
    rows = [torch.empty(capacity, dim, dtype=x.dtype, device=device) for x in (key, value)]
    positions = torch.empty(capacity, dtype=torch.int32, device=device)
    _gather[grid](
        key, value, chosen, ends, *rows, positions, starts, length, blocks, capacity,
        *key.stride()[:2], *value.stride()[:2],
        DIM=dim, WIDTH=triton.next_power_of_2(dim), BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return Admitted(rows[0], rows[1], positions, starts)
