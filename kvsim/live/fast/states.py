"""States that are no recurrence, and rankings that are no state: sums over a window, scores of keys, pooling."""

import torch

from kvsim.live.fast.rules import FastRule

__all__ = ["WindowSums", "independent_scores", "pooled"]


class WindowSums:
    """Scores of the last scored steps, a place for each, which the next ones take in turn.

    Parameters
    ----------
    places : Tensor [window, rows, G, slots] float32
        Scores of the queries before step 1, oldest first.
    """

    def __init__(self, places: torch.Tensor) -> None:
        self.places = places
        self._turn = torch.zeros(1, dtype=torch.int64, device=places.device)

    def seat(self, new_slots: torch.Tensor) -> None:
        """Forget what stood in the slots [rows, G] that a new position takes; -1 for none."""
        index = new_slots.long().clamp(min=0).unsqueeze(-1)
        old = self.places.gather(3, index.expand(len(self.places), *index.shape))
        kept = old * (new_slots < 0).unsqueeze(-1)
        self.places.scatter_(3, index.expand_as(kept), kept)

    def take(self, scores: torch.Tensor, state: torch.Tensor) -> None:
        """Put a step's scores [rows, G, slots] in the place of the oldest, and write the sum of all to `state`."""
        self.places.index_copy_(0, self._turn, scores.unsqueeze(0))
        self._turn.add_(1).remainder_(len(self.places))
        torch.sum(self.places, dim=0, out=state)

    def keep(self, index: torch.Tensor, is_kept: torch.Tensor, slots: int) -> None:
        """Move some slots, [rows, G, n], to the front of a number of slots; the rest is zero."""
        held = self.places.gather(3, index.expand(len(self.places), *index.shape)) * is_kept
        held = torch.nn.functional.pad(held, (0, slots - held.shape[3]))
        if slots == self.places.shape[3]:
            # Captured graphs look for it here.
            self.places.copy_(held)
        else:
            self.places = held


def independent_scores(
    rule: FastRule, of_heads: torch.Tensor, lengths: torch.Tensor, *, batch: int, by_layer: bool, groups: int
) -> torch.Tensor:
    """Combine scores of keys over the KV heads of each group, shifted where they may be negative.

    Parameters
    ----------
    rule : FastRule
        With `keys`.
    of_heads : Tensor [K, batch, Hk, slots]
        From `kvsim_kernels.key_scores`, for each layer.
    lengths : Tensor [rows] int32
        Slots in use.
    batch : int
    by_layer : bool
        Whether a row is a layer of a sequence.
    groups : int
        Groups of a row.

    Returns
    -------
    Tensor [K or 1, rows, G, slots]
        What lies beyond a length is 0.
    """
    layers, _, kv_heads, slots = of_heads.shape
    shape = (1, layers * batch) if by_layer else (layers, batch)
    s = of_heads.view(*shape, groups, kv_heads // groups, slots).mean(3)
    used = torch.arange(slots, device=s.device) < lengths.view(-1, 1, 1)
    if rule.keys == "minus norm":
        s = -s
    if rule.signed:
        s = s - s.masked_fill(~used, torch.inf).amin(-1, keepdim=True)
    return s.masked_fill(~used, 0)


def pooled(state: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Give each slot in use the maximum of the states of the `size` visible positions around its own.

    Parameters
    ----------
    state : Tensor [rows, G, slots]
    positions : Tensor [rows, G, slots] int32
        Of each slot's token; slots are in no order.
    lengths : Tensor [rows] int32
        Slots in use.
    size : int
        Odd.
    """
    slots = state.shape[2]
    used = torch.arange(slots, device=state.device) < lengths.view(-1, 1, 1)
    order = positions.masked_fill(~used, torch.iinfo(torch.int32).max).argsort(-1)
    ordered = state.masked_fill(~used, -torch.inf).gather(2, order)
    # A maximum beyond the ends changes nothing, and neither do neighbours that are farther than there are slots.
    half = min(size // 2, slots)
    wide = torch.nn.functional.pad(ordered, (half, half), value=-torch.inf)
    highest = torch.nn.functional.max_pool1d(wide, 2 * half + 1, stride=1)
    return torch.empty_like(state).scatter_(2, order, highest)
