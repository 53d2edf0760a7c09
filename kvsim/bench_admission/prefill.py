"""Prefill of a whole model over a full cache or a dual one, each part between two events.

What is not attention goes through the model in chunks of tokens, so that its activations do not set the peak: of the
whole prompt there are the residual stream, one layer's queries and output, and keys and values.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from kvsim_kernels.gather_admitted.kernel import gather_admitted
from kvsim_kernels.vertical_slash.kernel import vertical_slash
from kvsim_kernels.write_gate.kernel import write_gate
from kvsim_traces.manifest import LayerInfo
from torch.nn.functional import embedding, linear, rms_norm, silu

from kvsim.bench_admission.dense import Attention
from kvsim.bench_admission.models import TAU, Setting
from kvsim.live.dual.pool import Compact, Pool, pages_of
from kvsim.live.fast.ranks import padded
from kvsim.live.fast.slots import Growth, Slots
from kvsim.live.gatekeeper import GateKeeper
from kvsim.live.prefix import PrefixLayer

__all__ = ["PARTS", "Clock", "DualCache", "FullCache", "prefill"]

PARTS = ("allocation", "projections", "gate", "attention", "pool", "output and MLP", "head")


class Clock:
    """Times of named parts of a run, on a GPU by its own events, so that nothing waits."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device.startswith("cuda")
        self._spans: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside the block."""
        start = self._now()
        yield
        self._spans.append((name, start, self._now()))

    def spans(self, name: str) -> list[float]:
        """Give the milliseconds of each block of that name; waits for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()
        own = [(start, stop) for known, start, stop in self._spans if known == name]
        if self._on_gpu:
            return [float(start.elapsed_time(stop)) for start, stop in own]
        return [1e3 * (stop - start) for start, stop in own]


class Cache(Protocol):
    """What a prefill writes."""

    length: int
    query: torch.Tensor

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the keys and values [Hk, L, d] to write for a layer."""

    def score(self, layer: int, chunk: slice, keys_pre: torch.Tensor, clock: Clock) -> None:
        """Look at a chunk's keys [Hk, c, d] before the rotary embedding."""

    def attend(self, layer: int, clock: Clock) -> torch.Tensor:
        """Attend with the queries; an output [H, L, d]."""

    def keep(self, layer: int, clock: Clock) -> None:
        """Keep what is kept of a layer."""


class FullCache:
    """Keys and values of all tokens, where decoding will read them.

    Parameters
    ----------
    model : PreTrainedModel
    length : int
        Tokens of the prompt.
    setting : Setting
    attention : callable
        Dense causal attention.
    """

    def __init__(self, model: Any, length: int, setting: Setting, attention: Attention) -> None:
        config, place = model.config, {"device": setting.device, "dtype": setting.dtype}
        dim, kv_heads, steps = config.head_dim, config.num_key_value_heads, setting.all_steps
        self.length, self._attention = length, attention
        self.growth = Growth([length], torch.device(setting.device))
        shape = 1, kv_heads, padded(length + steps), dim
        self.layers = []
        for index in range(config.num_hidden_layers):
            keys, values = (torch.zeros(shape, **place) for _ in range(2))
            own = prefix_layer(config, index, keys[0, :, :length], values[0, :, :length])
            self.layers.append(Slots(own, keys, values, self.growth.lengths, self.growth.new_slots))
        # Token after token, as FlashAttention takes it best.
        self.query = torch.empty(length, config.num_attention_heads, dim, **place).transpose(0, 1)

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cache.place`."""
        own = self.layers[layer]
        return own.keys[0, :, : self.length], own.values[0, :, : self.length]

    def score(self, layer: int, chunk: slice, keys_pre: torch.Tensor, clock: Clock) -> None:
        """See `Cache.score`."""

    def attend(self, layer: int, clock: Clock) -> torch.Tensor:
        """See `Cache.attend`."""
        with clock.part("attention"):
            return self._attention(self.query, *self.place(layer))

    def keep(self, layer: int, clock: Clock) -> None:
        """See `Cache.keep`."""

    def let_go(self) -> None:
        """Let go of what only a prefill needs."""
        del self.query


class DualCache:
    """A pool of pages that takes what each layer admits; whole keys and values exist for one layer at a time.

    The gates are computed, and the mask then takes their decision (WG-KV App. I.3).

    Parameters
    ----------
    model : PreTrainedModel
    length : int
        Tokens of the prompt.
    setting : Setting
    keeper : GateKeeper
        The gates.
    masks : Tensor [layers, Hk, length] bool
        What is admitted.
    """

    def __init__(self, model: Any, length: int, setting: Setting, keeper: GateKeeper, masks: torch.Tensor) -> None:
        config, device = model.config, torch.device(setting.device)
        dim, kv_heads, steps = config.head_dim, config.num_key_value_heads, setting.all_steps
        place = {"device": device, "dtype": setting.dtype}
        self.length, self.window, self.masks, self._tiling = length, setting.window, masks, setting.tiling
        self._eps = keeper.networks.eps
        self._parts = [part.to(setting.dtype) for part in keeper.networks.parts(device, torch.float32)]
        old = max(0, length - setting.window)
        counts = masks[:, :, :old].sum(-1).flatten().tolist()
        self.pool = Pool(
            len(masks), kv_heads, window=setting.window, most_global=old + steps, steps=steps,
            pages=sum(pages_of(count + steps) + pages_of(setting.window) for count in counts),
            dim=dim, dtype=setting.dtype, device=device,
        )  # fmt: skip
        self.query = torch.empty(config.num_attention_heads, length, dim, **place)
        self._keys, self._values = torch.empty(2, kv_heads, length, dim, **place)
        self._gates = torch.empty(kv_heads, length, device=device)
        self._marks = torch.empty(kv_heads, length, dtype=torch.bool, device=device)

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cache.place`."""
        return self._keys, self._values

    def score(self, layer: int, chunk: slice, keys_pre: torch.Tensor, clock: Clock) -> None:
        """See `Cache.score`."""
        with clock.part("gate"):
            own = [part[layer] for part in self._parts]
            gates = write_gate(keys_pre, self._keys[:, chunk], *own, eps=self._eps)
            torch.ge(gates, TAU, out=self._marks[:, chunk])
            self._marks[:, chunk] = self.masks[layer, :, chunk]
            self._gates[:, chunk] = self._marks[:, chunk]

    def attend(self, layer: int, clock: Clock) -> torch.Tensor:
        """See `Cache.attend`; gathering is part of it, and the output takes the place of the queries."""
        with clock.part("attention"):
            with clock.part("gather"):
                admitted = gather_admitted(self._keys, self._values, self._marks)
            found = vertical_slash(
                self.query, self._keys, self._values, admitted, window=self.window, tiling=self._tiling, out=self.query
            )
        assert isinstance(found, torch.Tensor)
        return found

    def keep(self, layer: int, clock: Clock) -> None:
        """See `Cache.keep`."""
        with clock.part("pool"):
            self.pool.fill(layer, 0, Compact.of(self._keys, self._values, self._gates, self._marks, self.window))

    def let_go(self) -> None:
        """Let go of what only a prefill needs."""
        self._keys, self._values = self._keys[:, :0].clone(), self._values[:, :0].clone()
        del self.query, self._gates, self._marks, self._parts

    def prefix_layers(self, config: Any) -> list[PrefixLayer]:
        """Give layers that say what they are and hold nothing: what they had lies in the pool."""
        nothing = self._keys[:, :0]
        return [prefix_layer(config, index, nothing, nothing) for index in range(config.num_hidden_layers)]


def prefix_layer(config: Any, index: int, keys: torch.Tensor, values: torch.Tensor) -> PrefixLayer:
    """Describe a layer that holds these keys and values [Hk, n, d]."""
    nobody = keys.new_empty(config.num_attention_heads, 0, config.head_dim)
    return PrefixLayer(index, LayerInfo("full_attention", scaling=config.head_dim**-0.5), keys, values, nobody, None)


def prefill(
    model: Any, tokens: torch.Tensor, cache: Cache, clock: Clock, *, chunk: int, attended: int | None = None
) -> torch.Tensor:
    """Read a prompt into a cache.

    Parameters
    ----------
    model : PreTrainedModel
        Llama-like.
    tokens : Tensor [L] int64
    cache : FullCache or DualCache
    clock : Clock
        Takes the times of `PARTS`.
    chunk : int
        Tokens that go through projections and MLP together.
    attended : int, optional
        Layers, from the first on, whose attention is computed; in the others queries stand for its output, which
        changes numbers but not the work around it. All by default.

    Returns
    -------
    Tensor [vocabulary]
        Logits after the last token.
    """
    base, length = model.model, len(tokens)
    chunks = [slice(start, min(length, start + chunk)) for start in range(0, length, chunk)]
    with torch.inference_mode():
        with clock.part("projections"):
            x = embedding(tokens, base.embed_tokens.weight)
            positions = torch.arange(length, device=tokens.device).unsqueeze(0)
            half = model.config.head_dim // 2
            cos, sin = (table[0, :, None, :half] for table in base.rotary_emb(x[:1].unsqueeze(0), positions))
        for index, layer in enumerate(base.layers):
            key, value = cache.place(index)
            for own in chunks:
                with clock.part("projections"):
                    pre = _project(layer, x[own], cos[own], sin[own], cache.query[:, own], key[:, own], value[:, own])
                cache.score(index, own, pre, clock)
            is_attended = attended is None or index < attended
            found = cache.attend(index, clock) if is_attended else cache.query
            cache.keep(index, clock)
            for own in chunks:
                with clock.part("output and MLP"):
                    _finish(layer, x[own], found[:, own].transpose(0, 1).flatten(1))
            del found
        with clock.part("head"):
            logits = linear(_normed(x[-1:], base.norm), model.lm_head.weight)[0]
    return logits


def _normed(x: torch.Tensor, module: Any) -> torch.Tensor:
    return rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _project(
    layer: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Write a chunk's queries, keys and values, and give its keys before the rotary embedding, [Hk, c, d]."""
    attention, dim = layer.self_attn, key.shape[-1]
    normed = _normed(x, layer.input_layernorm)
    q, k, v = (
        linear(normed, part.weight, part.bias).view(len(x), -1, dim)
        for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q, k = _normed(q, attention.q_norm), _normed(k, attention.k_norm)
    value.copy_(v.transpose(0, 1))
    for old, new in ((q, query.transpose(0, 1)), (k, key.transpose(0, 1))):
        first, second = old.chunk(2, dim=-1)
        low, high = new.chunk(2, dim=-1)
        torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=high).addcmul_(first, sin)
    return k.transpose(0, 1)


def _finish(layer: Any, x: torch.Tensor, found: torch.Tensor) -> None:
    """Add a chunk's attention [c, H d] and MLP to its residual stream [c, hidden]."""
    mlp = layer.mlp
    torch.addmm(x, found, layer.self_attn.o_proj.weight.t(), out=x)
    normed = _normed(x, layer.post_attention_layernorm)
    wide = silu(linear(normed, mlp.gate_proj.weight), inplace=True).mul_(linear(normed, mlp.up_proj.weight))
    torch.addmm(x, wide, mlp.down_proj.weight.t(), out=x)
