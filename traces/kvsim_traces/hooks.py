"""Watch a transformers model's attention: what every layer's attention function is called with.

For each attention implementation a model may use (sdpa, eager, flash_attention_2, ...) a twin named ``kvsim_<name>`` is
registered with transformers' ``AttentionInterface``. It shows the call to an observer, then runs the original function.
The matching mask function is registered beside it: a model whose implementation has no mask function builds no mask.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvsim_traces.errors import TraceError

_PREFIX = "kvsim_"


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention function, with batch size 1 removed.

    Attributes
    ----------
    module : torch.nn.Module
        The attention layer.
    query : Tensor [H, q, d]
        Post-RoPE queries.
    key, value : Tensor [Hk, n, d]
        Post-RoPE keys and values of the last n positions: those the layer's cache returned and the new ones.
    scaling : float
        Factor on the dot products.
    softcap : float or None
    sliding_window : int or None
        As passed to the attention function; a model may leave it to its mask and cache.
    sink_logits : Tensor [H] or None
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    softcap: float | None
    sliding_window: int | None
    sink_logits: torch.Tensor | None


Observer = Callable[[AttentionCall], None]
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Query, key, value and mask of an attention call."""
_observer: ContextVar[Observer | None] = ContextVar("kvsim_attention_observer", default=None)


def attention_implementation(model: torch.nn.Module) -> str:
    """Name of the attention implementation a model's decoder runs, "eager" where none is set."""
    return getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None) or "eager"


def _configs(model: torch.nn.Module) -> list[Any]:
    """Every distinct config in the model; modules of one model share them or hold their own sub-config."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(getattr(m, "config", None), "sub_configs")}
    queue = list(found.values())
    while queue:
        config = queue.pop()
        for name in config.sub_configs:
            sub = getattr(config, name, None)
            if sub is not None and id(sub) not in found:
                found[id(sub)] = sub
                queue.append(sub)
    return list(found.values())


@contextmanager
def implementation_set(model: torch.nn.Module, choose: Callable[[str], str]) -> Iterator[None]:
    """Run a model with another attention implementation and put everything back afterwards.

    Parameters
    ----------
    model : PreTrainedModel
    choose : callable
        Maps a config's present implementation to the one to use.
    """
    # The internal attribute is set because the public setters rewrite sub-configs and refuse names by pattern.
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, name in before:
            config._attn_implementation_internal = choose(name or "eager")
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name


@contextmanager
def observed(model: torch.nn.Module, observer: Observer) -> Iterator[None]:
    """Show every attention call the model makes inside the block to `observer`; the model's results do not change.

    Raises
    ------
    TraceError
        From within the model's forward, when a call cannot be recorded (a batch, a position bias, sparse indices).
    """
    token = _observer.set(observer)
    try:
        with implementation_set(model, _twin):
            yield
    finally:
        _observer.reset(token)


def _twin(base: str) -> str:
    """Register the observing twin of an attention implementation and return its name."""
    return base if base.startswith(_PREFIX) else register_twin(base, _PREFIX, _show)


def _show(module: torch.nn.Module, tensors: Tensors, options: dict[str, Any]) -> None:
    observer = _observer.get()
    if observer is not None:
        observer(_call(module, *tensors, options))


def register_twin(
    base: str, prefix: str, before: Callable[[torch.nn.Module, Tensors, dict[str, Any]], Any], *, mask: bool = True
) -> str:
    """Register an attention implementation that asks `before`, and runs another one where that gives None.

    Parameters
    ----------
    base : str
        The implementation to run: "sdpa", "eager", ...
    prefix : str
        What its name gets in front.
    before : callable
        Called with the attention module, (query, key, value, attention_mask) and the call's keyword arguments.
    mask : bool
        Whether the base's mask function is registered too; without, the model builds no masks.

    Returns
    -------
    str
        The new name.
    """
    name = prefix + base

    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        own = before(module, (query, key, value, attention_mask), kwargs)
        if own is not None:
            return own
        # The flash functions read the implementation's name from the config to choose their kernel.
        config = module.config
        twin, config._attn_implementation_internal = config._attn_implementation_internal, base
        try:
            return _original(module, base)(module, query, key, value, attention_mask, *args, **kwargs)
        finally:
            config._attn_implementation_internal = twin

    AttentionInterface.register(name, forward)
    if mask and base in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _original(module: torch.nn.Module, base: str) -> Callable[..., Any]:
    """Find the function the model would have called: its own file's table or eager function first."""
    for cls in type(module).__mro__:
        scope = vars(sys.modules[cls.__module__])
        table = scope.get("ALL_ATTENTION_FUNCTIONS")
        if table is not None and base in table:
            return table[base]  # type: ignore[no-any-return]
        if base == "eager" and "eager_attention_forward" in scope:
            return scope["eager_attention_forward"]  # type: ignore[no-any-return]
    if base in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[base]  # type: ignore[no-any-return]
    raise TraceError(
        f"model: {type(module).__name__} has no attention function for {base!r}; load it with "
        "attn_implementation='sdpa'"
    )


def _call(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: dict[str, Any],
) -> AttentionCall:
    """Gather what a row of attention depends on, or say why this layer's attention cannot be recorded."""
    layer = type(module).__name__
    for name in ("position_bias", "indices"):
        if options.get(name) is not None:
            raise TraceError(
                f"model: {layer} passes {name!r} to its attention; only standard attention can be recorded"
            )
    if query.shape[0] != 1:
        raise TraceError(f"model: {layer} ran a batch of {query.shape[0]}; a trace holds one sequence")
    if attention_mask is not None and attention_mask.ndim == 4 and attention_mask.shape[1] != 1:
        raise TraceError(f"model: {layer} has a mask for each head; only standard attention can be recorded")
    scaling = options.get("scaling")
    return AttentionCall(
        module=module,
        query=query[0],
        key=key[0],
        value=value[0],
        scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
        softcap=options.get("softcap"),
        sliding_window=options.get("sliding_window"),
        sink_logits=options.get("s_aux"),
    )
