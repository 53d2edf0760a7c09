"""The kernel of closed loops: linear rules replayed on the rows of one pass, and beside the sets that the pass had."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvsim_kernels.replay.common import NEVER, eviction_key, kth_key

__all__ = ["replay_window"]

FEW = tl.constexpr(8)
"""Up to so many positions are found one after the other, the lowest first; more by the bits of their keys."""


@triton.jit
def _cut(keys, count, position_bits):
    """Give the `count`-th smallest key (from 1)."""
    cut = tl.full([], -1, tl.int64)
    if count <= FEW:
        for _ in range(count):
            cut = tl.min(tl.where(keys > cut, keys, NEVER), axis=0)
    else:
        cut = kth_key(keys, count - 1, position_bits)
    return cut


@triton.jit
def _scores(rows, row_stride, weights, i, seen, depth, heads, ROWS: tl.constexpr):
    """Give the weighted sum of all rows over what is seen, each renormalised there; and their mass before that."""
    scores = tl.zeros_like(i).to(tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    for top in range(0, depth * heads, ROWS):
        row = top + tl.arange(0, ROWS)
        is_row = row < depth * heads
        address = row.to(tl.int64)[:, None] * row_stride + i[None, :]
        x = tl.load(rows + address, mask=is_row[:, None] & seen[None, :], other=0.0).to(tl.float64)
        sums = tl.sum(x, axis=1)
        mass += tl.sum(sums, axis=0)
        weight = tl.load(weights + row // heads, mask=is_row, other=0.0)
        share = tl.where(sums > 0, weight / tl.where(sums > 0, sums, 1.0), 0.0)
        scores += tl.sum(x * share[:, None], axis=0)
    return scores, mass


@triton.jit(do_not_specialize=("prompt", "steps", "width", "position_bits"))
def replay_window(
    rows,
    lane_stride,
    step_stride,
    row_stride,
    first,
    stop,
    begin,
    own,
    after,
    weights,
    scored,
    evicts,
    reset,
    budgets,
    sinks,
    recent,
    ran,
    m,
    evicted_at,
    both,
    either,
    near,
    mass,
    margin,
    groups,
    depth,
    heads,
    prompt,
    steps,
    width,
    position_bits,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replay one retention group of one policy over the steps of a pass, its state held in registers throughout.

    Parameters
    ----------
    rows, lane_stride, step_stride, row_stride
        float32 attention over the full cache: of a lane, a step of the pass, a layer's head, 0 where nothing is yet.
        Group g has the ``depth * heads`` rows from ``g * depth * heads`` on.
    first, stop, begin, own : int64 [A]
        Of each lane: steps done before, steps done afterwards, steps before the first of the pass, its plan.
    after, weights : float64 [P, T], [P, T, K]
        What a step multiplies the state by, and each layer's renormalised rows.
    scored, evicts, reset : uint8 [P, T], [P, T + 1], [P]
    budgets, sinks, recent : int64 [P, G]
    ran : int32 [A, G, L]
        The last step (from 1) of the pass that saw each position.
    m, evicted_at : float64, int32 [A, G, L]
        The state before the first step; the one after the last when it ends.
    both, either, near : int32 [A, G, width]
        Of each step of the pass that is run: positions in the policy's set and the pass's, in one of them, whether the
        cut is closer than `margin` of the states beside it.
    mass : float64 [A, G, width]
        Attention on what is visible, summed over rows.
    margin : float64 [1]
    groups, depth, heads, prompt, steps, width, position_bits : int
        G, K, rows of a layer in a group, L0, T, steps of the pass, bits of a position.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = program // groups
    group = program % groups
    plan = tl.load(own + lane)
    positions = prompt + steps
    budget = tl.load(budgets + plan * groups + group).to(tl.int32)
    n_sink = tl.load(sinks + plan * groups + group).to(tl.int32)
    n_recent = tl.load(recent + plan * groups + group).to(tl.int32)
    resets = tl.load(reset + plan)
    done = tl.load(first + lane).to(tl.int32)
    end = tl.load(stop + lane).to(tl.int32)
    start = tl.load(begin + lane).to(tl.int32)
    rows += lane * lane_stride + group * depth * heads * row_stride
    scored += plan * steps
    evicts += plan * (steps + 1)
    after += plan * steps
    weights += plan * steps * depth
    both += program * width
    either += program * width
    near += program * width
    mass += program * width

    i = tl.arange(0, BLOCK)
    here = i < positions
    v = tl.load(m + program * positions + i, mask=here, other=0.0)
    gone = tl.load(evicted_at + program * positions + i, mask=here, other=0)
    last = tl.load(ran + program * positions + i, mask=here, other=0)
    alive = (gone < 0) & (i < prompt + done)
    for step in range(done + 1, end + 1):
        t = step - 1
        newest = prompt + t
        seen = alive | (i == newest)
        had = (last >= step) & (i <= newest)
        tl.store(both + t - start, tl.sum((seen & had).to(tl.int32), axis=0))
        tl.store(either + t - start, tl.sum((seen | had).to(tl.int32), axis=0))
        base = rows + (t - start).to(tl.int64) * step_stride
        scores, total = _scores(base, row_stride, weights + t * depth, i, seen, depth, heads, ROWS)
        tl.store(mass + t - start, total)
        if tl.load(scored + t) != 0:
            before = tl.where(resets != 0, 0.0, v)
            v = tl.where(seen, tl.load(after + t) * before + scores, v)
        else:
            others = tl.maximum(tl.sum(alive.to(tl.int32), axis=0), 1)
            v = tl.where(i == newest, tl.sum(tl.where(alive, v, 0.0), axis=0) / others, v)

        n = tl.sum(seen.to(tl.int32), axis=0)
        free = seen & (i >= n_sink) & (i <= newest - n_recent)
        room = tl.sum(free.to(tl.int32), axis=0)
        excess = room - tl.maximum(budget - (n - room), 0)
        is_near = tl.full([], 0, tl.int32)
        alive = seen
        if (n > budget) & (tl.load(evicts + step) != 0) & (excess > 0):
            keys = eviction_key(v, i, free)
            cut = _cut(keys, excess, position_bits)
            lost = keys <= cut
            highest = tl.max(tl.where(lost, v, float("-inf")), axis=0)
            lowest = tl.min(tl.where(free & (keys > cut), v, float("inf")), axis=0)
            size = tl.maximum(tl.abs(highest), tl.abs(lowest))
            is_close = (lowest - highest < tl.load(margin) * size) | (size == 0)
            is_near = (is_close & (lowest < float("inf"))).to(tl.int32)
            gone = tl.where(lost, step, gone)
            alive = seen & (keys > cut)
        tl.store(near + t - start, is_near)
    tl.store(m + program * positions + i, v, mask=here)
    tl.store(evicted_at + program * positions + i, gone, mask=here)
