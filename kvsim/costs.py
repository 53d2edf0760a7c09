"""What a decode step and a prefill must cost: a floor from bytes and floating-point operations.

A time is ``max(bytes / bandwidth, operations / rate)`` of the whole step: all bytes at the bandwidth of a plain copy,
all operations at the rate of a large matrix product, the one hidden behind the other. It is a floor, not a forecast.

Left out: launches and waits for the host; that kernels reach less than these rates, attention most of all, so that a
floor understates its share of a prefill; activations, normalisation, rotary embeddings, softmax, biases, sampling; the
write of a step's own key and value; scoring, eviction and the moving of tokens, the write gate, and the operations of a
selection's ranking; the caches of sliding-window layers. Mixtures of experts are refused.

>>> from kvsim.costs import HARDWARE, SHAPES, decode_cost
>>> shape, h200 = SHAPES["llama-3.1-8b"], HARDWARE["h200"]
>>> full = decode_cost(shape, h200, shape.cached(400_000))
>>> round(full.seconds / decode_cost(shape, h200, shape.cached(100_000)).seconds, 2)
2.4
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError, unknown_name

__all__ = ["HARDWARE", "SHAPES", "Cost", "Hardware", "Shape", "causal_pairs", "decode_cost", "prefill_cost"]

MOST = 2**40
_FASTEST = 1e30


@dataclass(frozen=True)
class Hardware:
    """What a device sustains.

    Attributes
    ----------
    name : str
        Its name.
    bandwidth : float
        Bytes a second, reads and writes together, of a large copy within the device.
    flops : float
        Operations a second of a large dense product in 16-bit numbers, a multiply-add counting as two.
    """

    name: str
    bandwidth: float
    flops: float

    @classmethod
    def read(cls, text: str) -> "Hardware":
        """Read a name of `HARDWARE`, or ``BANDWIDTH,FLOPS`` such as ``3.35e12,7e14``.

        Raises
        ------
        KvsimError
            If it is neither.
        """
        if text in HARDWARE:
            return HARDWARE[text]
        first, comma, second = text.partition(",")
        if not comma:
            raise unknown_name("hardware", text, [*HARDWARE, "BANDWIDTH,FLOPS"])
        try:
            found = cls(text, float(first), float(second))
        except ValueError:
            raise KvsimError(f"hardware is a name or two numbers BANDWIDTH,FLOPS a second, got {text!r}") from None
        if not all(1 <= value <= _FASTEST for value in (found.bandwidth, found.flops)):
            raise KvsimError(f"hardware {text!r}: bandwidth and operations a second must be in 1..{_FASTEST:g}")
        return found


HARDWARE = {"h200": Hardware("h200", 4.23e12, 7.9e14)}
"""Devices by name. H200: a measured copy of 4.23 TB/s, and about 790 TFLOP/s of large dense bfloat16 products, of the
data sheet's 989."""


@dataclass(frozen=True)
class Shape:
    """A dense decoder with gated MLPs: as much of it as costs depend on.

    Attributes
    ----------
    name : str
        Its name.
    layers, heads, kv_heads, head_dim : int
        Layers, query heads, KV heads and elements of a key.
    hidden, intermediate, vocab : int
        Widths of the residual stream and of the MLP, and entries of the vocabulary.
    tied : bool
        Whether the output projection is the embedding table.
    weight_bytes_each : float
        Bytes of one weight.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    tied: bool = False
    weight_bytes_each: float = 2.0

    @property
    def layer_weights(self) -> int:
        """Weights of all layers: the projections of attention and of the MLP, without norms and biases."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def read_weights(self) -> int:
        """Weights that a decode step reads: those of the layers and the output projection."""
        return self.layer_weights + self.hidden * self.vocab

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights, an embedding table of its own included."""
        return self.weight_bytes_each * (self.read_weights + (0 if self.tied else self.hidden * self.vocab))

    def cached(self, tokens: float) -> float:
        """Give the cached tokens of all layers and KV heads together, where each has so many."""
        return tokens * self.layers * self.kv_heads

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str = "model") -> "Shape":
        """Take a shape from a model's configuration, as a recording's manifest holds it; weights in 16 bits.

        Raises
        ------
        KvsimError
            If the configuration lacks a size or has one out of range, or is a mixture of experts.
        """
        config = config.get("text_config") or config
        experts = [key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)]
        if experts:
            raise KvsimError(f"{name}: is a mixture of experts ({experts[0]}), whose costs are not modelled")
        keys = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
        sizes: dict[str, Any] = {key: config.get(key) for key in keys}
        sizes["num_key_value_heads"] = config.get("num_key_value_heads") or sizes["num_attention_heads"]
        if config.get("head_dim") is not None:
            sizes["head_dim"] = config["head_dim"]
        for key, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
                raise KvsimError(f"{name}: its configuration has no usable {key}; name a shape: {', '.join(SHAPES)}")
        dim = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        return cls(
            name=name,
            layers=sizes["num_hidden_layers"],
            heads=sizes["num_attention_heads"],
            kv_heads=sizes["num_key_value_heads"],
            head_dim=dim,
            hidden=sizes["hidden_size"],
            intermediate=sizes["intermediate_size"],
            vocab=sizes["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
        )

    @classmethod
    def read(cls, text: str) -> "Shape":
        """Give a shape of `SHAPES` by name.

        Raises
        ------
        KvsimError
            If there is none of that name.
        """
        if text not in SHAPES:
            raise unknown_name("shape", text, SHAPES)
        return SHAPES[text]


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("llama-3.1-8b", 32, 32, 8, 128, 4096, 14336, 128256),
        Shape("qwen3-4b", 36, 32, 8, 128, 2560, 9728, 151936, tied=True),
        Shape("smollm2-135m", 30, 9, 3, 64, 576, 1536, 49152, tied=True),
    )
}
"""Shapes by name, weights in 16 bits."""


@dataclass(frozen=True)
class Cost:
    """A floor.

    Attributes
    ----------
    bytes, operations : float
        What is read, and the floating-point operations.
    seconds : float
        The longer of the two times.
    bound : {"bandwidth", "compute"}
        Which one that is.
    """

    bytes: float
    operations: float
    seconds: float
    bound: Literal["bandwidth", "compute"]

    @classmethod
    def on(cls, hardware: Hardware, read: float, operations: float) -> "Cost":
        """Give the cost of so many bytes and operations on a device."""
        by_bytes, by_operations = read / hardware.bandwidth, operations / hardware.flops
        bound: Literal["bandwidth", "compute"] = "bandwidth" if by_bytes >= by_operations else "compute"
        return cls(float(read), float(operations), float(max(by_bytes, by_operations)), bound)


def decode_cost(
    shape: Shape,
    hardware: Hardware,
    cached: float,
    *,
    dtype_bytes: float = 2,
    batch: int = 1,
    extra_bytes: float = 0,
) -> Cost:
    """Give the floor of one decode step: it reads the weights once, and the cached keys and values of every sequence.

    Parameters
    ----------
    shape, hardware
        The model and the device.
    cached : float
        Tokens that one sequence's step reads, summed over layers and KV heads; `Shape.cached` gives those of equal
        heads.
    dtype_bytes : float
        Bytes of one number of the cache.
    batch : int
        Sequences decoded together.
    extra_bytes : float
        What else a sequence's step reads, such as page tables.
    """
    read = shape.weight_bytes_each * shape.read_weights
    read += batch * (cached * 2 * shape.head_dim * dtype_bytes + extra_bytes)
    operations = 2 * shape.read_weights + 4 * shape.head_dim * (shape.heads / shape.kv_heads) * cached
    return Cost.on(hardware, read, batch * operations)


def prefill_cost(shape: Shape, hardware: Hardware, length: int, pairs: float | None = None) -> Cost:
    """Give the floor of a prefill of one sequence: matrix products of all tokens, and attention of query-key pairs.

    Keys and values are taken to be read once a layer, as a fused attention at its best does; logits are those of the
    last token.

    Parameters
    ----------
    shape, hardware
        The model and the device.
    length : int
        Tokens.
    pairs : float, optional
        Query-key pairs of one query head, the mean over layers and heads; `causal_pairs` counts them. Dense causal
        attention by default.
    """
    pairs = causal_pairs(length) if pairs is None else pairs
    products = 2 * (shape.layer_weights * length + shape.hidden * shape.vocab)
    attention = 4 * shape.head_dim * shape.heads * shape.layers * pairs
    read = shape.weight_bytes_each * shape.read_weights + shape.cached(length) * 2 * shape.head_dim * 2
    return Cost.on(hardware, read, products + attention)


def causal_pairs(
    length: int, window: int | None = None, admitted: float | npt.NDArray[np.bool_] | None = None
) -> float:
    """Count the query-key pairs of a causal prefill, per head: dense, or a vertical-slash mask (WG-KV 4.2).

    Query i sees key j where ``i - j < W``, or where j is admitted, j <= i.

    Parameters
    ----------
    length : int
        L tokens.
    window : int, optional
        W; None for dense attention.
    admitted : float or array of bool, optional
        The share of keys that is admitted, taken as spread evenly; or which ones, [..., L], of which the mean over the
        leading axes is given. None for none.

    Raises
    ------
    KvsimError
        If a size is negative, a share is outside [0, 1], or the mask is not of `length`.
    """
    if length < 0 or (window is not None and window < 1):
        raise KvsimError(f"length must be at least 0 and window at least 1, got {length} and {window}")
    if window is None or window >= length:
        return length * (length + 1) / 2
    outside = length - window
    local = window * (window + 1) / 2 + outside * window
    if admitted is None:
        return local
    # Key j is read from outside the window by the queries j + W .. L - 1.
    if isinstance(admitted, np.ndarray):
        if admitted.shape[-1] != length:
            raise KvsimError(f"a mask of {admitted.shape[-1]} keys does not fit {length} tokens")
        reads = np.arange(outside, 0, -1, dtype=np.float64)
        return local + float((admitted[..., :outside] * reads).sum(axis=-1).mean())
    if not 0 <= admitted <= 1:
        raise KvsimError(f"the admitted share must be in [0, 1], got {admitted}")
    return local + admitted * outside * (outside + 1) / 2
