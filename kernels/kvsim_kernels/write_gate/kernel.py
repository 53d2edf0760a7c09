"""The write gate in one pass over the keys.

The norms have no learned scale, so each is one factor a key: keys are multiplied by the weights as they are, and the
products by the factors. Hidden units are taken a block at a time and never leave the chip.
"""

import torch
import triton
import triton.language as tl

from kvsim_kernels.write_gate.reference import check

__all__ = ["write_gate"]

_FEW = 16
_HIDDEN = 64


@triton.jit
def _factor(x, eps, DIM: tl.constexpr):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)


@triton.jit(do_not_specialize=["count"])
def _gate(
    keys_pre,
    keys_post,
    w1,
    b1,
    w2,
    b2,
    gates,
    eps,
    count,
    stride_pre_head,
    stride_pre,
    stride_post_head,
    stride_post,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_dim = row < count, dim < DIM
    both = is_row[:, None] & is_dim[None, :]
    far = row.to(tl.int64)[:, None]
    pre = tl.load(keys_pre + head * stride_pre_head + far * stride_pre + dim[None, :], mask=both, other=0.0)
    post = tl.load(keys_post + head * stride_post_head + far * stride_post + dim[None, :], mask=both, other=0.0)
    pre_factor, post_factor = _factor(pre, eps, DIM), _factor(post, eps, DIM)
    pre, post = pre.to(w1.dtype.element_ty), post.to(w1.dtype.element_ty)
    total = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, UNITS, HIDDEN):
        unit = first + tl.arange(0, HIDDEN)
        is_unit = unit < UNITS
        at = w1 + (head * UNITS + unit)[None, :] * (2 * DIM) + dim[:, None]
        known = is_unit[None, :] & is_dim[:, None]
        a = tl.dot(pre, tl.load(at, mask=known, other=0.0), input_precision="ieee") * pre_factor[:, None]
        a += tl.dot(post, tl.load(at + DIM, mask=known, other=0.0), input_precision="ieee") * post_factor[:, None]
        a += tl.load(b1 + head * UNITS + unit, mask=is_unit, other=0.0).to(tl.float32)[None, :]
        a = 0.5 * a * (1 + tl.erf(a * 0.7071067811865476))
        total += tl.sum(a * tl.load(w2 + head * UNITS + unit, mask=is_unit, other=0.0).to(tl.float32)[None, :], 1)
    total += tl.load(b2 + head).to(tl.float32)
    tl.store(gates + head * count + row, tl.sigmoid(total), mask=is_row)


def write_gate(
    keys_pre: torch.Tensor,
    keys_post: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    *,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score keys; see `kvsim_kernels.write_gate.reference.write_gate`.

    Products are taken in the type of `w1`, to which keys are rounded, and summed in float32, as is all the rest.

    Parameters
    ----------
    keys_pre, keys_post, w1, b1, w2, b2, eps
        As in the reference; the last dimension of keys is contiguous, and so are the weights.
    out : Tensor [Hk, n] float32, optional
        Where to write; contiguous.

    Returns
    -------
    Tensor [Hk, n] float32

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(keys_pre, keys_post, w1, b1, w2, b2)
    if keys_pre.stride(-1) != 1 or keys_post.stride(-1) != 1 or not all(x.is_contiguous() for x in (w1, b1, w2, b2)):
        raise ValueError("the last dimension of keys, and all weights, must be contiguous")
    kv_heads, count, dim = keys_pre.shape
    out = torch.empty(kv_heads, count, dtype=torch.float32, device=keys_pre.device) if out is None else out
    width, units = max(16, triton.next_power_of_2(dim)), w1.shape[1]
    small = w1.element_size() == 2
    # 32-bit numbers are not multiplied by the matrix units: what a thread holds of a tile are its registers.
    many, most = (128 if width <= 128 else 64, _HIDDEN) if small else (32, _HIDDEN // 2)
    rows = _FEW if count <= _FEW else many
    _gate[(triton.cdiv(count, rows), kv_heads)](
        keys_pre, keys_post, w1, b1, w2, b2, out, eps, count, *keys_pre.stride()[:2], *keys_post.stride()[:2],
        DIM=dim, WIDTH=width, UNITS=units, HIDDEN=min(most, max(16, triton.next_power_of_2(units))), ROWS=rows,
        num_warps=4 if small and rows < 128 else 8, num_stages=2,
    )  # fmt: skip
    return out
