"""The write gate of WG-KV section 3.2: what a key's future utility is predicted with, and the file that holds it."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError, PolicyError
from kvsim.inputs import regular_size
from kvsim.plan import FloatArray
from kvsim.version import __version__

__all__ = ["RMS_EPS", "WriteGate", "load_gate", "save_gate"]

RMS_EPS = 1e-6
"""Added to the mean square of a key where its root is divided by."""

_Array = npt.NDArray[Any]

_KIND = "kvsim write gate"
_FORMAT = "1"
_NAMES = ("w1", "b1", "w2", "b2")
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_BYTES = 2**30
_MOST = 10**18
_CHUNK = 4096


@dataclass(frozen=True)
class WriteGate:
    """One two-layer network per eligible layer and KV head, ``g = sigmoid(w2 . GELU(w1 x + b1) + b2)``.

    x is ``[RMSNorm(k); RMSNorm(k rotated)]``, the key before and after the rotary embedding, each divided by the root
    of its mean square plus `rms_eps`, without a learned scale; GELU is the exact one (erf). WG-KV section 3.2.

    Attributes
    ----------
    w1 : array of float32
        [K, Hk, h, 2d]: K eligible layers, Hk KV heads, h hidden units, keys of dimension d.
    b1, w2 : array of float32
        [K, Hk, h].
    b2 : array of float32
        [K, Hk].
    layers : tuple of int
        The model's indices of the K layers, ascending.
    num_kv_heads, head_dim : int
        Hk and d of the model it is for.
    window : int
        Tokens W of the local window that it was trained with.
    tau : float
        The threshold that it is meant for: a token is admitted if g >= tau.
    penalty : float
        The weight lambda of sparsity in training.
    model : str
        The model's name.
    config_hash : str
        Sha256 of the model's config, as in a recording's manifest.
    rms_eps : float
    training : dict
        How it was made, as JSON data.
    version : str
        The kvsim that made it.
    """

    w1: npt.NDArray[np.float32]
    b1: npt.NDArray[np.float32]
    w2: npt.NDArray[np.float32]
    b2: npt.NDArray[np.float32]
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int
    tau: float
    penalty: float
    model: str
    config_hash: str = ""
    rms_eps: float = RMS_EPS
    training: dict[str, Any] = field(default_factory=dict)
    version: str = __version__

    @property
    def hidden(self) -> int:
        """Hidden units h of a head's network."""
        return int(self.w1.shape[2])

    @property
    def num_parameters(self) -> int:
        """Numbers in all networks."""
        return sum(int(getattr(self, name).size) for name in _NAMES)

    @property
    def hash(self) -> str:
        """Sha256 of what scores depend on: the numbers as float32, the layers and `rms_eps`."""
        digest = hashlib.sha256(json.dumps([list(self.layers), self.rms_eps]).encode())
        for name in _NAMES:
            array = np.ascontiguousarray(getattr(self, name), dtype="<f4")
            digest.update(f"{name}{list(array.shape)}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def score(self, keys_pre: _Array, keys_post: _Array) -> npt.NDArray[np.float32]:
        """Predict the utility of keys.

        Parameters
        ----------
        keys_pre, keys_post : array
            [K, Hk, n, d] keys of the gate's layers before and after the rotary embedding.

        Returns
        -------
        array of float32
            [K, Hk, n] gates in [0, 1]; computed in float64.

        Raises
        ------
        PolicyError
            If the keys are of another shape than the gate is for.
        """
        depth = len(self.layers)
        for name, keys in (("keys_pre", keys_pre), ("keys_post", keys_post)):
            if keys.ndim != 4 or keys.shape[0] != depth:
                raise PolicyError(f"{name} of shape {keys.shape}: this write gate takes {self._shape(depth)}")
        rows = [self.score_layer(place, keys_pre[place], keys_post[place]) for place in range(depth)]
        return np.stack(rows)

    def score_layer(self, place: int, keys_pre: _Array, keys_post: _Array) -> npt.NDArray[np.float32]:
        """Do one layer's part of `score`.

        Parameters
        ----------
        place : int
            The layer's place in `layers`.
        keys_pre, keys_post : array
            [Hk, n, d].

        Returns
        -------
        array of float32
            [Hk, n].

        Raises
        ------
        PolicyError
            As `score`.
        """
        known = (self.num_kv_heads, self.head_dim)
        for name, keys in (("keys_pre", keys_pre), ("keys_post", keys_post)):
            if keys.ndim != 3 or keys.shape != keys_post.shape or keys.shape[::2] != known:
                raise PolicyError(f"{name} of shape {keys.shape}: this write gate takes {self._shape(None)}")
        w1, b1, w2 = (getattr(self, name)[place].astype(np.float64) for name in ("w1", "b1", "w2"))
        b2 = self.b2[place].astype(np.float64)[:, None]
        count = keys_pre.shape[1]
        found = np.empty((self.num_kv_heads, count), np.float32)
        for start in range(0, count, _CHUNK):
            chunk = slice(start, start + _CHUNK)
            parts = [_normed(keys[:, chunk].astype(np.float64), self.rms_eps) for keys in (keys_pre, keys_post)]
            hidden = np.concatenate(parts, axis=-1) @ w1.transpose(0, 2, 1) + b1[:, None]
            logits = np.einsum("jnh,jh->jn", _gelu(hidden), w2) + b2
            found[:, chunk] = _sigmoid(logits)
        return found

    def _shape(self, depth: int | None) -> str:
        sizes = [f"{self.num_kv_heads} KV heads", "n positions", f"{self.head_dim} dimensions"]
        return f"[{', '.join(sizes if depth is None else [f'{depth} layers', *sizes])}], the same of both"


def _normed(keys: FloatArray, eps: float) -> FloatArray:
    scaled: FloatArray = keys / np.sqrt(np.square(keys).mean(axis=-1, keepdims=True) + eps)
    return scaled


def _gelu(x: FloatArray) -> FloatArray:
    from scipy.special import erf

    halved: FloatArray = x * (0.5 + 0.5 * erf(x / math.sqrt(2)))
    return halved


def _sigmoid(x: FloatArray) -> FloatArray:
    # Of minus the magnitude: exp never overflows.
    small = np.exp(-np.abs(x))
    found: FloatArray = np.where(x >= 0, 1 / (1 + small), small / (1 + small))
    return found


def save_gate(gate: WriteGate, path: str | Path, *, replace: bool = False) -> None:
    """Write a gate as safetensors: its four arrays in float32, and what it is as strings of metadata.

    Parameters
    ----------
    gate : WriteGate
        The gate.
    path : str or Path
        The file; written aside and renamed, so that it is whole or absent.
    replace : bool
        Whether a file that is there may be replaced.

    Raises
    ------
    KvsimError
        If the gate is not whole, or the file exists or cannot be written.
    """
    from kvsim_traces.files import os_reason, write_whole
    from safetensors.numpy import save

    path = Path(path)
    if path.exists() and not replace:
        raise KvsimError(f"{path}: exists already; name a new file")
    tensors = {name: np.ascontiguousarray(getattr(gate, name), dtype=np.float32) for name in _NAMES}
    _check(gate, tensors, path)
    data = save(tensors, metadata=metadata_of(gate))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])
    except OSError as error:
        raise KvsimError(f"{path}: cannot write the gate ({os_reason(error)})") from error


def metadata_of(gate: WriteGate) -> dict[str, str]:
    """Give a gate's metadata as its file holds them, strings all."""
    return {
        "kind": _KIND,
        "format": _FORMAT,
        "kvsim_version": gate.version,
        "model": gate.model,
        "config_hash": gate.config_hash,
        "window": str(gate.window),
        "lambda": repr(float(gate.penalty)),
        "tau": repr(float(gate.tau)),
        "layers": json.dumps(list(gate.layers)),
        "num_kv_heads": str(gate.num_kv_heads),
        "head_dim": str(gate.head_dim),
        "rms_eps": repr(float(gate.rms_eps)),
        "training": json.dumps(gate.training, sort_keys=True, allow_nan=False),
    }


def load_gate(path: str | Path) -> WriteGate:
    """Read a gate that `save_gate` wrote; other tensors in the file are left alone, numbers may be of 16 bits.

    Raises
    ------
    PolicyError
        If the file is missing, damaged, too large or something else.
    """
    import safetensors

    hint = "a gate is a safetensors file from 'kvsim train-gate'"
    size = regular_size(path, hint)
    if size > _MAX_BYTES:
        raise PolicyError(f"{path}: has {size} bytes, a gate at most {_MAX_BYTES}; {hint}")
    try:
        with safetensors.safe_open(str(path), framework="numpy") as file:
            metadata, held = file.metadata() or {}, set(file.keys())
        if metadata.get("kind") != _KIND:
            raise PolicyError(f"{path}: is not a write gate; {hint}")
        if metadata.get("format") != _FORMAT:
            raise PolicyError(f"{path}: is a {_KIND} of format {metadata.get('format')!r}, known is {_FORMAT!r}")
        missing = [name for name in _NAMES if name not in held]
        if missing:
            raise PolicyError(f"{path}: has no tensor {', '.join(missing)} (a gate has {', '.join(_NAMES)})")
        deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize
        parts = {name: part for name, part in deserialize(Path(path).read_bytes()) if name in _NAMES}
    except (OSError, safetensors.SafetensorError, TypeError) as error:
        raise PolicyError(f"{path}: cannot be read ({error}); {hint}") from None
    tensors = {name: _array(name, part, path) for name, part in parts.items()}
    gate = _described(metadata, tensors, path)
    _check(gate, tensors, path)
    return gate


def _array(name: str, part: Mapping[str, Any], path: str | Path) -> npt.NDArray[np.float32]:
    """Turn a tensor's bytes into float32; NumPy has no bfloat16."""
    kind, shape, data = part["dtype"], part["shape"], part["data"]
    if kind not in _WIDTHS:
        raise PolicyError(f"{path}: tensor {name} is of type {kind} (valid: {', '.join(_WIDTHS)})")
    if kind == "BF16":
        found = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        found = np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float32)
    return found.reshape(shape)


def _described(
    metadata: Mapping[str, str], tensors: Mapping[str, npt.NDArray[np.float32]], path: str | Path
) -> WriteGate:
    """Put a file's metadata and tensors together."""
    name = ""
    try:
        read: dict[str, Any] = {}
        kinds: dict[str, Callable[[str], Any]] = {
            "window": int,
            "num_kv_heads": int,
            "head_dim": int,
            "tau": float,
            "lambda": float,
            "rms_eps": float,
            "layers": json.loads,
            "training": json.loads,
            "model": str,
            "config_hash": str,
            "kvsim_version": str,
        }
        for name, kind in kinds.items():
            read[name] = kind(metadata[name])
        name = "layers"
        layers = tuple(read["layers"])
        if not all(type(layer) is int for layer in layers) or not isinstance(read["training"], dict):
            raise TypeError
    except KeyError:
        raise PolicyError(f"{path}: its metadata have no {name!r}") from None
    except (TypeError, ValueError, RecursionError):
        raise PolicyError(f"{path}: its metadata's {name!r} is wrong: {metadata[name]!r:.80}") from None
    return WriteGate(
        w1=tensors["w1"],
        b1=tensors["b1"],
        w2=tensors["w2"],
        b2=tensors["b2"],
        layers=layers,
        num_kv_heads=read["num_kv_heads"],
        head_dim=read["head_dim"],
        window=read["window"],
        tau=read["tau"],
        penalty=read["lambda"],
        model=read["model"],
        config_hash=read["config_hash"],
        rms_eps=read["rms_eps"],
        training=read["training"],
        version=read["kvsim_version"],
    )


def _check(gate: WriteGate, tensors: Mapping[str, npt.NDArray[np.float32]], path: str | Path) -> None:
    """Say what does not fit: numbers out of range, shapes that the metadata do not have, NaN."""
    for name, value in (("window", gate.window), ("num_kv_heads", gate.num_kv_heads), ("head_dim", gate.head_dim)):
        if value < 1:
            raise PolicyError(f"{path}: {name} must be at least 1, got {value}")
        if value >= _MOST:
            raise PolicyError(f"{path}: {name} must have at most 18 digits, got {value}")
    for name, number in (("tau", gate.tau), ("lambda", gate.penalty), ("rms_eps", gate.rms_eps)):
        if not 0 <= number < math.inf:
            raise PolicyError(f"{path}: {name} must be at least 0 and finite, got {number}")
    layers = list(gate.layers)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        raise PolicyError(f"{path}: layers must ascend from 0 or more, got {layers}")
    heads = (len(layers), gate.num_kv_heads)
    w1 = tensors["w1"].shape
    hidden = w1[2] if len(w1) == 4 else 0
    if hidden < 1:
        raise PolicyError(f"{path}: w1 has shape {list(w1)}, must have [layers, KV heads, hidden, 2 head_dim]")
    shapes = {
        "w1": (*heads, hidden, 2 * gate.head_dim),
        "b1": (*heads, hidden),
        "w2": (*heads, hidden),
        "b2": heads,
    }
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise PolicyError(
                f"{path}: {name} has shape {list(tensors[name].shape)}, {heads[0]} layers of {heads[1]} KV heads of "
                f"dimension {gate.head_dim} need {list(shape)}"
            )
        if not np.isfinite(tensors[name]).all():
            raise PolicyError(f"{path}: {name} holds numbers that are not finite")
