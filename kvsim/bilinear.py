"""The learned bilinear scorer of InertiaKV section 5.1: two matrices, and the file that holds them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces.files import os_reason, write_whole

from kvsim.errors import KvsimError, PolicyError
from kvsim.plan import FloatArray

__all__ = ["RANK", "BilinearScorer", "load_scorer", "save_scorer"]

RANK = 64
"""Dimensions that queries and keys are projected to."""

_KIND = "kvsim bilinear scorer"
_VERSION = 1


@dataclass(frozen=True)
class BilinearScorer:
    """``score(q, k) = (w_k k) . (w_q q) / sqrt(r)``, one pair of matrices for all layers.

    q is a layer's query heads one after the other, k its KV heads, both after the rotary embedding. With r = 64 and
    the shapes of Llama-3.1-8B it has 327,680 parameters.

    Attributes
    ----------
    w_q : array
        [r, H * d].
    w_k : array
        [r, Hk * d].
    num_heads, num_kv_heads, head_dim : int
        H, Hk and d of the model it is for.
    training : dict
        How it was made, as JSON data.
    """

    w_q: FloatArray
    w_k: FloatArray
    num_heads: int
    num_kv_heads: int
    head_dim: int
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Dimensions r that queries and keys are projected to."""
        return int(self.w_q.shape[0])

    @property
    def num_parameters(self) -> int:
        """Numbers in both matrices."""
        return int(self.w_q.size + self.w_k.size)

    def queries(self, q: FloatArray) -> FloatArray:
        """Project queries [..., H, d] to [..., r], the factor 1 / sqrt(r) included."""
        projected: FloatArray = q.reshape(*q.shape[:-2], -1) @ self.w_q.T
        projected /= np.sqrt(self.rank)
        return projected

    def keys(self, k: FloatArray) -> FloatArray:
        """Project a layer's keys [Hk, n, d] to [n, r]."""
        projected: FloatArray = k.transpose(1, 0, 2).reshape(k.shape[1], -1) @ self.w_k.T
        return projected


def save_scorer(scorer: BilinearScorer, path: str | Path) -> None:
    """Write a scorer as safetensors: float32 ``w_q`` and ``w_k``, and what it is as JSON under the metadata ``kvsim``.

    Raises
    ------
    KvsimError
        If the file exists or cannot be written.
    """
    from safetensors.numpy import save

    path = Path(path)
    if path.exists():
        raise KvsimError(f"{path}: exists already; name a new file")
    facts = {
        "kind": _KIND,
        "version": _VERSION,
        "num_heads": scorer.num_heads,
        "num_kv_heads": scorer.num_kv_heads,
        "head_dim": scorer.head_dim,
        "training": scorer.training,
    }
    tensors = {"w_q": scorer.w_q.astype(np.float32), "w_k": scorer.w_k.astype(np.float32)}
    data = save(tensors, metadata={"kvsim": json.dumps(facts, sort_keys=True)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])
    except OSError as error:
        raise KvsimError(f"{path}: cannot write the scorer ({os_reason(error)})") from error


def load_scorer(path: str | Path) -> BilinearScorer:
    """Read a scorer that `save_scorer` wrote.

    Raises
    ------
    PolicyError
        If the file is missing, damaged or something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: np.asarray(file.get_tensor(name), dtype=np.float64) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, TypeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise PolicyError(f"{path}: {reason}; a scorer is a safetensors file from 'kvsim train-scorer'") from None
    try:
        facts = json.loads(metadata["kvsim"])
        if facts["kind"] != _KIND or facts["version"] != _VERSION:
            found = f"{facts['kind']} of version {facts['version']}"
            raise PolicyError(f"{path}: is a {found}, not a {_KIND} of version {_VERSION}")
        scorer = BilinearScorer(
            w_q=tensors["w_q"],
            w_k=tensors["w_k"],
            num_heads=facts["num_heads"],
            num_kv_heads=facts["num_kv_heads"],
            head_dim=facts["head_dim"],
            training=facts["training"],
        )
        shapes = [(scorer.rank, heads * scorer.head_dim) for heads in (scorer.num_heads, scorer.num_kv_heads)]
    except (KeyError, TypeError, IndexError, json.JSONDecodeError):
        raise PolicyError(f"{path}: is not a scorer from 'kvsim train-scorer'") from None
    held = [scorer.w_q.shape, scorer.w_k.shape]
    if held != shapes or not scorer.rank:
        raise PolicyError(f"{path}: w_q and w_k have shapes {held}, its dimensions say {shapes}")
    if not (np.isfinite(scorer.w_q).all() and np.isfinite(scorer.w_k).all()):
        raise PolicyError(f"{path}: holds numbers that are not finite")
    return scorer
