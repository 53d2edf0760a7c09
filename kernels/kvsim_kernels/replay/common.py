"""What both replay kernels are made of: keys, selection, sums over survivors, scores of a layer."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

__all__ = [
    "ATTENTION",
    "BILINEAR",
    "COSINE",
    "FIELDS",
    "NEVER",
    "STATIC",
    "attention_of",
    "column_sums",
    "eviction_key",
    "kth_key",
    "kth_stored_key",
    "target",
]

FIELDS = (
    "budget",
    "n_sink",
    "n_recent",
    "plan",
    "element",
    "coefficients",
    "coefficient_step",
    "reset",
    "source",
    "queries",
    "weight",
    "ring",
    "window",
    "pool",
    "rescue",
    "local",
)
"""Columns of the int64 table that says what each program runs.

``plan`` is a row of `scored` and `evicts`, ``element`` where the group's elements start in a record. ``coefficients``,
``source``, ``queries``, ``weight`` and ``ring`` are offsets into the arrays of that name; ``coefficient_step`` is what
to add to the first of them for each step (0 where coefficients never change). ``local`` is the size of the local
window, 0 for none.
"""

ATTENTION, STATIC, COSINE, BILINEAR = (tl.constexpr(kind) for kind in range(4))
"""Kinds of score source."""

NEVER = tl.constexpr(2**63 - 1)
"""Key of what is not to be evicted."""


@triton.jit
def eviction_key(state, position, free):
    """Order by float32 state, then by position: the lowest key is evicted first; `NEVER` where not `free`.

    The upper 32 of 63 bits are the state's, the lower 31 the position.
    """
    x = state.to(tl.float32)
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    order = tl.where(bits < 0, -1 - bits, bits + 2147483648)
    return tl.where(free, (order << 31) | position.to(tl.int64), NEVER)


@triton.jit
def kth_key(keys, k, position_bits):
    """Give the k-th smallest key (from 0), one bit at a time: the largest value with at most k keys below it."""
    cut = tl.full([], 0, tl.int64)
    one = tl.full([], 1, tl.int64)
    for i in range(32 + position_bits):
        bit = tl.where(i < 32, 62 - i, 31 + position_bits - i)
        candidate = cut | (one << bit)
        below = tl.sum((keys < candidate).to(tl.int32), axis=0)
        cut = tl.where(below <= k, candidate, cut)
    return cut


@triton.jit
def kth_stored_key(keys, n, k, position_bits, BLOCK: tl.constexpr):
    """Give the k-th smallest (from 0) of the n keys at a pointer."""
    cut = tl.full([], 0, tl.int64)
    one = tl.full([], 1, tl.int64)
    for i in range(32 + position_bits):
        bit = tl.where(i < 32, 62 - i, 31 + position_bits - i)
        candidate = cut | (one << bit)
        count = tl.zeros([BLOCK], tl.int32)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            count += (tl.load(keys + j, mask=j < n, other=NEVER) < candidate).to(tl.int32)
        below = tl.sum(count, axis=0)
        cut = tl.where(below <= k, candidate, cut)
    return cut


@triton.jit
def target(n, budget, batch):
    """Give how many of n positions stay: the budget, or what is left after shares `batch` of them go."""
    stay = tl.minimum(n, budget)
    if batch > 0:
        stay = n
        while stay > budget:
            stay -= tl.maximum((batch * stay + 1e-9).to(tl.int32), 1)
    return stay


@triton.jit
def column_sums(
    data, first, stride, columns, pos, n, member, out, INVERT: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr
):
    """Sum ``data[first + pos[j] * stride + column]`` over j < n into ``out[column]``; give the sum of all columns.

    Negative positions are passed over, with `MEMBERS` also those that are not marked in `member`. With `INVERT`
    ``out`` receives 1 over the sum, 0 where that is not positive. A tile has `TILE` columns and 2048 elements.
    """
    ROWS: tl.constexpr = 2048 // TILE
    total = tl.full([], 0.0, tl.float64)
    for left in range(0, columns, TILE):
        column = left + tl.arange(0, TILE)
        sums = tl.zeros([ROWS, TILE], tl.float64)
        for start in range(0, n, ROWS):
            j = start + tl.arange(0, ROWS)
            i = tl.load(pos + j, mask=j < n, other=-1)
            seen = i >= 0
            if MEMBERS:
                seen = seen & (tl.load(member + i, mask=seen, other=0) != 0)
            address = first + i.to(tl.int64)[:, None] * stride + column[None, :]
            x = tl.load(data + address, mask=seen[:, None] & (column < columns)[None, :], other=0.0)
            sums += x.to(tl.float64)
        sum_of = tl.sum(sums, axis=0)
        total += tl.sum(sum_of, axis=0)
        if INVERT:
            sum_of = tl.where(sum_of > 0, 1.0 / tl.where(sum_of > 0, sum_of, 1.0), 0.0)
        tl.store(out + column, sum_of, mask=column < columns)
    tl.debug_barrier()
    return total


@triton.jit
def attention_of(
    rows,
    record,
    layer,
    heads,
    scale,
    factor,
    visible,
    RENORMALISE: tl.constexpr,
    HIGHEST: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Score one layer: the mean (or highest) over heads of ``rows[record + ...]``, times `factor` or `scale`."""
    s = tl.zeros_like(record).to(DTYPE)
    for h in range(heads):
        e = layer * heads + h
        x = tl.load(rows + record + e, mask=visible, other=0.0).to(DTYPE)
        if RENORMALISE:
            x *= tl.load(factor + e).to(DTYPE)
        else:
            x *= scale
        if HIGHEST:
            s = tl.maximum(s, x)
        else:
            s += x
    if not HIGHEST:
        s = s / heads
    return s
