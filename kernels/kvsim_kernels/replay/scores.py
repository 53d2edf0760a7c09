"""Scores of one layer at some positions, from any source, for the general kernel."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvsim_kernels.replay.common import ATTENTION, COSINE, STATIC, attention_of

__all__ = ["layer_scores"]


@triton.jit
def _weighted(
    rows,
    record,
    position,
    layer,
    depth,
    heads,
    kv_heads,
    scale,
    factor,
    weight,
    share,
    n,
    visible,
    RENORMALISE: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """Score by attention times the weight of its KV head; `share` holds 1 over the sum of each KV head's weights."""
    s = tl.zeros_like(record).to(tl.float64)
    for h in range(heads):
        e = layer * heads + h
        kv = layer * kv_heads + h * kv_heads // heads
        x = tl.load(rows + record + e, mask=visible, other=0.0).to(tl.float64)
        if RENORMALISE:
            x *= tl.load(factor + e)
        else:
            x *= scale
        w = tl.load(weight + position * (depth * kv_heads) + kv, mask=visible, other=0.0)
        x *= w * n * tl.load(share + kv)
        if HIGHEST:
            s = tl.maximum(s, x)
        else:
            s += x
    if not HIGHEST:
        s = s / heads
    return s


@triton.jit
def _of_vectors(
    vectors,
    position,
    positions,
    layer,
    kv_heads,
    dim,
    other,
    divisor,
    visible,
    IS_COSINE: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """Score by the product of a vector with ``other / divisor`` (a query), or by minus their cosine (unit vectors)."""
    s = tl.zeros_like(position).to(tl.float64)
    for kv in range(kv_heads):
        product = tl.zeros_like(s)
        square = tl.full([], 0.0, tl.float64)
        start = ((layer * kv_heads + kv) * positions + position) * dim
        for d in range(dim):
            y = tl.load(other + kv * dim + d) / divisor
            product += tl.load(vectors + start + d, mask=visible, other=0.0) * y
            square += y * y
        if IS_COSINE:
            norm = tl.sqrt(tl.where(square > 0, square, 1.0))
            product = tl.where(square > 0, -(product / norm).to(tl.float32).to(tl.float64), 0.0)
        if HIGHEST:
            s = tl.where(kv == 0, product, tl.maximum(s, product))
        else:
            s += product
    if not HIGHEST:
        s = s / kv_heads
    return s


@triton.jit
def layer_scores(
    rows,
    record,
    position,
    layer,
    depth,
    heads,
    kv_heads,
    dim,
    positions,
    scale,
    factor,
    source,
    query,
    weight,
    share,
    n,
    visible,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HIGHEST: tl.constexpr,
):
    """Give the scores of a block of positions as the source says, before they are finished.

    `record` is where a position's elements start in `rows`; `factor` and `share` are work space that says what heads
    and their weights, or unit vectors, sum up to over the n visible positions.
    """
    if KIND == ATTENTION:
        if WEIGHTED:
            s = _weighted(
                rows,
                record,
                position,
                layer,
                depth,
                heads,
                kv_heads,
                scale,
                factor,
                weight,
                share,
                n,
                visible,
                RENORMALISE,
                HIGHEST,
            )
        else:
            s = attention_of(rows, record, layer, heads, scale, factor, visible, RENORMALISE, HIGHEST, tl.float64)
    elif KIND == STATIC:
        s = tl.load(source + layer * positions + position, mask=visible, other=0.0)
    elif KIND == COSINE:
        s = _of_vectors(source, position, positions, layer, kv_heads, dim, share, n, visible, True, HIGHEST)
    else:
        q = query + layer * kv_heads * dim
        s = _of_vectors(source, position, positions, layer, kv_heads, dim, q, 1, visible, False, HIGHEST)
    return s
