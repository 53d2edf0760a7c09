"""One forward over many decode steps at once, in which each step sees exactly what it is said to."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, masked_attention, watched
from kvsim.live.prefix import Floats, Prefix, PrefixLayer, cache_argument, to_numpy
from kvsim.live.run_trace import RunTrace

__all__ = ["Lane", "masked_pass"]

NEVER = np.iinfo(np.int32).max


class Lane:
    """One run of tokens on its way through passes: what its steps see, and what its queries looked at.

    Parameters
    ----------
    prefix : Prefix
        The prompt.
    tokens : list of int
        The T tokens after it.

    Attributes
    ----------
    gone : array of int32
        [K, Hk, L0 + T] of the eligible layers: the step after which a KV head's queries no longer see a position,
        `NEVER` for always. A step never sees a later position.
    final : int
        Steps, from the first on, that no pass will change again.
    """

    def __init__(self, prefix: Prefix, tokens: list[int]) -> None:
        first, steps = prefix.layers[0], len(tokens)
        self.prefix, self.tokens, self.final = prefix, tokens, 0
        layers, kv_heads = len(prefix.layers), first.keys.shape[0]
        length = prefix.length + steps
        self.gone: npt.NDArray[np.int32] = np.full((len(prefix.eligible), kv_heads, length), NEVER, np.int32)
        # Zeros take no memory until they are written to: those of layers that are not eligible never are.
        self.rows: Floats = np.zeros((layers, prefix.num_heads, steps, length), np.float32)
        self.queries: Floats = np.zeros((layers, prefix.num_heads, steps, first.keys.shape[-1]), np.float32)
        self.keys = [layer.keys.new_zeros(kv_heads, steps, layer.keys.shape[-1]) for layer in prefix.layers]
        self.values = [layer.values.new_zeros(kv_heads, steps, layer.values.shape[-1]) for layer in prefix.layers]

    def steps(self) -> Iterator[tuple[int, Floats, Floats, Floats, Floats]]:
        """Give what `RunTrace.append` takes, step by step."""
        prompt = self.prefix.length
        keys, values = (np.stack([to_numpy(layer) for layer in part]) for part in (self.keys, self.values))
        for t, token in enumerate(self.tokens):
            rows = self.rows[:, :, t, : prompt + t + 1]
            yield token, rows, self.queries[:, :, t], keys[:, :, t], values[:, :, t]

    def trace(self) -> RunTrace:
        """Give what was seen as a recording."""
        trace = RunTrace(self.prefix, len(self.tokens))
        for step in self.steps():
            trace.append(*step)
        return trace


def masked_pass(model: Any, lanes: Items[Lane]) -> None:
    """Run a model once over the tokens of several lanes, each under its own masks; their steps that are final stay.

    Parameters
    ----------
    model : PreTrainedModel
        The model of their prompt.
    lanes : sequence of Lane
        They share the prompt and the tokens. `rows`, `queries`, `keys` and `values` are filled in.

    Raises
    ------
    KvsimError
        If the model has layers that are not standard attention.
    """
    prefix, tokens = lanes[0].prefix, lanes[0].tokens
    first = min(lane.final for lane in lanes)
    decoder = model.get_decoder()
    device = model.get_input_embeddings().weight.device
    watcher = _PassWatcher(lanes, first, device)
    positions = torch.arange(prefix.length + first, prefix.length + len(tokens), device=device)
    with torch.inference_mode(), watched(model, watcher):
        # The decoder alone: nobody asks for logits.
        decoder(
            input_ids=torch.tensor([tokens[first:]], device=device).expand(len(lanes), -1),
            position_ids=positions.expand(len(lanes), -1),
            use_cache=True,
            **{cache_argument(decoder): _PassCache(lanes, first)},
        )


class _PassWatcher:
    """Answers the attention calls of one pass, and hands each lane what was its own."""

    def __init__(self, lanes: Items[Lane], first: int, device: torch.device) -> None:
        self._lanes, self._first, self._prefix = lanes, first, lanes[0].prefix
        gone = np.stack([lane.gone for lane in lanes], axis=1)
        if all((lane.gone[:, :1] == lane.gone).all() for lane in lanes):
            gone = gone[:, :, :1]
        self._gone = torch.from_numpy(gone).to(device)
        self._steps = torch.arange(first + 1, len(lanes[0].tokens) + 1, device=device)
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
            self._seen[kind] = _causal(layer, self._prefix.length + self._first, call)
        seen = visible = self._seen[kind]
        eligible = ordinal in self._place
        if eligible:
            visible = seen & (self._gone[self._place[ordinal]].unsqueeze(2) >= self._steps[:, None])
        output, rows = masked_attention(call, visible, seen, rows=eligible)
        own = self._prefix.length + self._first
        for row, lane in enumerate(self._lanes):
            steps = slice(lane.final, None)
            new = slice(lane.final - self._first, None)
            if rows is not None:
                lane.rows[ordinal][:, steps] = to_numpy(rows[row, :, new])
            lane.queries[ordinal][:, steps] = to_numpy(call.query[row, :, new])
            lane.keys[ordinal][:, steps] = call.key[row, :, own:][:, new]
            lane.values[ordinal][:, steps] = call.value[row, :, own:][:, new]
        return output


def _causal(layer: PrefixLayer, before: int, call: Call) -> torch.Tensor:
    """Mark what each query of a pass could see in a full cache, [1, 1, q, n]; `before` positions precede the first."""
    length, total = call.query.shape[2], call.key.shape[2]
    columns = torch.arange(total, device=call.key.device)
    own = torch.arange(before, before + length, device=call.key.device)[:, None]
    seen = columns <= own
    window = layer.info.sliding_window
    if window is not None and layer.info.type == "chunked_attention":
        seen = seen & (columns // window == own // window)
    elif window is not None:
        seen = seen & (columns > own - window)
    return seen[None, None]


class _PassLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values before a pass, in front of the pass's own, which the lanes keep."""

    is_sliding = False

    def __init__(self, layer: PrefixLayer, keys: list[torch.Tensor], values: list[torch.Tensor], before: int) -> None:
        super().__init__()
        self._prompt = layer.keys, layer.values
        self._steps = keys, values
        self._before = before
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `CacheLayerMixin`; the keys are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Give all: the prompt's, those of earlier steps, and the new ones."""
        batch = key_states.shape[0]
        whole = []
        for prompt, steps, new in zip(self._prompt, self._steps, (key_states, value_states), strict=True):
            whole.append(torch.cat([prompt.expand(batch, -1, -1, -1), torch.stack(steps), new], dim=2))
        return whole[0], whole[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return self._before + query_length, 0

    def get_seq_length(self) -> int:
        """Positions before the pass."""
        return self._before

    def get_max_length(self) -> int:
        """See `CacheLayerMixin`; there is none."""
        return -1

    get_max_cache_shape = get_max_length


class _PassCache(Cache):  # type: ignore[misc]
    def __init__(self, lanes: Items[Lane], first: int) -> None:
        prefix = lanes[0].prefix
        super().__init__(
            layers=[
                _PassLayer(
                    layer,
                    [lane.keys[ordinal][:, :first] for lane in lanes],
                    [lane.values[ordinal][:, :first] for lane in lanes],
                    prefix.length + first,
                )
                for ordinal, layer in enumerate(prefix.layers)
            ]
        )
