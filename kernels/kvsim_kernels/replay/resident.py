"""The kernel of linear rules that holds the survivors in registers: no memory traffic but their scores."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvsim_kernels.replay.common import (
    ATTENTION,
    FIELDS,
    attention_of,
    column_sums,
    eviction_key,
    kth_key,
    target,
)

__all__ = ["replay_resident"]

_AT = {name: tl.constexpr(column) for column, name in enumerate(FIELDS)}
WIDTH = tl.constexpr(len(FIELDS))
BUDGET, N_SINK, N_RECENT, PLAN, ELEMENT = (_AT[name] for name in FIELDS[:5])
COEFFICIENTS, COEFFICIENT_STEP, RESET, SOURCE = (_AT[name] for name in FIELDS[5:9])
LOCAL = _AT["local"]


@triton.jit
def _packed(words, record, scale, a, b, v, visible, WORDS: tl.constexpr, DTYPE: tl.constexpr):
    """Run the recurrence over the head means of all layers, four float16 in a word; give the states and the sums."""
    seen = tl.zeros_like(v)
    for w in tl.static_range(WORDS):
        word = tl.load(words + record // 4 + w, mask=visible, other=0)
        for k in tl.static_range(4):
            x = ((word >> (16 * k)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
            seen += x
            layer = 4 * w + k
            v = tl.load(a + layer).to(DTYPE) * v + tl.load(b + layer).to(DTYPE) * (x * scale)
    return v, seen


@triton.jit(do_not_specialize=("prompt", "steps", "first_program", "first_step", "last_step", "position_bits"))
def replay_resident(
    rows,
    words,
    bases,
    stride,
    scale,
    depth,
    heads,
    prompt,
    steps,
    first_program,
    first_step,
    last_step,
    position_bits,
    programs,
    batch,
    a,
    b,
    scored,
    evicts,
    source,
    admitted,
    targets,
    sizes,
    pos,
    m,
    factor,
    evicted_at,
    kept_mass,
    ties,
    retained,
    KIND: tl.constexpr,
    HIGHEST: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ADMITTED: tl.constexpr,
    TARGETED: tl.constexpr,
    WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Replay one retention group of a linear rule over the steps first_step..last_step - 1, all of them after step 0.

    Arguments are those of `kvsim_kernels.replay.general.replay_general`; besides, `words` are the rows as int64 where
    ``WORDS > 0``: then there are no heads, rows are float16, and a record has WORDS words of four layers. `BLOCK` must
    hold what is visible at any of these steps. Slots are reused in any order: what `pos` and `m` hold afterwards is
    compact, but not sorted. Only `attention` and `static` scores that need no more than their own values are known.
    """
    program = tl.program_id(0).to(tl.int64) + first_program
    field = programs + program * WIDTH
    positions = prompt + steps
    budget = tl.load(field + BUDGET).to(tl.int32)
    n_sink = tl.load(field + N_SINK).to(tl.int32)
    n_recent = tl.load(field + N_RECENT).to(tl.int32)
    reset = tl.load(field + RESET)
    element = tl.load(field + ELEMENT)
    coefficient_step = tl.load(field + COEFFICIENT_STEP)
    part = tl.load(batch + program)
    a += tl.load(field + COEFFICIENTS)
    b += tl.load(field + COEFFICIENTS)
    scored += tl.load(field + PLAN) * steps
    evicts += tl.load(field + PLAN) * (steps + 1)
    source += tl.load(field + SOURCE)
    local = tl.load(field + LOCAL).to(tl.int32)
    if ADMITTED:
        admitted += program * positions
    if TARGETED:
        targets += program * (steps + 1)
    pos += program * positions
    m += program * positions
    factor += program * depth * heads
    evicted_at += program * positions
    kept_mass += program * steps
    ties += program * steps
    retained += program * steps

    slot = tl.arange(0, BLOCK)
    n = tl.load(sizes + program * 3)
    i = tl.load(pos + slot, mask=slot < n, other=-1)
    v = tl.load(m + slot, mask=slot < n, other=0.0).to(DTYPE)
    hole = n
    for step in range(first_step, last_step):
        t = step - 1
        newest = prompt + t
        i = tl.where(slot == hole, newest, i)
        v = tl.where(slot == hole, 0.0, v)
        n += 1
        alive = i >= 0
        base = tl.load(bases + t) + element
        record = base + i.to(tl.int64) * stride
        scores = tl.load(scored + t) != 0
        seen = tl.full([], 0.0, tl.float64)
        if (WORDS == 0) | (scores == 0):
            # The sums read the positions from memory, where dead slots hold -1.
            tl.store(pos + slot, i, mask=slot < positions)
            tl.debug_barrier()
            seen = column_sums(
                rows,
                base,
                stride,
                depth * heads,
                pos,
                tl.minimum(positions, BLOCK),
                pos,
                factor,
                RENORMALISE,
                False,
                TILE,
            )
        if scores:
            at = t * coefficient_step
            if reset != 0:
                v = tl.zeros_like(v)
            if WORDS > 0:
                v, sums = _packed(words, record, scale, a + at, b + at, v, alive, WORDS, DTYPE)
                seen = tl.sum(sums.to(tl.float64), axis=0)
            else:
                for layer in range(depth):
                    if KIND == ATTENTION:
                        x = attention_of(rows, record, layer, heads, scale, factor, alive, RENORMALISE, HIGHEST, DTYPE)
                    else:
                        x = tl.load(source + layer * positions + i, mask=alive, other=0.0).to(DTYPE)
                    v = tl.load(a + at + layer).to(DTYPE) * v + tl.load(b + at + layer).to(DTYPE) * x
        else:
            mean = tl.sum(tl.where(alive & (i != newest), v, 0.0), axis=0) / tl.maximum(n - 1, 1)
            v = tl.where(slot == hole, mean, v)
        tl.store(kept_mass + t, seen)

        tied = tl.full([], 0, tl.int32)
        stay = tl.load(targets + step) if TARGETED else target(n, budget, part)
        if (n > stay) & (tl.load(evicts + step) != 0):
            free = alive & (i >= n_sink) & (i <= newest - n_recent)
            key = eviction_key(v, i, free)
            excess = tl.minimum(n - stay, tl.sum(free.to(tl.int32), axis=0))
            if excess > 0:
                cut = tl.min(key, axis=0)
                if excess > 1:
                    cut = kth_key(key, excess - 1, position_bits)
                same = (key >> 31) == (cut >> 31)
                stays = tl.sum((same & (key > cut)).to(tl.int32), axis=0)
                tied = tl.where(stays > 0, tl.sum(same.to(tl.int32), axis=0), 0)
                tl.store(evicted_at + i, step, mask=key <= cut)
                i = tl.where(key <= cut, -1, i)
                n -= excess
        if ADMITTED:
            place = newest + 1 - local
            is_refused = tl.load(admitted + place, mask=place >= 0, other=1) == 0
            tl.store(evicted_at + place, step, mask=is_refused)
            i = tl.where(is_refused & (i == place), -1, i)
            n -= is_refused.to(tl.int32)
        hole = tl.min(tl.where(i < 0, slot, BLOCK), axis=0)
        tl.store(ties + t, tied)
        tl.store(retained + t, n)

    tl.debug_barrier()
    place = tl.cumsum((i >= 0).to(tl.int32), axis=0) - 1
    tl.store(pos + place, i, mask=i >= 0)
    tl.store(m + place, v.to(tl.float64), mask=i >= 0)
    tl.store(sizes + program * 3, n)
