"""A model's attention in our hands: who may see what, and what the queries looked at."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from kvsim_traces.hooks import Tensors, implementation_set, register_twin
from kvsim_traces.manifest import LayerInfo

from kvsim.errors import KvsimError

__all__ = [
    "Call",
    "Watcher",
    "attended",
    "causal",
    "full_rows",
    "is_watching",
    "masked_logits",
    "watched",
]

_PREFIX = "kvsim_live_"
_UNMASKED = "kvsim_live_unmasked_"


@dataclass(frozen=True)
class Call:
    """One call of a layer's attention function.

    Attributes
    ----------
    module : torch.nn.Module
        The attention layer.
    query : Tensor [batch, H, q, d]
        Post-RoPE queries.
    key, value : Tensor [batch, Hk, n, d]
        What the cache returned, the new ones last.
    mask : Tensor or None
        The model's own mask.
    scaling : float
    softcap : float or None
    sliding_window : int or None
    sink_logits : Tensor [H] or None
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    scaling: float
    softcap: float | None
    sliding_window: int | None
    sink_logits: torch.Tensor | None

    def without_vectors(self) -> "Call":
        """Give the call without its positions: heads and dimensions stay, and the memory is let go."""
        query, key, value = (part[:, :, :0].clone() for part in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, mask=None)

    @property
    def layer(self) -> int:
        """Which of the model's layers it is."""
        return int(self.module.layer_idx)


class Watcher(Protocol):
    """Whoever answers a model's attention calls."""

    def attend(self, call: Call) -> torch.Tensor | None:
        """Give the output [batch, q, H, d], or None to have the model's own attention run."""


_watcher: ContextVar[Watcher | None] = ContextVar("kvsim_live_watcher", default=None)


def is_watching(watcher: Watcher) -> bool:
    """Whether attention calls are answered by `watcher` now."""
    return _watcher.get() is watcher


@contextmanager
def watched(model: torch.nn.Module, watcher: Watcher, *, masks: bool = True) -> Iterator[None]:
    """Have `watcher` answer every attention call that the model makes inside the block.

    Parameters
    ----------
    model : PreTrainedModel
    watcher : Watcher
    masks : bool
        Whether the model builds its masks; one that answers all calls itself may not need them.

    Raises
    ------
    KvsimError
        If the model has layers that are not standard attention.
    """
    config = model.config.get_text_config(decoder=True)
    known = ("full_attention", "sliding_attention", "chunked_attention")
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in known:
            raise KvsimError(f"model: layer {index} is {kind!r}; live decoding knows {', '.join(known)}")
    token = _watcher.set(watcher)
    try:
        with implementation_set(model, _twin if masks else _unmasked_twin):
            yield
    finally:
        _watcher.reset(token)


def _twin(base: str) -> str:
    return base if base.startswith(_PREFIX) else register_twin(base, _PREFIX, _answer)


def _unmasked_twin(base: str) -> str:
    return base if base.startswith(_PREFIX) else register_twin(base, _UNMASKED, _answer, mask=False)


def _answer(module: torch.nn.Module, tensors: Tensors, options: dict[str, Any]) -> Any:
    watcher = _watcher.get()
    if watcher is None:
        return None
    for name in ("position_bias", "indices"):
        if options.get(name) is not None:
            raise KvsimError(f"model: {type(module).__name__} passes {name!r} to its attention; it is not standard")
    query, scaling = tensors[0], options.get("scaling")
    scaling = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    softcap, window, sinks = (options.get(name) for name in ("softcap", "sliding_window", "s_aux"))
    output = watcher.attend(Call(module, *tensors, scaling, softcap, window, sinks))
    return None if output is None else (output, None)


def masked_logits(call: Call, seen: torch.Tensor) -> torch.Tensor:
    """Compute logits [batch, Hk, H / Hk, q, n], minus infinity outside `seen`.

    Parameters
    ----------
    call : Call
        Queries and keys; logits are taken in float32 (float64 for a float64 model).
    seen : Tensor [batch or 1, Hk or 1, q or 1, n]
        Boolean: what each KV head's queries may look at.
    """
    query, key = call.query, call.key
    batch, heads, length, dim = query.shape
    group = heads // key.shape[1]
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    grouped = query.reshape(batch, key.shape[1], group * length, dim)
    logits = grouped.to(wide) @ key.to(wide).transpose(2, 3)
    logits = logits.view(batch, key.shape[1], group, length, -1).mul_(call.scaling)
    if call.softcap is not None:
        logits = logits.div_(call.softcap).tanh_().mul_(call.softcap)
    return logits.masked_fill_(~seen.unsqueeze(2), -torch.inf)


def full_rows(call: Call, logits: torch.Tensor) -> torch.Tensor:
    """Give the softmax [batch, H, q, n] of logits in float32: what the queries look at; a sink takes its share."""
    return _softmax(logits, call.sink_logits).float().flatten(1, 2)


def attended(call: Call, logits: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attend to what is visible, [batch, q, H, d] in the values' type; the logits are masked on the way."""
    value = call.value
    batch, kv_heads, group, length, positions = logits.shape
    weights = _softmax(logits.masked_fill_(~visible.unsqueeze(2), -torch.inf), call.sink_logits)
    output = weights.to(value.dtype).reshape(batch, kv_heads, group * length, positions) @ value
    return output.view(batch, kv_heads * group, length, -1).transpose(1, 2)


def causal(info: LayerInfo, own: torch.Tensor, positions: int) -> torch.Tensor:
    """Mark what queries at positions `own` [batch, q] could see in a full cache, [batch, 1, q, positions]."""
    columns, own = torch.arange(positions, device=own.device), own.unsqueeze(-1)
    seen = columns <= own
    window = info.sliding_window
    if window is not None and info.type == "chunked_attention":
        seen = seen & (columns // window == own // window)
    elif window is not None:
        seen = seen & (columns > own - window)
    return seen.unsqueeze(1)


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of [batch, Hk, group, q, n]; a sink takes its share."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    batch, kv_heads, group, length, _ = logits.shape
    sink = sinks.to(logits.dtype).view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, length, 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
