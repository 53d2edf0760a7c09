"""Output error of several replays at once: the full output of a step is the same for all of them."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.cpu.half import load
from kvsim.engines.cpu.rows import TokenRows
from kvsim.plan import Groups

__all__ = ["output_errors"]

_STEPS = 16
"""Of a thread at a time."""


def output_errors(
    trace: Trace,
    rows: TokenRows,
    groups: Groups,
    evicted_at: npt.NDArray[np.int32],
    history: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.float64]:
    """Compute the output error of every step, on all cores; `kvsim.engines.output.output_error_of_step` defines it.

    Parameters
    ----------
    trace : Trace
        A recording with values and attention of single heads.
    rows : TokenRows
        Its rows.
    groups : Groups
        The retention groups of all replays.
    evicted_at : array
        [P, G, L0+T] of P replays.
    history : array or None
        [G, T, L0+T], the sets of a single shadow replay.

    Returns
    -------
    array
        [P, T].
    """
    layers = groups.layers
    values = np.stack([trace.values(layer) for layer in layers])
    group_of = np.array([groups.of_layer(layer) for layer in range(len(layers))])
    errors = np.zeros((len(evicted_at), trace.num_steps))
    sets = np.zeros((0, 0, 0), np.bool_) if history is None else history
    recording = rows.data, rows.bases, rows.stride, rows.scale, rows.heads

    def some(first: int) -> None:
        last = min(first + _STEPS, trace.num_steps)
        _errors(*recording, values, group_of, trace.prompt_length, evicted_at, sets, first, last, errors)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(some, range(0, trace.num_steps, _STEPS)))
    return errors


@numba.njit(cache=True, nogil=True)
def _errors(
    data: npt.NDArray[Any],
    bases: npt.NDArray[np.int64],
    stride: int,
    scale: float,
    heads: int,
    values: npt.NDArray[np.float32],
    group_of: npt.NDArray[np.int64],
    prompt: int,
    evicted_at: npt.NDArray[np.int32],
    sets: npt.NDArray[np.bool_],
    first_step: int,
    last_step: int,
    errors: npt.NDArray[np.float64],
) -> None:
    replays, num_groups, positions = evicted_at.shape
    layers, kv_heads, _, dim = values.shape
    visible = np.empty((replays, num_groups, positions), np.int32)
    counts = np.empty((replays, num_groups), np.int64)
    full, seen, lost = np.empty(dim), np.empty(dim), np.empty(replays)
    for t in range(first_step, last_step):
        n = prompt + t + 1
        for p in range(replays):
            for g in range(num_groups):
                count = 0
                for i in range(n):
                    if sets.size:
                        stays = t == 0 or i == n - 1 or sets[g, t - 1, i]
                    else:
                        stays = evicted_at[p, g, i] < 0 or evicted_at[p, g, i] > t
                    visible[p, g, count] = i
                    count += stays
                counts[p, g] = count
        for layer in range(layers):
            whole = 0.0
            lost[:] = 0.0
            for h in range(heads):
                kv = h // (heads // kv_heads)
                g = group_of[layer, kv]
                v = values[layer, kv]
                first = bases[t] + layer * heads + h
                full[:] = 0.0
                for i in range(n):
                    weight = np.float64(load(data, first + i * stride)) * scale
                    for k in range(dim):
                        full[k] += weight * v[i, k]
                for k in range(dim):
                    whole += full[k] * full[k]
                for p in range(replays):
                    seen[:] = 0.0
                    mass = 0.0
                    for j in range(counts[p, g]):
                        i = visible[p, g, j]
                        weight = np.float64(load(data, first + i * stride)) * scale
                        mass += weight
                        for k in range(dim):
                            seen[k] += weight * v[i, k]
                    share = 1.0 / mass if mass > 0.0 else 0.0
                    for k in range(dim):
                        lost[p] += (full[k] - seen[k] * share) ** 2
            for p in range(replays):
                errors[p, t] += np.sqrt(lost[p] / whole) / layers if whole > 0.0 else 0.0
