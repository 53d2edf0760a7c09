"""Any model's own forward with our attention: a transformers cache that writes into slots."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kvsim_kernels.rope_write.kernel import rope_write
from transformers.cache_utils import Cache

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, watched
from kvsim.live.cache import LiveLayer
from kvsim.live.fast.slots import Slots
from kvsim.live.prefix import cache_argument

__all__ = ["Attend", "GenericForward"]

Attend = Callable[[Slots, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Attention of a layer's slots with queries [batch, H, d], into an output of that shape if one is given."""


class _SlotLayer(LiveLayer):
    """A layer of the cache that `transformers` sees."""

    def __init__(self, slots: Slots, norms: torch.Tensor | None) -> None:
        super().__init__()
        self.slots, self.norms, self.is_initialized = slots, norms, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the step's key and value, and give all slots."""
        own = self.slots
        rope_write(
            key_states[:, :, 0], value_states[:, :, 0], own.keys, own.values, own.new_slots, value_norms=self.norms
        )
        return own.keys, own.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Ask for the smallest mask there is: ours is made of lengths."""
        return query_length, 0


class GenericForward:
    """A decode step through the model's own modules.

    Parameters
    ----------
    model : PreTrainedModel
    attend : callable
        See `Attend`.

    Notes
    -----
    Some of what models do cannot be captured in a CUDA graph, and is not done here. The mask of eager attention copies
    a number from the host: no masks are built, for lengths say what is seen. Experts run one by one wait to know which
    of them are hit, and grouped products of another type than bfloat16 wait for the groups' sizes: their weights are
    gathered for one batched product instead (`batched_mm` of transformers).

    What the model computes from the length of its cache, instead of from the positions it is given, would stay as it
    was when a CUDA graph was captured; whoever captures must compare.
    """

    def __init__(self, model: Any, attend: Attend) -> None:
        self.model, self._attend = model, attend
        self._name = cache_argument(model)
        self._layers: dict[int, Slots] = {}
        self._cache: Any = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Have the model's attention ask us inside the block, and its experts not wait."""
        with watched(self.model, self, masks=False), _experts_set(self.model):
            yield

    def use(self, layers: list[Slots], norms: list[torch.Tensor | None], seen: int) -> None:
        """Run over these slots from now on; `seen` is the longest sequence."""
        self._layers = {own.info.index: own for own in layers}
        self._cache = Cache(layers=[_SlotLayer(own, norm) for own, norm in zip(layers, norms, strict=True)])
        for layer in self._cache.layers:
            layer.seen = seen

    def close(self) -> None:
        """Let go of the slots."""
        self._layers, self._cache = {}, None

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor) -> None:
        """Feed one token a row, [batch], at positions [batch] int32; write logits [batch, vocabulary]."""
        outputs = self.model(
            input_ids=tokens.view(-1, 1),
            position_ids=positions.view(-1, 1).long(),
            use_cache=True,
            **{self._name: self._cache},
        )
        logits.copy_(outputs.logits[:, -1])

    def attend(self, call: Call) -> torch.Tensor:
        """See `kvsim.live.attention.Watcher`.

        Raises
        ------
        KvsimError
            If the layer attends to keys that are not its own.
        """
        own = self._layers[call.layer]
        if call.key.data_ptr() != own.keys.data_ptr():
            raise KvsimError(f"model: layer {call.layer} attends to keys of another layer; every layer needs its own")
        return self._attend(own, call.query[:, :, 0], None).unsqueeze(1)


@contextmanager
def _experts_set(model: torch.nn.Module) -> Iterator[None]:
    """Run experts that would wait for the host by an implementation that does not, and put everything back."""
    before: list[tuple[Any, str | None]] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        weight = next(module.parameters(recurse=False), None)
        # What transformers' decorator of experts leaves behind.
        if weight is None or not hasattr(module, "has_gate") or not hasattr(config, "_experts_implementation_internal"):
            continue
        chosen = config._experts_implementation_internal
        if chosen == "eager" or (chosen == "grouped_mm" and weight.dtype != torch.bfloat16):
            before.append((config, chosen))
            config._experts_implementation_internal = "batched_mm"
    try:
        yield
    finally:
        for config, chosen in before:
            config._experts_implementation_internal = chosen
