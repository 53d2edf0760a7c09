"""Output error: how far the attention output over the visible set is from the full one."""

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.plan import FloatArray, Plan

__all__ = ["output_error", "output_error_of_step"]


def output_error_of_step(rows: FloatArray, values: FloatArray, visible: npt.NDArray[np.bool_], plan: Plan) -> float:
    """``||o_full - o_V|| / ||o_full||`` of each layer's concatenated heads, averaged over layers.

    Parameters
    ----------
    rows : array
        [K, H, n] attention of the full cache.
    values : array
        [K, Hk, n, d].
    visible : array of bool
        [G, n]; attention is renormalised over it.
    plan : Plan
        Whose groups they are.
    """
    errors = []
    for layer, (a, v) in enumerate(zip(rows, values, strict=True)):
        share = a.shape[0] // v.shape[0]
        mask = np.repeat(visible[plan.groups.of_layer(layer)], share, axis=0)
        seen = np.where(mask, a, 0)
        mass = seen.sum(axis=-1, keepdims=True)
        seen = np.divide(seen, mass, out=np.zeros_like(seen), where=mass > 0)
        v = np.repeat(v, share, axis=0)
        full = np.matmul(a[:, None], v)
        errors.append(np.linalg.norm(full - np.matmul(seen[:, None], v)) / np.linalg.norm(full))
    return float(np.mean(errors))


def output_error(
    trace: Trace,
    plan: Plan,
    evicted_at: npt.NDArray[np.int32] | None,
    history: npt.NDArray[np.bool_] | None,
) -> npt.NDArray[np.float64]:
    """Compute the output error of every step of a finished replay, [T].

    Parameters
    ----------
    trace : Trace
        A recording with values and attention of single heads.
    plan : Plan
        What was replayed.
    evicted_at : array or None
        [G, L0+T] of an irreversible replay.
    history : array or None
        [T, G, L0+T] of a shadow replay, otherwise None.
    """
    layers = list(plan.groups.layers)
    values = np.stack([trace.values(layer) for layer in layers]).astype(np.float64)
    errors = np.empty(trace.num_steps)
    for t in range(1, trace.num_steps + 1):
        n = trace.prompt_length + t
        visible = np.ones((plan.groups.count, n), np.bool_)
        if evicted_at is not None:
            visible = (evicted_at[:, :n] < 0) | (evicted_at[:, :n] >= t)
        elif history is not None and t > 1:
            visible[:, : n - 1] = history[t - 2, :, : n - 1]
        rows = trace.attention_rows(t, layers).astype(np.float64)
        errors[t - 1] = output_error_of_step(rows, values[:, :, :n], visible, plan)
    return errors
