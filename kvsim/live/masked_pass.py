"""One forward over many decode steps at once, in which each step sees exactly what it is said to."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, attended, causal, full_rows, masked_logits, watched
from kvsim.live.prefix import Floats, Prefix, cache_argument, to_numpy

__all__ = ["NEVER", "IntArray", "Lane", "masked_pass"]

IntArray = npt.NDArray[np.int32]

NEVER = np.iinfo(np.int32).max
"""Later than any step."""


class Lane:
    """One run of tokens on its way through passes: what its steps see, and what its queries looked at.

    Parameters
    ----------
    prefix : Prefix
        The prompt.
    tokens : list of int
        The T tokens after it.
    gone : array of int32
        [K, Hk, L0 + T] of the eligible layers: the last step whose queries see a position in a KV head, `NEVER` if all
        do. No step sees a later position.

    Attributes
    ----------
    decide : callable or None
        Called in a pass over all steps with the number of an eligible layer, before its queries attend to anything;
        its rows are there. Gives that layer's part of `gone`.
    final : int
        Steps, from the first on, that no pass will change again.
    rows, queries : array
        [K, H, T, L0 + T] over the full cache, zero for layers that are not eligible, and [K, H, T, d].
    keys, values : list of Tensor
        [Hk, T, d] of each layer.
    """

    def __init__(self, prefix: Prefix, tokens: list[int], gone: IntArray) -> None:
        first, steps = prefix.layers[0], len(tokens)
        self.prefix, self.tokens, self.gone, self.final = prefix, tokens, gone, 0
        self.decide: Callable[[int], IntArray] | None = None
        shape = len(prefix.layers), prefix.num_heads, steps
        # Zeros take no memory until they are written to.
        self.rows: Floats = np.zeros((*shape, prefix.length + steps), np.float32)
        self.queries: Floats = np.zeros((*shape, first.keys.shape[-1]), np.float32)
        self.keys, self.values = (
            [part.new_zeros(part.shape[0], steps, part.shape[-1]) for part in column]
            for column in zip(*((layer.keys, layer.values) for layer in prefix.layers), strict=True)
        )

    def window(self, width: int) -> slice:
        """Give the steps that a pass of `width` steps runs: the first that are not final, and as many as there are."""
        start = min(self.final, len(self.tokens) - width)
        return slice(start, start + width)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, Floats, Floats, Floats, Floats]]:
        """Give what `RunTrace.append` takes of the steps from `first` up to `last`, which is not among them."""
        prompt = self.prefix.length
        vectors = ([to_numpy(layer[:, first:last]) for layer in part] for part in (self.keys, self.values))
        keys, values = map(np.stack, vectors)
        for t in range(first, last):
            rows, own = self.rows[:, :, t, : prompt + t + 1], t - first
            yield self.tokens[t], rows, self.queries[:, :, t], keys[:, :, own], values[:, :, own]


def masked_pass(model: Any, lanes: Items[Lane], width: int) -> None:
    """Run a model once over some steps of several lanes, each from its first that is not final, under its own masks.

    Parameters
    ----------
    model : PreTrainedModel
        The model of their prompt.
    lanes : sequence of Lane
        They share the prompt and the tokens. Their rows, queries, keys and values of those steps are filled in.
    width : int
        How many steps.

    Raises
    ------
    KvsimError
        If the model has layers that are not standard attention.
    """
    decoder = model.get_decoder()
    device = model.get_input_embeddings().weight.device
    windows = [lane.window(width) for lane in lanes]
    steps = torch.stack([torch.arange(window.start, window.stop, device=device) for window in windows])
    watcher = _PassWatcher(lanes, windows, steps)
    tokens = [lane.tokens[window] for lane, window in zip(lanes, windows, strict=True)]
    with torch.inference_mode(), watched(model, watcher):
        # The decoder alone: nobody asks for logits.
        decoder(
            input_ids=torch.tensor(tokens, device=device),
            position_ids=lanes[0].prefix.length + steps,
            use_cache=True,
            **{cache_argument(decoder): _PassCache(lanes, windows)},
        )


class _PassWatcher:
    """Answers the attention calls of one pass, and hands each lane what was its own."""

    def __init__(self, lanes: Items[Lane], windows: list[slice], steps: torch.Tensor) -> None:
        self._lanes, self._windows, self._steps, self._prefix = lanes, windows, steps, lanes[0].prefix
        self._place = {layer: place for place, layer in enumerate(self._prefix.eligible)}
        self._seen: dict[tuple[str, int | None], torch.Tensor] = {}

    def attend(self, call: Call) -> torch.Tensor:
        """See `kvsim.live.attention.Watcher`."""
        ordinal = call.layer
        layer = self._prefix.layers[ordinal]
        if call.key.shape[2] != self._prefix.length + len(self._lanes[0].tokens):
            raise KvsimError(f"model: layer {layer.index} attends to keys of another layer; every layer needs its own")
        kind = layer.info.type, layer.info.sliding_window
        if kind not in self._seen:
            self._seen[kind] = causal(layer.info, self._prefix.length + self._steps, call.key.shape[2])
        seen = self._seen[kind]
        logits = masked_logits(call, seen)
        queries = to_numpy(call.query)
        rows = to_numpy(full_rows(call, logits)) if ordinal in self._place else None
        for row, (lane, window) in enumerate(zip(self._lanes, self._windows, strict=True)):
            # Steps that are final only fill the pass up.
            old = lane.final - window.start
            own = slice(lane.final, window.stop)
            lane.queries[ordinal][:, own] = queries[row, :, old:]
            if rows is not None:
                lane.rows[ordinal][:, own] = rows[row, :, old:]
        return attended(call, logits, seen if rows is None else seen & self._visible(self._place[ordinal]))

    def _visible(self, place: int) -> torch.Tensor:
        """Mark what an eligible layer's queries see, [lanes, Hk or 1, q, n]."""
        for lane, window in zip(self._lanes, self._windows, strict=True):
            if lane.decide is not None and window == slice(0, len(lane.tokens)):
                lane.gone[place] = lane.decide(place)
        gone = np.stack([lane.gone[place] for lane in self._lanes])
        if (gone == gone[:, :1]).all():
            gone = gone[:, :1]
        # Steps count from 1 where they evict.
        return torch.from_numpy(gone).to(self._steps.device).unsqueeze(2) > self._steps[:, None, :, None]


class _PassLayer(CacheLayerMixin):  # type: ignore[misc]
    """The prompt's keys and values with all steps' behind them; a pass's own go into their places."""

    is_sliding = False

    def __init__(self, ordinal: int, lanes: Items[Lane], windows: list[slice]) -> None:
        super().__init__()
        self._lanes, self._windows = lanes, windows
        layer = lanes[0].prefix.layers[ordinal]
        self._parts = [
            (layer.keys, [lane.keys[ordinal] for lane in lanes]),
            (layer.values, [lane.values[ordinal] for lane in lanes]),
        ]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `CacheLayerMixin`; the keys are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Take the new ones of steps that are not final, and give all [lanes, Hk, L0 + T, d]."""
        whole = []
        for (prompt, steps), new in zip(self._parts, (key_states, value_states), strict=True):
            for row, (lane, window) in enumerate(zip(self._lanes, self._windows, strict=True)):
                steps[row][:, lane.final : window.stop] = new[row, :, lane.final - window.start :]
            whole.append(torch.cat([prompt.expand(len(steps), -1, -1, -1), torch.stack(steps)], dim=2))
        return whole[0], whole[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`; nobody reads the mask."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions before the first lane's steps."""
        return self._lanes[0].prefix.length + int(self._windows[0].start)

    def get_max_length(self) -> int:
        """See `CacheLayerMixin`; there is none."""
        return -1

    get_max_cache_shape = get_max_length


class _PassCache(Cache):  # type: ignore[misc]
    def __init__(self, lanes: Items[Lane], windows: list[slice]) -> None:
        super().__init__(layers=[_PassLayer(layer, lanes, windows) for layer in range(len(lanes[0].prefix.layers))])
