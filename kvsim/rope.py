"""Rotary position embeddings, undone: from the post-RoPE queries and keys of a trace to those before it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.errors import PolicyError
from kvsim.plan import FloatArray

__all__ = ["Rope", "keys_before", "rope_of", "rope_of_config"]

MODEL_TYPES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)
"""Models that rotate every layer, dimension i with dimension i + r / 2, as the last thing done to a query."""

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """The rotation of one layer: dimension i turns with dimension i + r / 2 by ``position * frequencies[i]``.

    Attributes
    ----------
    frequencies : array of float32
        [r / 2] radians a position; dimensions from r on are not rotated.
    """

    frequencies: npt.NDArray[np.float32]

    def undo(self, vectors: FloatArray, positions: npt.ArrayLike) -> FloatArray:
        """Turn post-RoPE vectors back.

        Parameters
        ----------
        vectors : array
            [..., n, d] vectors.
        positions : array_like of int
            [n] their positions.

        Returns
        -------
        array
            [..., n, d] vectors before the rotation.
        """
        cos, sin = self._cos_sin(positions)
        return self._turn(vectors, cos, -sin)

    def mean_rotation(self, positions: npt.ArrayLike, head_dim: int) -> FloatArray:
        """Average the rotation matrix over `positions`, [d, d]: the mean of a rotated x is ``R @ x``."""
        cos, sin = self._cos_sin(positions)
        return self._turn(np.eye(head_dim), cos.mean(axis=0), sin.mean(axis=0)).T

    def _cos_sin(self, positions: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        # Models take this product in float32; at position 100,000 the exact one is off theirs by 0.004 radians.
        angles = np.asarray(positions, dtype=np.float32)[:, None] * self.frequencies
        angles = angles.astype(np.float64)
        return np.cos(angles), np.sin(angles)

    def _turn(self, vectors: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
        half = self.frequencies.size
        first, second = vectors[..., :half], vectors[..., half : 2 * half]
        turned = (first * cos - second * sin, second * cos + first * sin, vectors[..., 2 * half :])
        return np.concatenate(turned, axis=-1)


def keys_before(trace: Trace, layer: int) -> FloatArray:
    """Give a layer's keys as they were before the rotation: stored, or else turned back by the model config.

    Parameters
    ----------
    trace : Trace
        The recording, with keys.
    layer : int
        Index among the recorded layers.

    Returns
    -------
    array
        [Hk, L0+T, d].

    Raises
    ------
    PolicyError
        If the trace stores no ``keys_pre`` and `rope_of` refuses its model.
    CaptureError
        If the trace has no keys.
    """
    if trace.has("keys_pre"):
        return trace.keys_pre(layer).astype(np.float64)
    keys = trace.keys(layer).astype(np.float64)
    return rope_of(trace, layer).undo(keys, np.arange(keys.shape[1]))


def rope_of(trace: Trace, layer: int) -> Rope:
    """Read a layer's rotation from the model config that the trace holds.

    Parameters
    ----------
    trace : Trace
        The recording, with queries.
    layer : int
        Index among the recorded layers.

    Raises
    ------
    PolicyError
        If the trace has no model config, or the model rotates in a way that is not known here.
    """
    model, where = trace.manifest.model, str(trace.path)
    if model is None or not model["config"]:
        raise PolicyError(f"{where}: holds no model config (imports have none), so its RoPE parameters are unknown")
    if trace.head_dim is None:
        raise PolicyError(f"{where}: a {trace.capture!r} capture without the size of a head has no keys to rotate")
    return rope_of_config(model["config"], trace.manifest.layers[layer].type, trace.head_dim, where=where)


def rope_of_config(config: Mapping[str, Any], layer_type: str, head_dim: int, *, where: str = "model") -> Rope:
    """Read the rotation of a layer of some type from a model's config; `where` names it in errors.

    Raises
    ------
    PolicyError
        If the model rotates in a way that is not known here.
    """
    if config.get("model_type") not in MODEL_TYPES:
        raise PolicyError(
            f"{where}: how model type {config.get('model_type')!r} rotates its queries is not known "
            f"(known: {', '.join(MODEL_TYPES)})"
        )
    try:
        parameters = _parameters(config, layer_type)
        kind = parameters["rope_type"]
        if kind in ROPE_TYPES:
            return Rope(_frequencies(kind, parameters, head_dim))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise PolicyError(f"{where}: the model config's RoPE parameters are incomplete or wrong ({error!r})") from None
    raise PolicyError(f"{where}: RoPE of type {kind!r} is not known (valid: {', '.join(ROPE_TYPES)})")


def _parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Give one layer's parameters under the names of transformers 5, whatever wrote the config."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found = dict(found.get(layer_type, found))
    found.setdefault("rope_type", found.get("type", "default"))
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in config:
            found.setdefault(key, config[key])
    found.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return found


def _frequencies(kind: str, parameters: Mapping[str, Any], head_dim: int) -> npt.NDArray[np.float32]:
    rotated = int(head_dim * float(parameters.get("partial_rotary_factor", 1)))
    frequencies = _positive(parameters["rope_theta"]) ** (-np.arange(0, rotated, 2) / rotated)
    if kind != "default":
        slow = frequencies / _positive(parameters["factor"])
        kept: FloatArray | float = 0.0
        if kind == "llama3":
            # Slow turns are stretched by `factor`, fast ones left alone, those between interpolated by wavelength.
            low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
            turns = float(parameters["original_max_position_embeddings"]) * frequencies / (2 * math.pi)
            kept = np.clip((turns - low) / _positive(high - low), 0, 1)
        frequencies = (1 - kept) * slow + kept * frequencies
    found: npt.NDArray[np.float32] = frequencies.astype(np.float32)
    return found


def _positive(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{value} must be above 0")
    return float(value)
