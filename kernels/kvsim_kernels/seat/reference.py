"""The end of an eviction step in plain PyTorch."""

import torch

from kvsim_kernels.select import Evicted

__all__ = ["check", "seat"]


def check(state: torch.Tensor, positions: torch.Tensor, evicted: Evicted, *more: torch.Tensor) -> None:
    """Raise ValueError unless shapes fit."""
    if positions.shape != state.shape or any(x.shape[:2] != state.shape[:2] for x in (*evicted[:2], *more)):
        raise ValueError(
            f"positions of shape {tuple(positions.shape)} and what is kept for each group do not fit a state of shape "
            f"{tuple(state.shape)}: they must be [batch, G, slots] and [batch, G, …]"
        )


def seat(
    state: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    last_positions: torch.Tensor,
    evicted: Evicted,
    step: torch.Tensor,
    *,
    new_slots: torch.Tensor,
    evicted_at: torch.Tensor,
    near: torch.Tensor,
    margin: float,
) -> None:
    """Record an eviction, and seat the next position where the evicted one was, or in the first free slot, in place.

    Parameters
    ----------
    state, positions : Tensor [batch, G, slots]
        As in `kvsim_kernels.select`; the position of the next slot is set to ``last_positions + 1``.
    lengths, limits, last_positions
        As there.
    evicted : Evicted
        What `kvsim_kernels.select.select_evicted` chose from them.
    step : Tensor [1] int32
        The step, from 1.
    new_slots : Tensor [batch, G] int32
        Written: the slot of the next position, -1 where there is none.
    evicted_at : Tensor [batch, G, positions] int32
        Written at the position that left: the step.
    near : Tensor [batch, G, steps + 1] int8
        Written at the step: 1 if the lowest state kept of those that are not protected lies above the one lost by less
        than `margin` of the larger of the two.
    margin : float

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(state, positions, evicted, new_slots, evicted_at, near)
    batch, groups, slots = state.shape
    now = int(step)
    for row in range(batch):
        for group in range(groups):
            length, last = int(lengths[row]), int(last_positions[row])
            _, n_sink, n_recent = limits[row, group].tolist()
            gone = int(evicted.slots[row, group])
            if gone >= 0:
                at = positions[row, group, :length]
                free = (at >= n_sink) & (at <= last - n_recent)
                free[gone] = False
                if bool(free.any()):
                    low, high = float(state[row, group, gone]), float(state[row, group, :length][free].min())
                    size = max(abs(low), abs(high))
                    near[row, group, now] = size == 0 or high - low < margin * size
                evicted_at[row, group, int(evicted.positions[row, group])] = now
            slot = gone if gone >= 0 else length
            new_slots[row, group] = slot if slot < slots else -1
            if slot < slots:
                positions[row, group, slot] = last + 1
