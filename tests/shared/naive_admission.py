"""Admission and selection in plain Python lists, by what a query may see: written apart from the engines."""

import math

from naive import f32


def replay(attention, prompt, budget, admitted, window, *, kv_heads, alpha=0.8, overflow=None):
    """Run an EMA per (layer, KV head); give {group: {position: step}} and V_t as {group: [lists]}.

    `admitted` lists a set of positions for each group; `overflow` is the share that a pooled trigger drops.
    """
    steps, layers, heads, _ = attention.shape
    share = heads // kv_heads
    groups = [(layer, kv) for layer in range(layers) for kv in range(kv_heads)]
    evicted = [{} for _ in groups]
    state = [{} for _ in groups]
    seen = {g: [] for g in range(len(groups))}
    for t in range(1, steps + 1):
        p = prompt + t - 1
        visible = [
            [i for i in range(p + 1) if i not in evicted[g] and (p - i < window or i in admitted[g])]
            for g in range(len(groups))
        ]
        for g, (layer, kv) in enumerate(groups):
            seen[g].append(visible[g])
            rows = [attention[t - 1, layer, h] for h in range(kv * share, (kv + 1) * share)]
            for i in visible[g]:
                score = sum(float(row[i]) / math.fsum(float(row[j]) for j in visible[g]) for row in rows) / share
                state[g][i] = alpha * state[g].get(i, 0.0) + (1 - alpha) * score
        left = [list(one) for one in visible]
        if overflow is None:
            drops = [max(0, len(one) - budget) for one in left]
            rounds = [drops]
        else:
            rounds = []
            sizes = [len(one) for one in left]
            while sum(sizes) > budget * len(groups):
                drops = [min(max(1, int(overflow * n)), max(0, n - window)) for n in sizes]
                sizes = [n - drop for n, drop in zip(sizes, drops, strict=True)]
                rounds.append(drops)
        for drops in rounds:
            for g, drop in enumerate(drops):
                free = sorted((i for i in left[g] if p - i >= window), key=lambda i: (f32(state[g][i]), i))
                for i in free[:drop]:
                    evicted[g][i] = t
                    left[g].remove(i)
    gone = {}
    for g in range(len(groups)):
        # Outside a window that ends at the last position before query t + 1: gone after step t.
        refused = {i: max(0, i + window - prompt) for i in range(prompt + steps) if i not in admitted[g]}
        gone[g] = evicted[g] | {i: t for i, t in refused.items() if t <= steps}
    return gone, seen


def quest(keys, queries, visible, tokens, window=0):
    """List what Quest reads of `visible`; `keys` [n][d] by position, `queries` [query heads][d]."""
    last = visible[-1]
    local = [i for i in visible if last - i < window]
    older = [i for i in visible if last - i >= window]
    pages = [older[start : start + 16] for start in range(0, len(older), 16)]
    room = (tokens - min(window, last + 1)) // 16

    def bound(page):
        best = -math.inf
        for q in queries:
            total = 0.0
            for d, weight in enumerate(q):
                column = [float(keys[i][d]) for i in page]
                total += max(float(weight) * min(column), float(weight) * max(column))
            best = max(best, total)
        return best

    forced = [] if window else pages[-1:]
    others = sorted((page for page in pages if page not in forced), key=lambda page: (-f32(bound(page)), -page[0]))
    chosen = forced + others[: max(0, room - len(forced))]
    return sorted([i for page in chosen for i in page] + local)


def topk(means, visible, tokens):
    """List the `tokens` of `visible` with the highest attention."""
    return sorted(sorted(visible, key=lambda i: (-f32(means[i]), -i))[:tokens])
