"""Output error: how far the attention output over the visible set is from the full one."""

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray, Plan

__all__ = ["output_error_of_step"]


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
        norm = float(np.linalg.norm(full))
        lost = float(np.linalg.norm(full - np.matmul(seen[:, None], v)))
        errors.append(lost / norm if norm > 0 else 0.0)
    return float(np.mean(errors))
