"""One attention-scored policy, one group, in fast mode: a step's layers collapse into one dot product a survivor."""

import numba
import numpy as np

from kvsim.engines.cpu.half import LANES, accumulate, dot, prefetch
from kvsim.engines.cpu.replay_one import compact
from kvsim.engines.cpu.select import drop_lowest, lowest

__all__ = ["replay_fast"]


@numba.njit(cache=True, nogil=True)
def replay_fast(
    data,
    bases,
    stride,
    scale,
    depth,
    heads,
    renormalise,
    a,
    b,
    reset,
    scored,
    evicts,
    budget,
    n_sink,
    n_recent,
    prompt,
    m0,
    measure,
    evicted_at,
    kept_mass,
    ties,
    retained,
    churn,
):
    """Replay one group over all steps; the last five arguments are the answer.

    ``m' = decay * m + sum over l, h of w[l] / (heads * mass[l, h]) * a[l, h]`` in float32, where the mass is 1 unless
    rows are renormalised; near-ties may order differently from the layer-by-layer definition. Without `measure` the
    kept mass of a recording that needs no renormalisation is not computed. `a`, `b` are [T, K].
    """
    steps, span = bases.size, depth * heads
    total = prompt + steps
    width = -(-span // LANES) * LANES
    pos, m = np.empty(total, np.int64), np.zeros(total, np.float32)
    weights, mass = np.zeros(width, np.float32), np.zeros(width, np.float32)
    sums = np.zeros(4 * LANES, np.float32)
    keys, scratch = np.empty(total, np.float32), np.empty(total, np.float32)
    drop = np.zeros(total, np.bool_)
    n = prompt
    for j in range(n):
        pos[j] = j
        m[j] = m0[j]
    if evicts[0] and n > budget:
        drop_lowest(m, pos, n, budget, n_sink, n_recent, keys, scratch, drop)
        n = compact(m, pos, n, drop, evicted_at, 0)

    for t in range(steps):
        pos[n], m[n] = prompt + t, 0
        n += 1
        base = bases[t]
        ahead = bases[t + 1] if t + 1 < steps else base
        fused = scored[t] and width == LANES and not renormalise
        mass[:] = 0
        if renormalise or (measure and not fused):
            for j in range(n):
                start = base + pos[j] * stride
                for e in range(0, width, LANES):
                    accumulate(data, start + e, mass, e)
        if scored[t]:
            decay = 1.0
            for layer in range(depth - 1, -1, -1):
                weight = b[t, layer] * decay / heads
                decay *= a[t, layer]
                for h in range(heads):
                    e = layer * heads + h
                    if not renormalise:
                        weights[e] = weight * scale
                    else:
                        weights[e] = weight / mass[e] if mass[e] > 0 else 0.0
            old = np.float32(0.0 if reset else decay)
            if fused and measure:
                for j in range(n):
                    start = base + pos[j] * stride
                    prefetch(data, ahead + pos[j] * stride)
                    gain = dot(data, start, weights, 0)
                    # Four sums in turn: adding to the one just stored would wait for it.
                    accumulate(data, start, sums, (j & 3) * LANES)
                    m[j] = old * m[j] + gain
                for e in range(span):
                    mass[e] = sums[e] + sums[LANES + e] + sums[2 * LANES + e] + sums[3 * LANES + e]
                sums[:] = 0
            elif fused:
                for j in range(n):
                    prefetch(data, ahead + pos[j] * stride)
                    m[j] = old * m[j] + dot(data, base + pos[j] * stride, weights, 0)
            else:
                for j in range(n):
                    start = base + pos[j] * stride
                    gain = np.float32(0)
                    for e in range(0, width, LANES):
                        prefetch(data, ahead + pos[j] * stride + e)
                        gain += dot(data, start + e, weights, e)
                    m[j] = old * m[j] + gain
        else:
            mean = 0.0
            for j in range(n - 1):
                mean += m[j]
            m[n - 1] = mean / max(1, n - 1)
        kept_mass[t] = mass[:span].sum() * scale / span

        before, gone, newest_stays = n - 1, 0, True
        ties[t] = 0
        if evicts[t + 1] and n > budget:
            if n == budget + 1 and n_sink == 0 and n_recent == 0:
                first, equal = lowest(m, n)
                ties[t] = equal if equal > 1 else 0
                newest_stays = first != n - 1
                evicted_at[pos[first]] = t + 1
                for j in range(first, n - 1):
                    pos[j] = pos[j + 1]
                    m[j] = m[j + 1]
                gone, n = 1, n - 1
            else:
                gone, ties[t] = drop_lowest(m, pos, n, budget, n_sink, n_recent, keys, scratch, drop)
                newest_stays = not drop[n - 1]
                n = compact(m, pos, n, drop, evicted_at, t + 1)
        retained[t] = n
        churn[t] = 1.0 - (before - gone + (not newest_stays)) / (before + newest_stays)
