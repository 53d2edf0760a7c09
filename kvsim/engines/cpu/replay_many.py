"""Many policies in one pass: rows are read once, for the union of all survivors of a shared retained set."""

import numba
import numpy as np

from kvsim.engines.cpu.half import load, prefetch
from kvsim.engines.cpu.select import drop_lowest, lowest

__all__ = ["replay_shared"]

COMPACT_EVERY = 16
"""Steps between two looks for columns that no policy needs any more."""

GONE = np.float32(3e38)
"""Key of a position that a policy has evicted."""


@numba.njit(cache=True, nogil=True)
def _gather(data, base, stride, span, pos, n, x):
    """x[j, e]: the elements of the union's positions, padding included, in float32 and unscaled."""
    for j in range(n):
        start = base + pos[j] * stride
        for e in range(x.shape[1]):
            x[j, e] = load(data, start + e)


@numba.njit(cache=True, nogil=True)
def _row_length(n):
    """Give a row length of an odd number of cache lines, so that rows do not fall into one cache set."""
    return ((n + 7) // 8 | 1) * 8


@numba.njit(cache=True, nogil=True)
def _transpose(x, n, span, scale, xt):
    """xt[e, j] = x[j, e] * scale in float64, in blocks that stay in the first-level cache."""
    for first in range(0, n, 16):
        last = min(n, first + 16)
        for e in range(span):
            for j in range(first, last):
                xt[e, j] = np.float64(x[j, e]) * scale


@numba.njit(cache=True, nogil=True)
def _update_fast(m, alive, c, n, decay, keys):
    for j in range(n):
        m[j] = decay * m[j] + c[j] if alive[j] else GONE
        keys[j] = m[j]


@numba.njit(cache=True, nogil=True)
def _update_exact(m, alive, xt, n, depth, heads, inverse, a, b, reset, s, keys):
    """Run the recurrence layer after layer in float64, in the same order of operations as one policy alone."""
    if reset:
        m[:n] = 0
    if heads == 1 and inverse.size == 0:
        # Five layers a sweep, so that the state is loaded and stored a fifth as often.
        whole = depth - depth % 5
        for k in range(0, whole, 5):
            a0, a1, a2, a3, a4 = a[k], a[k + 1], a[k + 2], a[k + 3], a[k + 4]
            b0, b1, b2, b3, b4 = b[k], b[k + 1], b[k + 2], b[k + 3], b[k + 4]
            x0, x1, x2, x3, x4 = xt[k], xt[k + 1], xt[k + 2], xt[k + 3], xt[k + 4]
            for j in range(n):
                v = a1 * (a0 * m[j] + b0 * x0[j]) + b1 * x1[j]
                m[j] = a4 * (a3 * (a2 * v + b2 * x2[j]) + b3 * x3[j]) + b4 * x4[j]
        for k in range(whole, depth):
            for j in range(n):
                m[j] = a[k] * m[j] + b[k] * xt[k, j]
    else:
        for layer in range(depth):
            old, new = a[layer], b[layer]
            for j in range(n):
                s[j] = 0.0
            for h in range(heads):
                e = layer * heads + h
                factor = inverse[e]
                for j in range(n):
                    s[j] += xt[e, j] * factor
            for j in range(n):
                m[j] = old * m[j] + new * (s[j] / heads)
    for j in range(n):
        m[j] = m[j] if alive[j] else GONE
        keys[j] = m[j]


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def _row_sums(x, n, sums):
    for j in range(n):
        total = 0.0
        for e in range(x.shape[1]):
            total += x[j, e]
        sums[j] = total


@numba.njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def _masked_sum(values, alive, n):
    total = 0.0
    for j in range(n):
        total += values[j] if alive[j] else 0.0
    return total


@numba.njit(cache=True, nogil=True)
def replay_shared(
    data,
    bases,
    stride,
    width,
    scale,
    depth,
    heads,
    renormalise,
    exact,
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
    state,
    evicted_at,
    kept_mass,
    ties,
    retained,
    churn,
):
    """Replay P attention-scored policies with one shared retained set each; the last five arguments are the answer.

    `a` and `b` are [P, K], the same at every step; `scored` [P, T]; `evicts` [P, T + 1]; `m0` [P, L0]; `state` is work
    space [P, L0 + T], float64 for `exact` and float32 for the fast mode, which collapses the layers into one matrix
    product and so may order near-ties differently.
    """
    policies, steps = a.shape[0], bases.size
    total = prompt + steps
    span = depth * heads
    m = state
    alive = np.ones((policies, total), np.bool_)
    count = np.full(policies, prompt)
    pos = np.empty(total, np.int64)
    x = np.zeros((total, width), np.float32)
    xt = np.empty((span, _row_length(total) if exact else 0))
    member = np.empty((policies, total if renormalise and not exact else 0), np.float32)
    sums = np.empty(total)
    weights = np.zeros((policies, width), np.float32)
    inverse, s = np.empty(span if renormalise else 0), np.empty(total)
    keys, scratch = np.empty(total, np.float32), np.empty(total, np.float32)
    subset, own, drop = np.empty(total, np.int64), np.empty(total), np.zeros(total, np.bool_)
    tail, decay = np.ones((policies, depth)), np.ones(policies)
    for p in range(policies):
        for layer in range(depth - 2, -1, -1):
            tail[p, layer] = tail[p, layer + 1] * a[p, layer + 1]
        decay[p] = 0.0 if reset[p] else tail[p, 0] * a[p, 0]

    n = prompt
    for j in range(n):
        pos[j] = j
    for p in range(policies):
        m[p, :n] = m0[p]
        if evicts[p, 0] and n > budget[p]:
            own[:n] = m0[p]
            gone, _ = drop_lowest(own, pos, n, budget[p], n_sink[p], n_recent[p], keys, scratch, drop)
            count[p] -= gone
            for j in range(n):
                if drop[j]:
                    alive[p, j] = False
                    evicted_at[p, pos[j]] = 0

    for t in range(steps):
        if t % COMPACT_EVERY == 1:
            n = _drop_columns(pos, n, alive, m)
        pos[n] = prompt + t
        m[:, n] = 0
        alive[:, n] = True
        n += 1
        _gather(data, bases[t], stride, span, pos, n, x)
        if t + 1 < steps:
            for j in range(n):
                start = bases[t + 1] + pos[j] * stride
                for e in range(0, width, 32):
                    prefetch(data, start + e)
        if exact:
            _transpose(x, n, span, scale, xt)
        mass = np.empty((0, 0), np.float32)
        if renormalise and not exact:
            for p in range(policies):
                for j in range(n):
                    member[p, j] = np.float32(1.0) if alive[p, j] else np.float32(0.0)
            mass = np.dot(np.ascontiguousarray(member[:, :n]), x[:n])
            for p in range(policies):
                kept_mass[p, t] = mass[p, :span].sum() * scale / span
        else:
            _row_sums(x, n, sums)
            for p in range(policies):
                kept_mass[p, t] = _masked_sum(sums, alive[p], n) * scale / span
        products = np.empty((0, 0), np.float32)
        if not exact:
            for p in range(policies):
                for layer in range(depth):
                    weight = b[p, layer] * tail[p, layer] / heads
                    for h in range(heads):
                        e = layer * heads + h
                        if not renormalise:
                            weights[p, e] = weight * scale
                        else:
                            weights[p, e] = weight / mass[p, e] if mass[p, e] > 0 else 0.0
            products = np.dot(weights, x[:n].T)

        for p in range(policies):
            row = m[p]
            if scored[p, t]:
                if not exact:
                    _update_fast(row, alive[p], products[p], n, np.float32(decay[p]), keys)
                else:
                    for e in range(inverse.size):
                        inside = _masked_sum(xt[e], alive[p], n)
                        inverse[e] = 1.0 / inside if inside > 0 else 0.0
                    _update_exact(row, alive[p], xt, n, depth, heads, inverse, a[p], b[p], reset[p], s, keys)
            elif count[p] > 0:
                mean = 0.0
                for j in range(n - 1):
                    mean += row[j] if alive[p, j] else 0.0
                row[n - 1] = mean / count[p]
                for j in range(n):
                    keys[j] = row[j]

            ties[p, t] = 0
            before, gone, newest_stays = count[p], 0, True
            count[p] += 1
            excess = count[p] - budget[p]
            if evicts[p, t + 1] and excess > 0:
                if excess == 1 and n_sink[p] == 0 and n_recent[p] == 0:
                    j, equal = lowest(keys, n)
                    gone = 1
                    ties[p, t] = equal if equal > 1 else 0
                    newest_stays = j != n - 1
                    alive[p, j] = False
                    row[j] = GONE
                    evicted_at[p, pos[j]] = t + 1
                else:
                    k = 0
                    for j in range(n):
                        if alive[p, j]:
                            subset[k], own[k] = pos[j], row[j]
                            k += 1
                    gone, ties[p, t] = drop_lowest(
                        own, subset, k, budget[p], n_sink[p], n_recent[p], keys, scratch, drop
                    )
                    newest_stays = not drop[k - 1]
                    k = 0
                    for j in range(n):
                        if alive[p, j]:
                            if drop[k]:
                                alive[p, j] = False
                                row[j] = GONE
                                evicted_at[p, pos[j]] = t + 1
                            k += 1
                count[p] -= gone
            retained[p, t] = count[p]
            both = before - gone + (not newest_stays)
            churn[p, t] = 1.0 - both / (before + newest_stays)


@numba.njit(cache=True, nogil=True)
def _drop_columns(pos, n, alive, m):
    """Forget the positions that every policy has evicted; give the new length."""
    k = 0
    for j in range(n):
        if alive[:, j].any():
            if k < j:
                pos[k] = pos[j]
                alive[:, k] = alive[:, j]
                m[:, k] = m[:, j]
            k += 1
    return k
