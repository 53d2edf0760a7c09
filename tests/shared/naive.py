"""Section 2 of the definitions in plain Python lists: slow, and written apart from the reference engine."""

import math
from fractions import Fraction

import numpy as np


def f32(x):
    return float(np.float32(x))


def coefficients(rule, alpha, over, depth):
    """(a, b) of each layer, and whether the state starts each scored step at zero."""
    if rule == "single":
        return [(0.0, 1.0)] * depth, False
    if rule == "cumulative":
        return [(1.0, 1.0)] * depth, False
    if over == "step":
        return [(alpha if layer == 0 else 1.0, (1 - alpha) / depth) for layer in range(depth)], False
    return [(alpha, 1 - alpha)] * depth, over == "layer"


def tokens_kept(ratio, prompt):
    return max(1, math.floor((1 - Fraction(str(ratio))) * prompt))


def replay(
    attention,
    prompt,
    budget,
    *,
    rule="ema",
    alpha=0.8,
    over="both",
    refresh=1,
    group="shared",
    kv_heads=None,
    sink=0,
    recent=0,
    shadow=False,
):
    """Return {group: {position: step after which it was gone}} and {group: [retained sets after each step]}."""
    steps, layers, heads, _ = attention.shape
    kv_heads = kv_heads or heads
    if group == "shared":
        members = {0: (range(layers), range(heads))}
    elif group == "layer":
        members = {layer: ([layer], range(heads)) for layer in range(layers)}
    else:
        share = heads // kv_heads
        members = {
            layer * kv_heads + kv: ([layer], range(kv * share, (kv + 1) * share))
            for layer in range(layers)
            for kv in range(kv_heads)
        }
    gone, sets = {}, {}
    for g, (own_layers, own_heads) in members.items():
        pairs, reset = coefficients(rule, alpha, over, len(own_layers))
        retained = list(range(prompt))
        state = dict.fromkeys(retained, 0.0)
        gone[g], sets[g] = {}, []
        for t in range(1, steps + 1):
            newest = prompt + t - 1
            visible = list(range(newest + 1)) if shadow else [*retained, newest]
            scored = t == 1 if refresh == "first" else (t - 1) % refresh == 0
            if scored:
                state[newest] = 0.0
                if reset:
                    state = dict.fromkeys(state, 0.0)
                for (a, b), layer in zip(pairs, own_layers, strict=True):
                    score = dict.fromkeys(visible, 0.0)
                    for h in own_heads:
                        row = attention[t - 1, layer, h]
                        mass = 1.0 if shadow else math.fsum(float(row[i]) for i in visible)
                        for i in visible:
                            score[i] += (float(row[i]) / mass if mass else 0.0) / len(own_heads)
                    for i in visible:
                        state[i] = a * state[i] + b * score[i]
            else:
                older = visible[:-1]
                state[newest] = math.fsum(state[i] for i in older) / len(older)
            guarded = {i for i in visible if i < sink or i > newest - recent}
            order = sorted(visible, key=lambda i: (i in guarded, f32(state[i]), i))
            retained = sorted(order[max(0, len(visible) - budget) :])
            if not shadow:
                for i in visible:
                    if i not in retained:
                        gone[g][i] = t
            sets[g].append(retained)
    return gone, sets
