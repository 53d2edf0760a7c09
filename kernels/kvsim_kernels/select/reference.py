"""Eviction by rank in plain PyTorch: lowest state first, among equal float32 states the lowest position first.

Protected are the first positions and the last ones, ``p_t`` among them. They count within the budget and must not be
more than it.
"""

from typing import NamedTuple

import torch

__all__ = ["Evicted", "Survivors", "check", "select_evicted", "select_survivors"]


class Survivors(NamedTuple):
    """What stays of a cache.

    Attributes
    ----------
    slots : Tensor [batch, G, width] int32
        Slots in order of position, -1 after the last.
    counts : Tensor [batch, G] int32
        How many there are.
    ties : Tensor [batch, G] int32
        Positions on both sides of the cut that have the float32 state of the cut.
    """

    slots: torch.Tensor
    counts: torch.Tensor
    ties: torch.Tensor


class Evicted(NamedTuple):
    """What leaves a cache that is over its budget, -1 where it is not.

    Attributes
    ----------
    slots, positions : Tensor [batch, G] int32
        The one that leaves.
    ties : Tensor [batch, G] int32
        As in `Survivors`.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    ties: torch.Tensor


def check(state: torch.Tensor, positions: torch.Tensor, limits: torch.Tensor) -> None:
    """Raise ValueError unless shapes fit."""
    batch, groups, slots = state.shape
    if positions.shape not in ((batch, groups, slots), (batch, 1, slots)) or limits.shape != (batch, groups, 3):
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} and limits of shape {tuple(limits.shape)} do not fit a state "
            f"of shape {tuple(state.shape)}: they must be [batch, 1 or G, slots] and [batch, G, 3]"
        )


def select_survivors(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
    *,
    width: int,
) -> Survivors:
    """Choose what stays when a cache is cut to its budget.

    Parameters
    ----------
    state : Tensor [batch, G, slots]
        Finite; compared in float32.
    positions : Tensor [batch, 1 or G, slots]
        Position of each slot's token, below 0 for an empty slot.
    lengths : Tensor [batch] int32
        Slots in use: the first ones.
    limits : Tensor [batch, G, 3] int32
        Each group's budget, and how many of the first and of the last positions are protected.
    last_positions : Tensor [batch] int32
        The newest position of each sequence.
    width : int
        The largest budget; what is more, which only protected positions can be, is dropped from the end.
    """
    check(state, positions, limits)
    batch, groups, _ = state.shape
    slots = torch.full((batch, groups, width), -1, dtype=torch.int32, device=state.device)
    counts, ties = torch.zeros(2, batch, groups, dtype=torch.int32, device=state.device)
    for row in range(batch):
        for group in range(groups):
            own = _Row(state, positions, lengths, limits, last_positions, row, group)
            kept = own.ordered[~torch.isin(own.ordered, own.lowest[: own.lost])]
            kept = kept[:width]
            slots[row, group, : kept.numel()] = kept.to(torch.int32)
            counts[row, group], ties[row, group] = kept.numel(), own.ties(own.lost)
    return Survivors(slots, counts, ties)


def select_evicted(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
) -> Evicted:
    """Choose the one slot that leaves a cache over its budget; the arguments are those of `select_survivors`."""
    check(state, positions, limits)
    batch, groups, _ = state.shape
    slots, at, ties = torch.full((3, batch, groups), -1, dtype=torch.int32, device=state.device)
    for row in range(batch):
        for group in range(groups):
            own = _Row(state, positions, lengths, limits, last_positions, row, group)
            ties[row, group] = own.ties(min(1, own.lost))
            if own.lost:
                slots[row, group] = own.lowest[0]
                at[row, group] = own.positions[own.lowest[0]]
    return Evicted(slots, at, ties)


class _Row:
    """One group of one sequence: its visible slots by position, the unprotected ones by rank, and how many leave."""

    def __init__(
        self,
        state: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        limits: torch.Tensor,
        last_positions: torch.Tensor,
        row: int,
        group: int,
    ) -> None:
        self.positions = positions[row, group if positions.shape[1] > 1 else 0]
        self.state = state[row, group].float()
        budget, n_sink, n_recent = limits[row, group].tolist()
        used = self.positions[: int(lengths[row])]
        visible = torch.nonzero(used >= 0).flatten()
        self.ordered = visible[torch.argsort(used[visible])]
        at = used[self.ordered]
        free = self.ordered[(at >= n_sink) & (at <= int(last_positions[row]) - n_recent)]
        # A stable sort keeps equal states in order of position, so the lowest of them is evicted first.
        self.lowest = free[torch.argsort(self.state[free], stable=True)]
        self.lost = max(0, free.numel() - max(0, budget - (visible.numel() - free.numel())))

    def ties(self, lost: int) -> int:
        """Count the unprotected states equal to both the highest lost and the lowest kept; 0 if those differ."""
        ranked = self.state[self.lowest]
        if not 0 < lost < ranked.numel() or ranked[lost - 1] != ranked[lost]:
            return 0
        return int((ranked == ranked[lost]).sum())
