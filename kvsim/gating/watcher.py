"""A frozen model whose attention goes through our hands: hidden states under gates or without."""

import contextvars
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.checkpoint import checkpoint

from kvsim.errors import KvsimError
from kvsim.gating.attention import Attention, log_gates
from kvsim.gating.module import Gates
from kvsim.live.attention import Call, Watcher, watched
from kvsim.live.prefix import prefill
from kvsim.rope import MODEL_TYPES

__all__ = ["GatedAttention", "Shape", "autocast", "frozen", "hidden_states", "shape_of", "unrotated"]


@dataclass(frozen=True)
class Shape:
    """What gates must know of a model.

    Attributes
    ----------
    layers : tuple of int
        The layers with full attention; sliding ones are not gated.
    num_kv_heads, head_dim : int
        Hk and d.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int


def shape_of(model: Any) -> Shape:
    """Find a model's eligible layers, by running it over two tokens.

    Raises
    ------
    KvsimError
        If its attention is not standard, has sink logits, or rotates its keys in a way that is not known.
    """
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in MODEL_TYPES:
        raise KvsimError(
            f"model: how type {kind!r} rotates its keys is not known, so gates cannot see them before that "
            f"(known: {', '.join(MODEL_TYPES)})"
        )
    prefix = prefill(model, [0, 0])
    layers = [prefix.layers[index] for index in prefix.eligible]
    shapes = {(layer.keys.shape[0], layer.keys.shape[2]) for layer in layers}
    if len(shapes) > 1:
        raise KvsimError(f"model: its layers differ in KV heads and dimension ({sorted(shapes)}); gates need one shape")
    if any(layer.sink_logits is not None for layer in layers):
        raise KvsimError("model: its attention has sink logits, which write-gated attention does not")
    heads, dim = shapes.pop()
    return Shape(tuple(layer.index for layer in layers), heads, dim)


def unrotated(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Undo the rotary embedding that turns dimension i with dimension i + r / 2, a scaled one too.

    Parameters
    ----------
    key : Tensor [batch, Hk, n, d]
        Post-RoPE keys.
    cos, sin : Tensor [batch or 1, n, r]
        What the layer rotated with; dimensions from r on it left alone.

    Returns
    -------
    Tensor [batch, Hk, n, d]
        In float32, or float64 for float64 keys.
    """
    wide = torch.float64 if key.dtype == torch.float64 else torch.float32
    cos, sin = (part.to(wide).unsqueeze(1) for part in (cos, sin))
    turned, rest = key.to(wide).split([cos.shape[-1], key.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    back = (turned * cos - torch.cat((-second, first), dim=-1) * sin) / (cos.square() + sin.square())
    return torch.cat((back, rest), dim=-1)


class _Answers(Watcher, Protocol):
    """A watcher that is shown the position embeddings of each attention layer before it answers."""

    rotations: dict[int, tuple[torch.Tensor, torch.Tensor]]


class GatedAttention:
    """Answers the attention calls of eligible layers under write gates; others stay the model's own.

    Parameters
    ----------
    gates : Gates
    attention : callable
        A form of write-gated attention.
    window : int
        W.
    tau : float, optional
        The hard threshold; by default gates are soft.

    Attributes
    ----------
    found : dict of int to Tensor [batch, Hk, n]
        The gates of each eligible layer in the last forward pass.
    """

    def __init__(self, gates: Gates, attention: Attention, *, window: int, tau: float | None = None) -> None:
        self._gates, self._attention, self._window, self._tau = gates, attention, window, tau
        self._place = {layer: place for place, layer in enumerate(gates.layers)}
        self.rotations: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.found: dict[int, torch.Tensor] = {}

    def attend(self, call: Call) -> torch.Tensor | None:
        """See `kvsim.live.attention.Watcher`."""
        place = self._place.get(call.layer)
        if place is None:
            return None
        gates = self._gates(place, unrotated(call.key, *self.rotations[call.layer]), call.key)
        self.found[call.layer] = gates
        output = self._attention(
            call.query,
            call.key,
            call.value,
            log_gates(gates, self._tau),
            window=self._window,
            scaling=call.scaling,
            softcap=call.softcap,
        )
        return output.transpose(1, 2)

    def gates(self) -> torch.Tensor:
        """Stack `found`, [K, batch, Hk, n]."""
        return torch.stack([self.found[layer] for layer in self._gates.layers])


def hidden_states(
    model: Any, tokens: torch.Tensor, watcher: _Answers | None = None, *, checkpointing: bool = False
) -> torch.Tensor:
    """Run a model's decoder over sequences from their start, and give its last hidden states after the final norm.

    Parameters
    ----------
    model : PreTrainedModel
    tokens : Tensor [batch, n]
    watcher : optional
        Who answers its attention calls. What it takes to come back through the pass must run within `frozen`.
    checkpointing : bool
        Keep the layers' inputs only, and compute the rest again on the way back.

    Returns
    -------
    Tensor [batch, n, hidden size]
    """
    decoder = model.get_decoder()
    with ExitStack() as stack:
        stack.enter_context(autocast(tokens.device))
        if watcher is not None:
            stack.enter_context(_rotations_shown(model, watcher))
            if checkpointing:
                stack.enter_context(_checkpointed(decoder))
        found: torch.Tensor = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        return found


def autocast(device: torch.device) -> Any:
    """Compute in bfloat16 where it can, on a GPU; elsewhere in the model's own type."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def frozen(model: torch.nn.Module, watcher: Watcher | None = None) -> Iterator[None]:
    """Keep a model's parameters from having gradients, and have `watcher` answer its attention calls."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    try:
        if watcher is None:
            yield
        else:
            with watched(model, watcher):
                yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


@contextmanager
def _rotations_shown(model: torch.nn.Module, watcher: _Answers) -> Iterator[None]:
    def before(module: Any, _: Any, arguments: dict[str, Any]) -> None:
        embeddings = arguments.get("position_embeddings")
        if embeddings is not None:
            watcher.rotations[module.layer_idx] = embeddings

    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _checkpointed(decoder: Any) -> Iterator[None]:
    """Checkpoint each of a decoder's layers, in the context of this forward: a GPU's way back is another thread's."""
    for layer in decoder.layers:
        # Looked up on the instance first, so that the class stays as it is.
        layer.forward = partial(_again, layer.forward)
    try:
        yield
    finally:
        for layer in decoder.layers:
            del layer.forward


def _again(forward: Any, *arguments: Any, **options: Any) -> Any:
    context = contextvars.copy_context()
    again = partial(context.run, forward, **options)
    return checkpoint(again, *arguments, use_reentrant=False, preserve_rng_state=False)
