"""Random write gates for tiny models."""

import numpy as np

from kvsim.write_gate import WriteGate, save_gate


def random_gate(path, layers, kv_heads, dim, *, hidden=8, window=4, tau=0.5, seed=3):
    """Write a gate whose scores are spread over (0, 1); give its path."""
    rng = np.random.default_rng(seed)
    heads = (len(layers), kv_heads)

    def draw(*shape, scale):
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    gate = WriteGate(
        w1=draw(*heads, hidden, 2 * dim, scale=0.5),
        b1=draw(*heads, hidden, scale=0.5),
        w2=draw(*heads, hidden, scale=1.0),
        b2=draw(*heads, scale=0.3),
        layers=tuple(layers),
        num_kv_heads=kv_heads,
        head_dim=dim,
        window=window,
        tau=tau,
        penalty=0.08,
        model="tiny",
    )
    save_gate(gate, path, replace=True)
    return str(path)


def gate_for(prefix, path, **options):
    """Write a gate for the eligible layers of a prompt's model."""
    layers = [prefix.layers[place].index for place in prefix.eligible]
    kv_heads, _, dim = prefix.layers[0].keys.shape
    return random_gate(path, layers, kv_heads, dim, **options)
