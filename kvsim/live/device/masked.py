"""One forward over many decode steps of many policies, whose keys, values and rows stay on the device."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, attended, causal, full_rows, masked_logits, watched
from kvsim.live.prefix import Prefix, cache_argument

__all__ = ["Decide", "Lanes", "Window", "masked_pass"]

Decide = Callable[[int, torch.Tensor], torch.Tensor]
"""Given an eligible layer's number and its rows [lanes, T, H, L0 + T]: the last step that sees each position, as
`Window.gone` of that layer."""


class Lanes:
    """Keys and values of every layer, [P, Hk, L0 + T, d] each: one prompt, P policies.

    Parameters
    ----------
    prefix : Prefix
        The prompt.
    tokens : list of int
        The T tokens after it.
    count : int
        P.
    """

    def __init__(self, prefix: Prefix, tokens: list[int], count: int) -> None:
        self.prefix, self.count = prefix, count
        self.device = prefix.layers[0].keys.device
        self.tokens = torch.tensor(tokens, device=self.device)
        self.keys, self.values = (
            [torch.nn.functional.pad(part, (0, 0, 0, len(tokens))).repeat(count, 1, 1, 1) for part in column]
            for column in zip(*((layer.keys, layer.values) for layer in prefix.layers), strict=True)
        )

    @property
    def positions(self) -> int:
        """L0 + T."""
        return int(self.prefix.length + self.tokens.numel())


class Window:
    """What a pass runs.

    Parameters
    ----------
    lanes : Lanes
    own : Tensor [A] int64
        Which of the lanes.
    final : Tensor [A] int64
        Steps of each that no pass will change again.
    width : int
        Steps that the pass runs of each: from the first that is not final, or the last ones.
    gone : Tensor [A, K or 1, Hk or 1, L0 + T] int32
        The last step that sees each position in the eligible layers.
    """

    def __init__(self, lanes: Lanes, own: torch.Tensor, final: torch.Tensor, width: int, gone: torch.Tensor) -> None:
        self.lanes, self.own, self.final, self.width, self.gone = lanes, own, final, width, gone
        self.start = final.clamp(max=lanes.tokens.numel() - width)
        self.steps = self.start.unsqueeze(1) + torch.arange(width, device=lanes.device)
        self.is_fresh = (self.steps >= final.unsqueeze(1)).view(-1, width, 1, 1)
        self.places = self.own.unsqueeze(1), lanes.prefix.length + self.steps

    def put(self, whole: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Put what is new, [A, Hk, width, d], into [P, Hk, L0 + T, d], but for steps that are final; give [A, …]."""
        rows, columns = self.places
        whole[rows, :, columns] = torch.where(self.is_fresh, new.transpose(1, 2), whole[rows, :, columns])
        return whole if len(self.own) == self.lanes.count else whole[self.own]


def masked_pass(model: Any, window: Window, decide: Decide | None = None) -> torch.Tensor:
    """Run a model once over a window's steps, each under its own mask.

    Parameters
    ----------
    model : PreTrainedModel
        The model of the prompt.
    window : Window
    decide : callable, optional
        Decides each eligible layer's sets before its queries attend to anything; the pass must run all steps.

    Returns
    -------
    Tensor [A, width, K, H, L0 + T] float32
        Rows of the eligible layers over the full cache.

    Raises
    ------
    KvsimError
        If the model has layers that are not standard attention.
    """
    lanes, decoder = window.lanes, model.get_decoder()
    watcher = _Watcher(window, decide)
    with torch.inference_mode(), watched(model, watcher):
        decoder(
            input_ids=lanes.tokens[window.steps],
            position_ids=window.places[1],
            use_cache=True,
            **{cache_argument(decoder): Cache(layers=[_Layer(window, i) for i in range(len(lanes.keys))])},
        )
    return watcher.rows


class _Watcher:
    """Answers the attention calls of one pass, and keeps their rows."""

    def __init__(self, window: Window, decide: Decide | None) -> None:
        self._window, self._decide = window, decide
        lanes = window.lanes
        self._prefix, self._columns = lanes.prefix, lanes.positions
        self._place = {layer: place for place, layer in enumerate(lanes.prefix.eligible)}
        shape = len(window.own), window.width, len(self._place), lanes.prefix.num_heads, lanes.positions
        self.rows = torch.empty(shape, device=lanes.device)
        self._seen: dict[tuple[str, int | None], torch.Tensor] = {}

    def attend(self, call: Call) -> torch.Tensor:
        """See `kvsim.live.attention.Watcher`."""
        layer, window = self._prefix.layers[call.layer], self._window
        if call.key.shape[2] != self._columns:
            raise KvsimError(f"model: layer {layer.index} attends to keys of another layer; every layer needs its own")
        kind = layer.info.type, layer.info.sliding_window
        if kind not in self._seen:
            self._seen[kind] = causal(layer.info, window.places[1], self._columns)
        seen = self._seen[kind]
        logits = masked_logits(call, seen)
        place = self._place.get(call.layer)
        if place is None:
            return attended(call, logits, seen)
        own = self.rows[:, :, place]
        own.copy_(full_rows(call, logits).transpose(1, 2))
        if self._decide is not None:
            window.gone[:, place] = self._decide(place, own)
        gone = window.gone[:, place if window.gone.shape[1] > 1 else 0]
        # Steps count from 1 where they evict.
        return attended(call, logits, seen & (gone.unsqueeze(2) > window.steps[:, None, :, None]))


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """A layer's keys and values with the pass's own put into their places."""

    is_sliding = False

    def __init__(self, window: Window, ordinal: int) -> None:
        super().__init__()
        self._window, self._ordinal, self.is_initialized = window, ordinal, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `CacheLayerMixin`; the keys are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Take the new ones, and give all [A, Hk, L0 + T, d]."""
        lanes = self._window.lanes
        parts = (lanes.keys[self._ordinal], key_states), (lanes.values[self._ordinal], value_states)
        keys, values = (self._window.put(*part) for part in parts)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`; nobody reads the mask."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions before the steps, for a mask that nobody reads."""
        return self._window.lanes.prefix.length

    def get_max_length(self) -> int:
        """See `CacheLayerMixin`; there is none."""
        return -1

    get_max_cache_shape = get_max_length
