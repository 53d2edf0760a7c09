"""Merging of partial attentions: one pass over both."""

import torch
import triton
import triton.language as tl

from kvsim_kernels.merge_partials.reference import check

__all__ = ["merge_partials"]

_ELEMENTS = 4096


@triton.jit
def _merge(o1, lse1, o2, lse2, output, lse, rows, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    dim = tl.arange(0, WIDTH)
    one = tl.load(lse1 + row, mask=is_row, other=float("-inf")).to(tl.float32)
    two = tl.load(lse2 + row, mask=is_row, other=float("-inf")).to(tl.float32)
    top = tl.maximum(one, two)
    # Minus infinity less itself is no number.
    base = tl.where(top == float("-inf"), 0.0, top)
    first, second = tl.exp(one - base), tl.exp(two - base)
    total = first + second
    share = tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0)
    at = row[:, None] * DIM + dim[None, :]
    inside = is_row[:, None] & (dim < DIM)[None, :]
    x = tl.load(o1 + at, mask=inside & (first > 0)[:, None], other=0.0).to(tl.float32)
    y = tl.load(o2 + at, mask=inside & (second > 0)[:, None], other=0.0).to(tl.float32)
    merged = x * (first * share)[:, None] + y * (second * share)[:, None]
    tl.store(output + at, merged.to(output.dtype.element_ty), mask=inside)
    tl.store(lse + row, tl.where(total > 0, base + tl.log(tl.maximum(total, 1e-38)), float("-inf")), mask=is_row)


def merge_partials(
    o1: torch.Tensor,
    lse1: torch.Tensor,
    o2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attentions over disjoint sets of keys; see `kvsim_kernels.merge_partials.reference.merge_partials`.

    Parameters
    ----------
    o1, lse1, o2, lse2
        As in the reference; contiguous.
    out : Tensor [..., d], optional
        Where to write the output; contiguous. It may be `o1` or `o2`.

    Returns
    -------
    output : Tensor [..., d]
    lse : Tensor [...] float32

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(o1, lse1, o2, lse2)
    if not all(x.is_contiguous() for x in (o1, lse1, o2, lse2)):
        raise ValueError("outputs and log-sum-exps must be contiguous")
    out = torch.empty_like(o1) if out is None else out
    lse = torch.empty(lse1.shape, dtype=torch.float32, device=o1.device)
    dim = o1.shape[-1]
    width = triton.next_power_of_2(dim)
    rows = max(1, _ELEMENTS // width)
    _merge[(triton.cdiv(lse1.numel(), rows),)](
        o1, lse1, o2, lse2, out, lse, lse1.numel(), DIM=dim, WIDTH=width, ROWS=rows, num_warps=4
    )
    return out, lse
