"""Keys and values in slots of constant shape: what evicts, what grows, and the rings of windowed layers."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from kvsim_kernels.compact.kernel import compact

from kvsim.live.fast.ranks import Ranks, padded
from kvsim.live.prefix import Prefix, PrefixLayer
from kvsim.live.sequence import Sequence, per_head

__all__ = ["Clock", "Growth", "Ring", "Slots", "evicting_slots", "growing_slots", "ring_slots"]


class Clock:
    """Where a batch's next queries stand.

    Attributes
    ----------
    last : Tensor [batch] int32
        Position of each next query.
    at : Tensor [1] int64
        The next step, from 1.
    """

    def __init__(self, prompts: list[int], device: torch.device) -> None:
        self.last = torch.tensor(prompts, dtype=torch.int32, device=device)
        self.at = torch.ones(1, dtype=torch.int64, device=device)

    def advance(self) -> None:
        """Go to the next step."""
        self.last += 1
        self.at += 1


class Growth:
    """Slots that fill one after the other.

    Attributes
    ----------
    lengths : Tensor [batch] int32
    new_slots : Tensor [batch, 1] int32
    """

    def __init__(self, held: list[int], device: torch.device) -> None:
        self.lengths = torch.tensor(held, dtype=torch.int32, device=device) + 1
        self.new_slots = (self.lengths - 1).unsqueeze(1)

    def advance(self) -> None:
        """Go to the next step."""
        self.new_slots += 1
        self.lengths += 1

    def retreat(self, steps: int) -> None:
        """Go some steps back."""
        self.new_slots -= steps
        self.lengths -= steps


class Ring:
    """Slots of a layer whose queries see a window: the position modulo its width is the slot.

    Parameters
    ----------
    clock : Clock
    window : int
        Positions that a query sees, its own among them.
    chunked : bool
        The window does not slide but starts anew at its multiples (chunked attention).

    Attributes
    ----------
    lengths : Tensor [batch] int32
    new_slots : Tensor [batch, 1] int32
    """

    def __init__(self, clock: Clock, window: int, *, chunked: bool) -> None:
        self.clock, self.window, self.chunked = clock, window, chunked
        self.lengths = torch.empty_like(clock.last)
        self.new_slots = torch.empty_like(clock.last).unsqueeze(1)
        self.advance()

    def advance(self) -> None:
        """Go to the step that the clock shows."""
        place = torch.remainder(self.clock.last, self.window)
        self.new_slots.copy_(place.unsqueeze(1))
        seen = place + 1 if self.chunked else (self.clock.last + 1).clamp(max=self.window)
        self.lengths.copy_(seen)

    def retreat(self, steps: int) -> None:
        """Go to the step that the clock shows, which went back."""
        self.advance()


@dataclass
class Slots:
    """One layer of the cache.

    Attributes
    ----------
    info : PrefixLayer
        The layer: its number, kind, scaling, softcap, sinks.
    keys, values : Tensor [batch, Hk, slots, d]
    lengths : Tensor [batch] int32
        Slots that the query of the step sees: the first ones.
    new_slots : Tensor [batch, 1 or Hk] int32
        Where the step's own key and value go.
    positions : Tensor [batch, Hk, slots] int32 or None
        Below 0 for a slot that stays empty; needed where heads hold unequal numbers.
    ordinal : int or None
        Which of the eligible layers, where positions leave.
    constant : int or None
        What `lengths` are from now on, in every row; None where they change.
    """

    info: PrefixLayer
    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor
    new_slots: torch.Tensor
    positions: torch.Tensor | None = None
    ordinal: int | None = None
    constant: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return int(self.keys.nbytes + self.values.nbytes)

    def shrink(self, slots: torch.Tensor, width: int) -> None:
        """Keep some slots [batch, 1 or Hk, n] only, in a cache of `width` slots; the larger one is let go."""
        self.keys, self.values = compact(self.keys, self.values, slots, width=width)

    def close_up(self, slots: torch.Tensor) -> None:
        """Move some slots to the front of the same cache, where captured graphs look for it; the rest is zero."""
        for whole, moved in zip(
            (self.keys, self.values), compact(self.keys, self.values, slots, width=self.keys.shape[2]), strict=True
        ):
            whole.copy_(moved)


def evicting_slots(prefixes: Items[Prefix], index: int, ordinal: int, ranks: Ranks) -> Slots:
    """Put one layer's prompts into slots that positions will leave; norms of the values where scores need them."""
    own = [prefix.layers[index] for prefix in prefixes]
    rows = ranks.of_layer(ordinal)
    keys, values = _filled(own, [slice(None)] * len(own), ranks.slots)
    if ranks.norms is not None:
        for row, layer in enumerate(own):
            length = layer.values.shape[1]
            torch.linalg.vector_norm(layer.values.float(), dim=-1, out=ranks.norms[ordinal, row, :, :length])
    batch = len(own)
    return Slots(own[0], keys, values, ranks.lengths[:batch], ranks.new_slots[rows], ordinal=ordinal)


def growing_slots(
    prefixes: Items[Prefix], sequences: Items[Sequence], index: int, growths: dict[tuple[int, ...], Growth]
) -> Slots:
    """Put what is left of one layer's prompts before step 1 into slots that fill as steps come.

    Layers that hold equally much share their entry of `growths`.
    """
    own = [prefix.layers[index] for prefix in prefixes]
    kept = [
        _kept(layer, sequence, prefix, index) for layer, sequence, prefix in zip(own, sequences, prefixes, strict=True)
    ]
    held = tuple(max(slots.numel() for slots in heads) for heads in kept)
    device, steps = own[0].keys.device, sequences[0].steps
    growth = growths.setdefault(held, Growth(list(held), device))
    chosen = torch.full((len(own), len(kept[0]), padded(max(held) + steps)), -1, dtype=torch.int32)
    for row, heads in enumerate(kept):
        for head, slots in enumerate(heads):
            chosen[row, head, : slots.numel()] = slots
    positions = None
    if any(slots.numel() < most for heads, most in zip(kept, held, strict=True) for slots in heads):
        positions = chosen.clone()
        for row, most in enumerate(held):
            # What comes later is always seen.
            positions[row, :, most:] = 0
        positions = positions.to(device)
    chosen = chosen.to(device)
    parts = [
        compact(layer.keys.unsqueeze(0), layer.values.unsqueeze(0), chosen[row : row + 1])
        for row, layer in enumerate(own)
    ]
    keys, values = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return Slots(own[0], keys, values, growth.lengths, growth.new_slots, positions)


def _kept(layer: PrefixLayer, sequence: Sequence, prefix: Prefix, index: int) -> list[torch.Tensor]:
    """Give the positions that each KV head holds before step 1."""
    kv_heads, length, _ = layer.keys.shape
    if not layer.info.eligible:
        return [torch.arange(length)] * kv_heads
    marks = per_head(sequence.plan, sequence.retained)[prefix.eligible.index(index), :, :length]
    return [torch.from_numpy(of_head.nonzero()[0]) for of_head in marks]


def ring_slots(prefixes: Items[Prefix], index: int, ring: Ring, positions: int) -> Slots:
    """Put the end of one windowed layer's prompts into its ring; `positions` is the most that there will be."""
    own = [prefix.layers[index] for prefix in prefixes]
    slots = min(ring.window, positions)
    places = []
    for layer in own:
        length = layer.keys.shape[1]
        places.append(torch.arange(max(0, length - slots), length, device=layer.keys.device) % ring.window)
    keys, values = _filled(own, places, slots, exact=True)
    return Slots(own[0], keys, values, ring.lengths, ring.new_slots)


def _filled(
    own: Items[PrefixLayer], places: Items[slice | torch.Tensor], slots: int, *, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the last keys and values of each prompt to their places in slots that are zero elsewhere."""
    found = []
    for name in ("keys", "values"):
        parts = [getattr(layer, name) for layer in own]
        kv_heads, _, dim = parts[0].shape
        shape = len(own), kv_heads, slots if exact else padded(slots), dim
        made = torch.zeros(shape, dtype=parts[0].dtype, device=parts[0].device)
        for row, (part, place) in enumerate(zip(parts, places, strict=True)):
            if isinstance(place, slice):
                made[row, :, : part.shape[1]] = part
            else:
                made[row, :, place] = part[:, part.shape[1] - place.numel() :]
        found.append(made)
    return found[0], found[1]
