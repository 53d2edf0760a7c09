"""The kernel that runs every plan, with its state in global memory: any length, any scores, shadow mode."""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from kvsim_kernels.replay.common import COSINE, FIELDS, column_sums, target
from kvsim_kernels.replay.eviction import count_tied, cut_of, evict, guard_highest, let_go, mark, write_keys
from kvsim_kernels.replay.scores import layer_scores

__all__ = ["replay_general"]

_AT = {name: tl.constexpr(column) for column, name in enumerate(FIELDS)}
WIDTH = tl.constexpr(len(FIELDS))
BUDGET, N_SINK, N_RECENT, PLAN, ELEMENT = (_AT[name] for name in FIELDS[:5])
COEFFICIENTS, COEFFICIENT_STEP, RESET, SOURCE, QUERIES, WEIGHT = (_AT[name] for name in FIELDS[5:11])
RING, WINDOW, POOL, RESCUE, LOCAL = (_AT[name] for name in FIELDS[11:])


@triton.jit
def _update(
    m,
    s,
    pos,
    n,
    total,
    low,
    layer,
    a,
    b,
    reset,
    slot,
    peak,
    ENTROPY: tl.constexpr,
    PIVOTAL: tl.constexpr,
    SIGNED: tl.constexpr,
    WINDOWED: tl.constexpr,
    RESCUED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish a layer's scores, whose sum and minimum are given, and let them change the state or the window."""
    share = tl.full([], 1.0, tl.float64)
    later = tl.where(layer > 0, n, 0)
    if ENTROPY:
        h = tl.zeros([BLOCK], tl.float64)
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            x = tl.load(s + j, mask=j < n, other=0.0)
            p = tl.where(x > 0, x / tl.where(total > 0, total, 1.0), 1.0)
            h -= p * tl.log(p)
        if n > 1:
            share = tl.sum(h, axis=0) / tl.log(n.to(tl.float64))
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        here = j < n
        i = tl.load(pos + j, mask=here, other=0)
        x = tl.load(s + j, mask=here, other=0.0) * share
        if PIVOTAL:
            x = (x > total * share / n * (1 + 1e-9)).to(tl.float64)
        elif SIGNED:
            x -= low * share
        if RESCUED:
            before = tl.load(peak + i, mask=j < later, other=float("-inf"))
            tl.store(peak + i, tl.maximum(before, x), mask=here)
        if WINDOWED:
            tl.store(slot + i, tl.load(slot + i, mask=j < later, other=0.0) + x, mask=here)
        else:
            v = tl.load(m + j, mask=j < tl.where(reset != 0, later, n), other=0.0)
            tl.store(m + j, a * v + b * x, mask=here)
    tl.debug_barrier()


@triton.jit(do_not_specialize=("prompt", "steps", "first_program", "first_step", "last_step", "position_bits"))
def replay_general(
    rows,
    bases,
    stride,
    scale,
    depth,
    heads,
    kv_heads,
    dim,
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
    queries,
    weight,
    admitted,
    targets,
    sizes,
    pos,
    m,
    keys,
    s,
    factor,
    share,
    ring,
    peak,
    guard,
    member,
    evicted_at,
    kept_mass,
    ties,
    retained,
    both,
    history,
    KIND: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HIGHEST: tl.constexpr,
    ENTROPY: tl.constexpr,
    PIVOTAL: tl.constexpr,
    SIGNED: tl.constexpr,
    WINDOWED: tl.constexpr,
    RESCUED: tl.constexpr,
    ADMITTED: tl.constexpr,
    TARGETED: tl.constexpr,
    LAYERWISE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    SHADOW: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Replay one retention group of one plan over the steps first_step..last_step - 1; step 0 is before the first.

    Parameters
    ----------
    rows, bases, stride, scale
        Token-major rows: the elements of step t's position i start at ``bases[t - 1] + i * stride``.
    depth, heads, kv_heads, dim : int
        Layers of a group, query and KV heads of a group's layer, size of a vector.
    prompt, steps, position_bits : int
        L0, T, and the bits of a position.
    programs : int64 [N, len(FIELDS)]
        What each program runs; see `kvsim_kernels.replay.common.FIELDS`.
    batch : float64 [N]
        Share that an overflow evicts, 0 for none.
    a, b : float64
        Coefficients, K for each step or for all.
    scored : uint8 [P, T]
    evicts : uint8 [P, T + 1]
    source, queries, weight : float64
        ``static`` scores [K, L], vectors [K, Hk, L, d]; queries [T, K, Hk, d]; weights [L, K, Hk].
    admitted, targets : uint8 [N, L], int32 [N, T + 1]
        Whether a position stays when it leaves the local window; how many stay after each step, instead of a budget.
    sizes : int32 [N, 3]
        Positions held, scored steps so far, whether a rescue has happened; carried from launch to launch as are the
        arrays up to `evicted_at`.
    pos, m, keys, s : [N, L]
        Positions held, ascending, and their state; work space.
    factor, share : [N, ...]
        Work space of depth * heads and of depth * kv_heads + kv_heads * dim elements.
    ring, peak, guard, member
        [N, W, L], [N, L] scores of a window, highest layer scores, guarded positions, members of a shadow set.
    evicted_at, kept_mass, ties, retained, both, history
        The answers: [N, L]; [N, T] each, the mass still unscaled; in shadow mode [N, T, L].
    """
    program = tl.program_id(0).to(tl.int64) + first_program
    field = programs + program * WIDTH
    positions = prompt + steps
    budget = tl.load(field + BUDGET).to(tl.int32)
    n_sink = tl.load(field + N_SINK).to(tl.int32)
    n_recent = tl.load(field + N_RECENT).to(tl.int32)
    window = tl.load(field + WINDOW).to(tl.int32)
    pool = tl.load(field + POOL).to(tl.int32)
    rescue = tl.load(field + RESCUE).to(tl.int32)
    local = tl.load(field + LOCAL).to(tl.int32)
    reset = tl.load(field + RESET)
    element = tl.load(field + ELEMENT)
    coefficient_step = tl.load(field + COEFFICIENT_STEP)
    part = tl.load(batch + program)
    a += tl.load(field + COEFFICIENTS)
    b += tl.load(field + COEFFICIENTS)
    scored += tl.load(field + PLAN) * steps
    evicts += tl.load(field + PLAN) * (steps + 1)
    source += tl.load(field + SOURCE)
    queries += tl.load(field + QUERIES)
    weight += tl.load(field + WEIGHT)
    ring += tl.load(field + RING)
    if ADMITTED:
        admitted += program * positions
    if TARGETED:
        targets += program * (steps + 1)
    pos += program * positions
    m += program * positions
    keys += program * positions
    s += program * positions
    peak += program * positions
    guard += program * positions
    member += program * positions
    evicted_at += program * positions
    factor += program * depth * heads
    share += program * (depth * kv_heads + kv_heads * dim)
    kept_mass += program * steps
    ties += program * steps
    retained += program * steps
    both += program * steps
    history += program * steps * positions
    n = tl.load(sizes + program * 3)
    updates = tl.load(sizes + program * 3 + 1)
    rescued = tl.load(sizes + program * 3 + 2)
    wide = tl.full([], 0, tl.int64)

    for step in range(first_step, last_step):
        if step > 0:
            t = step - 1
            tl.store(pos + n, prompt + t)
            tl.store(m + n, 0.0)
            if SHADOW:
                tl.store(member + n, 1)
            n += 1
            tl.debug_barrier()
            base = tl.load(bases + t) + element
            seen = column_sums(rows, base, stride, depth * heads, pos, n, member, factor, RENORMALISE, SHADOW, TILE)
            tl.store(kept_mass + t, seen)
            if tl.load(scored + t) != 0:
                at = t * coefficient_step
                if WEIGHTED:
                    column_sums(weight, 0, depth * kv_heads, depth * kv_heads, pos, n, member, share, True, False, TILE)
                if LAYERWISE:
                    for layer in range(depth):
                        if KIND == COSINE:
                            for kv in range(kv_heads):
                                vectors = source + (wide + layer * kv_heads + kv) * positions * dim
                                column_sums(vectors, 0, dim, dim, pos, n, member, share + kv * dim, False, False, TILE)
                        total = tl.zeros([BLOCK], tl.float64)
                        low = tl.full([BLOCK], float("inf"), tl.float64)
                        for start in range(0, n, BLOCK):
                            j = start + tl.arange(0, BLOCK)
                            i = tl.load(pos + j, mask=j < n, other=0).to(tl.int64)
                            x = layer_scores(
                                rows,
                                base + i * stride,
                                i,
                                layer,
                                depth,
                                heads,
                                kv_heads,
                                dim,
                                positions,
                                scale,
                                factor,
                                source,
                                queries + (wide + t) * depth * kv_heads * dim,
                                weight,
                                share,
                                n,
                                j < n,
                                KIND,
                                WEIGHTED,
                                RENORMALISE,
                                HIGHEST,
                            )
                            tl.store(s + j, x, mask=j < n)
                            total += tl.where(j < n, x, 0.0)
                            low = tl.minimum(low, tl.where(j < n, x, float("inf")))
                        tl.debug_barrier()
                        _update(
                            m,
                            s,
                            pos,
                            n,
                            tl.sum(total, axis=0),
                            tl.min(low, axis=0),
                            layer,
                            tl.load(a + at + layer),
                            tl.load(b + at + layer),
                            reset,
                            ring + (updates % tl.maximum(window, 1)) * positions,
                            peak,
                            ENTROPY,
                            PIVOTAL,
                            SIGNED,
                            WINDOWED,
                            RESCUED,
                            BLOCK,
                        )
                    if WINDOWED:
                        for start in range(0, n, BLOCK):
                            j = start + tl.arange(0, BLOCK)
                            i = tl.load(pos + j, mask=j < n, other=0)
                            v = tl.zeros([BLOCK], tl.float64)
                            for w in range(window):
                                v += tl.load(ring + w * positions + i, mask=j < n, other=0.0)
                            tl.store(m + j, v, mask=j < n)
                else:
                    for start in range(0, n, BLOCK):
                        j = start + tl.arange(0, BLOCK)
                        i = tl.load(pos + j, mask=j < n, other=0).to(tl.int64)
                        v = tl.load(m + j, mask=j < tl.where(reset != 0, 0, n), other=0.0)
                        for layer in range(depth):
                            x = layer_scores(
                                rows,
                                base + i * stride,
                                i,
                                layer,
                                depth,
                                heads,
                                kv_heads,
                                dim,
                                positions,
                                scale,
                                factor,
                                source,
                                queries + (wide + t) * depth * kv_heads * dim,
                                weight,
                                share,
                                n,
                                j < n,
                                KIND,
                                WEIGHTED,
                                RENORMALISE,
                                HIGHEST,
                            )
                            v = tl.load(a + at + layer) * v + tl.load(b + at + layer) * x
                        tl.store(m + j, v, mask=j < n)
                updates += 1
            elif n > 1:
                total = tl.zeros([BLOCK], tl.float64)
                for start in range(0, n - 1, BLOCK):
                    j = start + tl.arange(0, BLOCK)
                    total += tl.load(m + j, mask=j < n - 1, other=0.0)
                tl.store(m + n - 1, tl.sum(total, axis=0) / (n - 1))
            tl.debug_barrier()

        cut = tl.full([], -1, tl.int64)
        tied = tl.full([], 0, tl.int32)
        if SHADOW:
            stay = tl.minimum(n, budget)
        elif TARGETED:
            stay = tl.load(targets + step)
        else:
            stay = target(n, budget, part)
        over = n > stay
        acts = step > 0
        if not SHADOW:
            acts = over & (tl.load(evicts + step) != 0)
        if acts:
            if RESCUED:
                due = over & (rescued == 0) & (step > 0)
                guard_highest(due, peak, pos, guard, keys, n, rescue, n_sink, n_recent, position_bits, BLOCK, ONE_BLOCK)
                rescued = tl.where(due, 1, rescued)
            free = write_keys(m, pos, guard, keys, n, pool, n_sink, n_recent, RESCUED, BLOCK)
            excess = tl.minimum(n - stay, free)
            if excess > 0:
                cut = cut_of(keys, n, excess - 1, position_bits, BLOCK, ONE_BLOCK)
                tied = count_tied(keys, n, cut, BLOCK)
                if not SHADOW:
                    n = evict(m, pos, keys, n, cut, evicted_at, step, BLOCK)
        if ADMITTED:
            place = prompt + step - local
            if tl.load(admitted + place, mask=place >= 0, other=1) == 0:
                tl.store(evicted_at + place, step)
                n = let_go(m, pos, n, local, BLOCK)
        if step > 0:
            tl.store(ties + step - 1, tied)
            if SHADOW:
                now, common = mark(keys, n, cut, member, history + (wide + step - 1) * positions, BLOCK)
                tl.store(retained + step - 1, now)
                tl.store(both + step - 1, common)
            else:
                tl.store(retained + step - 1, n)
    tl.store(sizes + program * 3, n)
    tl.store(sizes + program * 3 + 1, updates)
    tl.store(sizes + program * 3 + 2, rescued)
