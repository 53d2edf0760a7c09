"""One policy, one retention group: survivors only, in the layer order of the definition (float64 state)."""

import numba
import numpy as np

from kvsim.engines.cpu.half import load, prefetch
from kvsim.engines.cpu.redundancy import forget, include, recompute, redundancy
from kvsim.engines.cpu.select import drop_lowest

__all__ = ["ATTENTION", "BILINEAR", "COSINE", "STATIC", "compact", "replay_group"]

ATTENTION, STATIC, COSINE, BILINEAR = 0, 1, 2, 3
"""Kinds of score source, as the kernel knows them."""


@numba.njit(cache=True, nogil=True)
def _mass(data, base, stride, scale, span, pos, n, member, mass):
    """Sum each element of the group's rows over the members among pos[:n]."""
    mass[:span] = 0
    for j in range(n):
        if member[j]:
            start = base + pos[j] * stride
            for e in range(span):
                mass[e] += load(data, start + e)
    for e in range(span):
        mass[e] *= scale


@numba.njit(cache=True, nogil=True)
def _attention(data, base, stride, scale, depth, heads, pos, n, inverse, weight, highest, s):
    """Set s[l, j] to the mean or maximum over heads of row times inverse[l, h] (and weight)."""
    weighted = weight.size > 0
    if heads == 1 and not weighted:
        for j in range(n):
            start = base + pos[j] * stride
            for layer in range(depth):
                s[layer, j] = np.float64(load(data, start + layer)) * scale * inverse[layer]
        return
    for j in range(n):
        start = base + pos[j] * stride
        for layer in range(depth):
            total = 0.0
            for h in range(heads):
                x = np.float64(load(data, start + layer * heads + h)) * scale * inverse[layer * heads + h]
                if weighted:
                    x *= weight[layer, h, pos[j]]
                total = max(total, x) if highest else total + x
            s[layer, j] = total if highest else total / heads


@numba.njit(cache=True, nogil=True)
def _weight_means(weight, depth, heads, pos, n, inverse):
    """Divide each head's factor by the mean of its weights over the visible positions."""
    for layer in range(depth):
        for h in range(heads):
            mean = 0.0
            for j in range(n):
                mean += weight[layer, h, pos[j]]
            mean /= n
            inverse[layer * heads + h] = inverse[layer * heads + h] / mean if mean > 0 else 0.0


@numba.njit(cache=True, nogil=True)
def _cosine(units, depth, kv_heads, pos, n, highest, s):
    """Set s[l, j] to minus the cosine of a unit key and the mean visible one, over KV heads."""
    dim = units.shape[3]
    anchor = np.empty(dim)
    for layer in range(depth):
        for j in range(n):
            s[layer, j] = -np.inf if highest else 0.0
        for kv in range(kv_heads):
            anchor[:] = 0
            for j in range(n):
                for d in range(dim):
                    anchor[d] += units[layer, kv, pos[j], d]
            norm = 0.0
            for d in range(dim):
                anchor[d] /= n
                norm += anchor[d] * anchor[d]
            norm = np.sqrt(norm)
            for j in range(n):
                product = 0.0
                for d in range(dim):
                    product += units[layer, kv, pos[j], d] * anchor[d]
                cosine = np.float64(np.float32(product / norm)) if norm > 0 else 0.0
                if highest:
                    s[layer, j] = max(s[layer, j], -cosine)
                else:
                    s[layer, j] -= cosine / kv_heads


@numba.njit(cache=True, nogil=True)
def _bilinear(keys, queries, depth, kv_heads, pos, n, highest, s):
    """Set s[l, j] to the product of the step's query and a key, over KV heads."""
    for layer in range(depth):
        for j in range(n):
            s[layer, j] = -np.inf if highest else 0.0
            for kv in range(kv_heads):
                product = 0.0
                for d in range(keys.shape[3]):
                    product += keys[layer, kv, pos[j], d] * queries[layer, kv, d]
                if highest:
                    s[layer, j] = max(s[layer, j], product)
                else:
                    s[layer, j] += product / kv_heads


@numba.njit(cache=True, nogil=True)
def _finish(s, depth, n, entropy, pivotal, signed):
    """Apply entropy weights, mark pivotal positions and shift scores that may be negative, layer by layer."""
    for layer in range(depth):
        if entropy and n > 1:
            mass = 0.0
            for j in range(n):
                mass += s[layer, j]
            if mass > 0:
                h = 0.0
                for j in range(n):
                    p = s[layer, j] / mass
                    if p > 0:
                        h -= p * np.log(p)
                h /= np.log(n)
                for j in range(n):
                    s[layer, j] *= h
        if pivotal:
            mean = 0.0
            for j in range(n):
                mean += s[layer, j]
            mean *= (1 + 1e-9) / n
            for j in range(n):
                s[layer, j] = s[layer, j] > mean
        if signed:
            low = s[layer, 0]
            for j in range(n):
                low = min(low, s[layer, j])
            for j in range(n):
                s[layer, j] -= low


@numba.njit(cache=True, nogil=True)
def _slide(ring, slot, s, depth, pos, n, m):
    """Put a step's scores in the place of the oldest ones and sum up the window."""
    for j in range(n):
        total = 0.0
        for layer in range(depth):
            total += s[layer, j]
        ring[slot, pos[j]] = total
        total = 0.0
        for w in range(ring.shape[0]):
            total += ring[w, pos[j]]
        m[j] = total


@numba.njit(cache=True, nogil=True)
def _pooled(m, n, size, rank):
    """Give the maximum of the state over `size` neighbours, in `rank`; the state itself if there is no pooling."""
    if size == 1:
        return m
    half = size // 2
    for j in range(n):
        high = m[j]
        for k in range(max(0, j - half), min(n, j + half + 1)):
            high = max(high, m[k])
        rank[j] = high
    return rank


@numba.njit(cache=True, nogil=True)
def _rescue(peak, count, pos, n, n_sink, n_recent, keys, scratch, drop, rank, guarded):
    """Guard the `count` unprotected positions of the highest peaks."""
    protected = 0
    for j in range(n):
        rank[j] = peak[pos[j]]
        guarded[pos[j]] = not (pos[j] < n_sink or pos[j] > pos[n - 1] - n_recent)
        protected += not guarded[pos[j]]
    drop_lowest(rank, pos, n, protected + count, n_sink, n_recent, keys, scratch, drop)
    for j in range(n):
        if drop[j]:
            guarded[pos[j]] = False


@numba.njit(cache=True, nogil=True)
def _held(pos, n, n_sink, n_recent, guarded):
    """Count the positions that no eviction takes: guarded or protected ones."""
    held = 0
    for j in range(n):
        held += guarded[pos[j]] or pos[j] < n_sink or pos[j] > pos[n - 1] - n_recent
    return held


@numba.njit(cache=True, nogil=True)
def _ranked(m, pos, n, pool, n_sink, n_recent, mix, sums, guarded, rank, repeated):
    """Give what eviction compares: the state, pooled, less redundancy, guarded positions above all."""
    pooled = _pooled(m, n, pool, rank)
    mixed, guards = sums.size > 0, guarded.size > 0
    if not mixed and not guards:
        return pooled
    total = 0.0
    if mixed:
        for j in range(n):
            if pos[j] >= n_sink and pos[j] <= pos[n - 1] - n_recent:
                total += m[j]
        redundancy(sums, pos, n, repeated)
    for j in range(n):
        rank[j] = pooled[j]
        if mixed:
            importance = pooled[j] / total if total > 0 else pooled[j]
            rank[j] = mix * importance - (1 - mix) * repeated[j]
        if guards and guarded[pos[j]]:
            rank[j] = np.inf
    return rank


@numba.njit(cache=True, nogil=True)
def _target(n, budget, batch, targets, t):
    """Give how many of n positions stay after step t; see `kvsim.plan.Plan.target`."""
    if targets.size > 0:
        return targets[t]
    if batch == 0:
        return min(budget, n)
    while n > budget:
        n -= max(1, int(batch * n + 1e-9))
    return n


@numba.njit(cache=True, nogil=True)
def _dropped(pos, n, drop, lost):
    """List the dropped positions."""
    k = 0
    for j in range(n):
        if drop[j]:
            lost[k] = pos[j]
            k += 1


@numba.njit(cache=True, nogil=True)
def compact(m, pos, n, drop, evicted_at, step):
    """Close the gaps that the dropped positions leave; give the new length."""
    k = 0
    for j in range(n):
        if drop[j]:
            evicted_at[pos[j]] = step
        else:
            pos[k] = pos[j]
            m[k] = m[j]
            k += 1
    return k


@numba.njit(cache=True, nogil=True)
def _refused(place, admitted):
    """Whether the position that leaves the local window is let go; the window's are all there, in the last places."""
    return place >= 0 and not admitted[place]


@numba.njit(cache=True, nogil=True)
def _let_go(m, pos, n, j, evicted_at, step):
    """Take out the j-th of n positions; give the new length."""
    evicted_at[pos[j]] = step
    for k in range(j, n - 1):
        pos[k] = pos[k + 1]
        m[k] = m[k + 1]
    return n - 1


@numba.njit(cache=True, nogil=True)
def replay_group(
    data,
    bases,
    stride,
    scale,
    depth,
    heads,
    kind,
    renormalise,
    weight,
    static,
    vectors,
    queries,
    highest,
    entropy,
    pivotal,
    signed,
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
    window,
    ring,
    pool,
    batch,
    targets,
    local,
    admitted,
    rescue,
    units,
    mix,
    threshold,
    shadow,
    evicted_at,
    history,
    kept_mass,
    ties,
    retained,
    churn,
):
    """Replay one group over all steps; the last six arguments are the answer.

    Rows of step t start at ``bases[t]`` of `data`, position i's ``depth * heads`` elements at ``i * stride`` from
    there. `weight` is [K, heads, L], `static` [K, L], `vectors` [K, kv heads, L, d] (unit keys for the cosine),
    `queries` [T, K, kv heads, d], `ring` [window, L] is overwritten, `targets` is [T + 1], `local` the size of the
    local window (0 for none), `admitted` [L], `units` [K * kv heads, L, d] are the unit keys of the redundancy; those
    not needed are empty. In shadow mode all positions are ranked, `history` [T, L] receives the sets, and
    `evicted_at` stays untouched.
    """
    steps = bases.size
    total = prompt + steps
    span = depth * heads
    pos = np.empty(total, np.int64)
    m = np.zeros(total)
    member = np.ones(total, np.bool_)
    keys, scratch = np.empty(total, np.float32), np.empty(total, np.float32)
    drop, rank = np.zeros(total, np.bool_), np.empty(total)
    # Rows of an odd number of cache lines, so that they do not all fall into one cache set.
    s = np.empty((depth, ((total + 7) // 8 | 1) * 8))
    mass, inverse = np.empty(span), np.empty(span)
    redundant = (units.shape[0], total if units.size else 0)
    sums, last, spared = np.empty(redundant), np.empty(redundant, np.int64), np.empty(redundant)
    repeated, lost, included = np.empty(redundant[1]), np.empty(redundant[1], np.int64), 0
    peak, guarded = np.zeros(total if rescue else 0), np.zeros(total if rescue else 0, np.bool_)
    rescued = rescue == 0
    n = 0
    for j in range(prompt):
        if local > 0 and j < prompt - local and not admitted[j]:
            evicted_at[j] = 0
        else:
            pos[n] = j
            m[n] = m0[j]
            n += 1

    stay = _target(n, budget, batch, targets, 0)
    if evicts[0] and n > stay and not shadow:
        if units.size:
            recompute(units, threshold, pos, n, sums, last, spared)
        ranked = _ranked(m, pos, n, pool, n_sink, n_recent, mix, sums, guarded, rank, repeated)
        drop_lowest(ranked, pos, n, stay, n_sink, n_recent, keys, scratch, drop)
        n = compact(m, pos, n, drop, evicted_at, 0)
    if local > 0 and _refused(prompt - local, admitted):
        n = _let_go(m, pos, n, n - local, evicted_at, 0)

    size, updates = n, 0
    for t in range(steps):
        pos[n] = prompt + t
        m[n] = 0
        member[n] = True
        n += 1
        base = bases[t]
        _mass(data, base, stride, scale, span, pos, n, member, mass)
        visible = 0.0
        for e in range(span):
            visible += mass[e]
        kept_mass[t] = visible / span

        if scored[t]:
            if kind == ATTENTION:
                for e in range(span):
                    inverse[e] = (1.0 / mass[e] if mass[e] > 0 else 0.0) if renormalise else 1.0
                if weight.size > 0:
                    _weight_means(weight, depth, heads, pos, n, inverse)
                _attention(data, base, stride, scale, depth, heads, pos, n, inverse, weight, highest, s)
            elif kind == STATIC:
                for layer in range(depth):
                    for j in range(n):
                        s[layer, j] = static[layer, pos[j]]
            elif kind == COSINE:
                _cosine(vectors, depth, vectors.shape[1], pos, n, highest, s)
            else:
                _bilinear(vectors, queries[t], depth, vectors.shape[1], pos, n, highest, s)
            if entropy or pivotal or signed:
                _finish(s, depth, n, entropy, pivotal, signed)
            if not rescued:
                for j in range(n):
                    peak[pos[j]] = s[0, j]
                    for layer in range(1, depth):
                        peak[pos[j]] = max(peak[pos[j]], s[layer, j])
            if window > 0:
                _slide(ring, updates % window, s, depth, pos, n, m)
            else:
                if reset:
                    m[:n] = 0
                for layer in range(depth):
                    old, new = a[t, layer], b[t, layer]
                    for j in range(n):
                        m[j] = old * m[j] + new * s[layer, j]
            updates += 1
        elif n > 1:
            mean = 0.0
            for j in range(n - 1):
                mean += m[j]
            m[n - 1] = mean / (n - 1)

        if t + 1 < steps and not shadow:
            for j in range(n):
                prefetch(data, bases[t + 1] + pos[j] * stride)

        ties[t] = 0
        stay = budget if shadow else _target(n, budget, batch, targets, t + 1)
        ranks = shadow or (evicts[t + 1] and n > stay)
        if ranks and not rescued and n > stay:
            _rescue(peak, rescue, pos, n, n_sink, n_recent, keys, scratch, drop, rank, guarded)
            rescued = True
        if ranks and guarded.size > 0:
            stay = max(stay, _held(pos, n, n_sink, n_recent, guarded))
        ranked = m
        if ranks:
            for j in range(included if units.size else n, n):
                include(units, threshold, pos, j, pos[j], sums, last, spared)
            included = n
            ranked = _ranked(m, pos, n, pool, n_sink, n_recent, mix, sums, guarded, rank, repeated)
        if shadow:
            _, ties[t] = drop_lowest(ranked, pos, n, budget, n_sink, n_recent, keys, scratch, drop)
            both, now = 0, 0
            for j in range(n):
                stays = not drop[j]
                both += stays and member[j] and j < n - 1
                now += stays
                member[j] = stays
                history[t, j] = stays
            churn[t] = 1.0 - both / (size + now - both)
            size = now
        else:
            before, gone, newest_gone = n - 1, 0, False
            if ranks:
                gone, ties[t] = drop_lowest(ranked, pos, n, stay, n_sink, n_recent, keys, scratch, drop)
                newest_gone = drop[n - 1]
                if units.size:
                    _dropped(pos, n, drop, lost)
                n = compact(m, pos, n, drop, evicted_at, t + 1)
                if units.size:
                    forget(units, threshold, pos, n, lost[:gone], sums, last, spared)
                included = n
            if local > 0 and _refused(prompt + t + 1 - local, admitted):
                lost[:1] = prompt + t + 1 - local
                known = included > n - local
                n = _let_go(m, pos, n, n - local, evicted_at, t + 1)
                if known and units.size:
                    included -= 1
                    forget(units, threshold, pos, included, lost[:1], sums, last, spared)
                gone, newest_gone = gone + 1, local == 1
            both = before - gone + newest_gone
            either = before + (not newest_gone)
            churn[t] = 1.0 - both / either if either > 0 else 0.0
            size = n
        retained[t] = size
