"""A transformers cache that runs a policy: the plain form, one decode step at a time."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsim.errors import KvsimError
from kvsim.live.attention import Call, attended, full_rows, is_watching, masked_logits, watched
from kvsim.live.keepers import keepers_of
from kvsim.live.prefix import PrefillWatcher, Prefix, PrefixLayer, config_of, to_numpy
from kvsim.live.reading import read_marks
from kvsim.live.sequence import Sequence
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget

__all__ = ["KVSimCache", "LiveLayer"]


class LiveLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, [batch, Hk, n, d], and the column that each slot holds.

    Attributes
    ----------
    columns : Tensor [batch, Hk, n]
        -1 for an empty slot. A column is a position, counted from the batch's longest prompt.
    seen : int
        Columns so far.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `CacheLayerMixin`."""
        self.device = key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.columns = torch.zeros(*key_states.shape[:2], 0, dtype=torch.long, device=self.device)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Append, and give everything that is held."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = key_states.shape[2]
        new = torch.arange(self.seen, self.seen + length, device=self.device)
        self.seen += length
        self.keys = torch.cat([self.keys, key_states], dim=2)
        self.values = torch.cat([self.values, value_states], dim=2)
        self.columns = torch.cat([self.columns, new.expand(*key_states.shape[:2], length)], dim=2)
        return self.keys, self.values

    def remove(self, keep: torch.Tensor) -> None:
        """Let go of every slot that is not in `keep` [batch, Hk, n]; memory shrinks to the fullest head."""
        keep = keep & (self.columns >= 0)
        width = int(keep.sum(dim=2).max())
        # A stable sort of what leaves behind what stays moves the survivors to the front, in order.
        order = torch.argsort((~keep).to(torch.uint8), dim=2, stable=True)[:, :, :width]
        index = order.unsqueeze(-1)
        self.keys = self.keys.gather(2, index.expand(-1, -1, -1, self.keys.shape[-1]))
        self.values = self.values.gather(2, index.expand(-1, -1, -1, self.values.shape[-1]))
        columns = self.columns.gather(2, order)
        self.columns = torch.where(keep.gather(2, order), columns, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return int(self.keys.nbytes + self.values.nbytes)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        """Columns so far, evicted ones included: positions never change."""
        return self.seen

    def get_max_length(self) -> int:
        """See `CacheLayerMixin`; there is none."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.seen, self.is_initialized = 0, False
        self.keys = self.values = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refuse beam search, whose beams would swap their histories."""
        raise KvsimError("beam search swaps the cache's rows; decode greedily or by sampling")


class KVSimCache(Cache):  # type: ignore[misc]
    """A cache that scores and evicts as a policy says, for `model.generate` and for `kvsim.live.decode`.

    The first forward is the prefill, run by the model's own attention, or under the policy's admission; every later one
    feeds one token.

    Parameters
    ----------
    policy : Policy, str, or a sequence of them
        One for all rows of the batch, or one for each.
    steps : int
        The most tokens that will be decoded.
    compression_ratio, budget
        As for `kvsim.replay`.
    physical : bool
        Remove evicted keys and values from memory; else they stay and are masked, and the run can be measured.
    eligible : {"full", "all"} or tuple of int
        Layers that policies score and evict.

    Examples
    --------
    >>> cache = KVSimCache("ema:0.9,over=step", steps=64, compression_ratio=0.9)  # doctest: +SKIP
    >>> with cache.attached(model):  # doctest: +SKIP
    ...     model.generate(**inputs, cache=cache, max_new_tokens=64)  # past_key_values before transformers 5.24
    >>> cache.sequences[0].result("live").summary()["kept_mass"]  # doctest: +SKIP
    """

    def __init__(
        self,
        policy: Policy | str | Items[Policy | str],
        *,
        steps: int,
        compression_ratio: float | str | Decimal | None = None,
        budget: int | str | None = None,
        physical: bool = False,
        eligible: str | tuple[int, ...] = "full",
    ) -> None:
        super().__init__(layer_class_to_replicate=LiveLayer)
        chosen = choose_budget(compression_ratio, budget)
        given = [policy] if isinstance(policy, Policy | str) else list(policy)
        self.policies = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in given]
        if steps < 1:
            raise KvsimError(f"steps must be at least 1, got {steps}")
        self.steps, self.physical, self.eligible = steps, physical, eligible
        self.sequences: list[Sequence] = []
        self.over: list[bool] = []
        self.next_tokens: list[int] = []
        self._starts: list[int] = []
        self._layers: list[PrefixLayer] = []
        self._prefill: PrefillWatcher | None = None
        self._config: dict[str, Any] = {}
        self._calls: list[Call] = []
        self._rows: list[torch.Tensor | None] = []
        self._visible = torch.zeros(0, dtype=torch.bool)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """See `Cache.update`.

        Raises
        ------
        KvsimError
            If the model's attention does not ask this cache: nothing would be scored, and nothing evicted.
        """
        if not is_watching(self):
            raise KvsimError("this cache decides nothing by itself: use it inside 'with cache.attached(model):'")
        return super().update(key_states, value_states, layer_idx)

    @contextmanager
    def attached(self, model: Any) -> Iterator[None]:
        """Have the model's attention ask this cache inside the block.

        Raises
        ------
        KvsimError
            If the model has layers that are not standard attention, or asked nothing.
        """
        if self.sequences and self.sequences[0].done:
            raise KvsimError("this cache has been used; a new sequence needs a new one")
        self._prefill = PrefillWatcher(
            model, [None] if self.sequences else keepers_of(model, self.policies, self.eligible)
        )
        self._config = config_of(model)
        with watched(model, self):
            yield
        if not self.sequences and not self._prefill.calls and self.get_seq_length():
            self._prefill.layers(0, 0, self.eligible)

    def begin(self, prefixes: Items[Prefix]) -> None:
        """Start after prefills that have been run already, one for each row of the batch."""
        width = max(prefix.length for prefix in prefixes)
        if any(getattr(prefix, "pool", None) is not None for prefix in prefixes):
            raise KvsimError("this prompt was read into a pool on the device; decode it with engine 'triton'")
        layers = zip(*(prefix.layers for prefix in prefixes), strict=True)
        for of_layer in layers:
            layer = LiveLayer()
            parts = [(own.keys, own.values) for own in of_layer]
            keys, values = (
                torch.stack([torch.nn.functional.pad(part, (0, 0, width - part.shape[1], 0)) for part in column])
                for column in zip(*parts, strict=True)
            )
            layer.update(keys, values)
            index = of_layer[0].index
            while len(self.layers) <= index:
                self.layers.append(LiveLayer())
            self.layers[index] = layer
        self._seat(list(prefixes), [width - prefix.length for prefix in prefixes])
        if self.physical:
            self._compact()

    def attend(self, call: Call) -> torch.Tensor | None:
        """See `kvsim.live.attention.Watcher`."""
        if not self.sequences:
            if self._prefill is None:
                raise KvsimError("the prefill failed; start again with a new cache")
            if not self._prefill.calls or call.layer > self._prefill.calls[-1][0].layer:
                return self._prefill.attend(call)
            self._end_prefill()
        if call.query.shape[2] != 1:
            raise KvsimError(f"a decode step feeds one token, got {call.query.shape[2]}; the prefill is one piece")
        if not self._calls:
            self._visible = self._marks().to(call.key.device)
        ordinal = len(self._calls)
        own = self._layers[ordinal]
        if self.layers[own.index].columns.shape[2] != call.key.shape[2]:
            raise KvsimError(f"model: layer {own.index} attends to keys of another layer; every layer needs its own")
        seen = self._seen(own, self.layers[own.index].seen - 1).unsqueeze(2)
        visible = seen
        if own.info.eligible:
            place = sum(layer.info.eligible for layer in self._layers[:ordinal])
            columns = self.layers[own.index].columns
            marks = self._visible[place].to(columns.device)
            visible = seen & marks.gather(2, columns.clamp(min=0)).unsqueeze(2)
        logits = masked_logits(call, seen)
        rows = full_rows(call, logits)
        if own.info.eligible:
            visible = self._read(call, visible, rows)
        output = attended(call, logits, visible)
        self._calls.append(call)
        self._rows.append(rows)
        if len(self._calls) == len(self._layers):
            self._end_step()
        return output

    def _read(self, call: Call, visible: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Keep of what is visible [batch, Hk, 1, n] what the policies' selections read."""
        if all(one.plan.selection is None for one in self.sequences):
            return visible
        read = visible.expand(len(self.sequences), *visible.shape[1:]).clone()
        for row, (one, over) in enumerate(zip(self.sequences, self.over, strict=True)):
            selection, admission = one.plan.selection, one.plan.admission
            if selection is not None and not over:
                window = 0 if admission is None else admission.window
                read[row, :, 0] = read_marks(
                    selection, visible[row, :, 0], rows[row, :, 0], call.query[row, :, 0], call.key[row], window
                )
        return read

    def _end_prefill(self) -> None:
        assert self._prefill is not None
        length, starts = self._prefill.calls[0][0].query.shape[2], self._prefill.starts()
        prefixes = [
            Prefix(
                [0] * (length - start),
                self._prefill.layers(row, start, self.eligible),
                None,
                self._config,
                keeper=self._prefill.keeper(row),
                admitted=self._prefill.admitted(row),
            )
            for row, start in enumerate(starts)
        ]
        self._prefill = None
        self._seat(prefixes, starts)

    def _seat(self, prefixes: list[Prefix], starts: list[int]) -> None:
        if len(self.policies) == 1:
            self.policies = self.policies * len(prefixes)
        if len(self.policies) != len(prefixes):
            raise KvsimError(f"{len(self.policies)} policies for a batch of {len(prefixes)}; give one, or one for each")
        self._layers = prefixes[0].layers
        self._starts = starts
        self.sequences = [
            Sequence(policy, prefix, self.steps, full_rows=not self.physical)
            for policy, prefix in zip(self.policies, prefixes, strict=True)
        ]
        self.over = [False] * len(prefixes)

    def _seen(self, own: PrefixLayer, query: int) -> torch.Tensor:
        """Mark what the query of a column could see of a layer in a full cache, [batch, Hk, n]."""
        columns = self.layers[own.index].columns
        starts = torch.tensor(self._starts, device=columns.device).view(-1, 1, 1)
        seen = columns >= starts
        window = own.info.sliding_window
        if window is not None and own.info.type == "chunked_attention":
            chunk = torch.div(columns - starts, window, rounding_mode="floor")
            return seen & (chunk == (query - starts) // window)
        return seen if window is None else seen & (columns > query - window)

    def _marks(self) -> torch.Tensor:
        """Mark what the policies leave visible, [eligible layers, batch, Hk, columns]."""
        eligible = [layer for layer in self._layers if layer.info.eligible]
        columns = self.layers[self._layers[0].index].seen
        shape = len(eligible), len(self.sequences), eligible[0].keys.shape[0], columns
        marks = np.ones(shape, dtype=np.bool_)
        for row, (one, over) in enumerate(zip(self.sequences, self.over, strict=True)):
            if not over:
                marks[:, row, :, self._starts[row] :] = one.visible()
        return torch.from_numpy(marks)

    def _end_step(self) -> None:
        calls = self._calls
        # All layers and sequences cross to the host together: one copy is quicker than many small ones.
        rows = _stacked([self._placed(ordinal, part) for ordinal, part in enumerate(self._rows)])
        queries = _stacked([call.query[:, :, 0] for call in calls])
        keys = _stacked([call.key[:, :, -1] for call in calls])
        values = _stacked([call.value[:, :, -1] for call in calls])
        self._calls, self._rows = [], []
        for row, (one, over) in enumerate(zip(self.sequences, self.over, strict=True)):
            if not over:
                token = self.next_tokens[row] if self.next_tokens else 0
                start = self._starts[row]
                one.advance(token, rows[:, row, :, start:], queries[:, row], keys[:, row], values[:, row])
        if self.physical:
            self._compact()

    def _placed(self, ordinal: int, rows: Any) -> Any:
        """Give a layer's rows by column, [batch, H, columns]."""
        rows = rows[:, :, 0]
        layer = self.layers[self._layers[ordinal].index]
        if not self.physical:
            return rows
        columns = layer.columns.repeat_interleave(rows.shape[1] // layer.columns.shape[1], dim=1)
        placed = torch.zeros(*rows.shape[:2], layer.seen + 1, dtype=rows.dtype, device=rows.device)
        placed.scatter_(2, torch.where(columns < 0, layer.seen, columns), rows)
        return placed[:, :, :-1]

    def _compact(self) -> None:
        """Remove what no query will see again."""
        sets = [one.retained_per_head() for one in self.sequences]
        place = 0
        for own in self._layers:
            layer = self.layers[own.index]
            if own.info.eligible:
                keep = np.ones((len(sets), layer.columns.shape[1], layer.seen), dtype=np.bool_)
                for row, (retained, start) in enumerate(zip(sets, self._starts, strict=True)):
                    if not self.over[row]:
                        keep[row, :, :start] = False
                        keep[row, :, start:] = retained[place][:, : layer.seen - start]
                found = torch.from_numpy(keep).to(layer.columns.device)
                layer.remove(found.gather(2, layer.columns.clamp(min=0)))
                place += 1
            elif own.info.sliding_window is not None:
                layer.remove(self._seen(own, layer.seen))

    @property
    def physical_bytes(self) -> int:
        """Bytes of all keys and values held, padding included."""
        return sum(layer.nbytes for layer in self.layers if layer.is_initialized)


def _stacked(parts: list[torch.Tensor]) -> Any:
    """Copy one tensor a layer to the host, [K, …]; layers may lie on several devices."""
    return to_numpy(torch.stack([part.to(parts[0].device) for part in parts]))
