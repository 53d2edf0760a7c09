"""A gatekeeper on the device: gates of a step's keys without waiting for the host."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from kvsim_kernels.write_gate_step.kernel import write_gate_step

from kvsim.live.gatekeeper import FixedKeeper, GateKeeper, Gatekeeper

__all__ = ["Door", "door_of"]


class Door(Protocol):
    """Gates of new keys.

    Attributes
    ----------
    tau : float
        What is admitted has at least this gate.
    """

    tau: float

    def gates(self, place: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Give the gates [batch * Hk] float32 of an eligible layer's post-RoPE keys [batch, Hk, d] at `positions`."""


class _GateDoor:
    """The write gate: each row's key is turned back to what it was before the rotary embedding."""

    def __init__(self, keeper: GateKeeper, first: int, last: int, device: torch.device) -> None:
        self.tau, self.first = keeper.threshold, first
        self._eps = keeper.networks.eps
        self._parts = [
            tuple(
                part[keeper.networks.place[layer]].contiguous() for part in keeper.networks.parts(device, torch.float32)
            )
            for layer in keeper.layers
        ]
        positions = torch.arange(first, last, device=device)
        self._tables = [keeper.unrotated[layer].tables(positions, torch.float32) for layer in keeper.layers]

    def gates(self, place: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Door.gates`."""
        cos, sin = self._tables[place]
        return write_gate_step(keys, cos, sin, positions, *self._parts[place], first_position=self.first, eps=self._eps)


class _FixedDoor:
    """Known beforehand: a gate is 1 or 0."""

    tau = 0.5

    def __init__(self, keeper: FixedKeeper, first: int, last: int, kv_heads: int, device: torch.device) -> None:
        self.first = first
        shape = torch.empty(kv_heads, last - first, 0)
        self._marks = [keeper.decide(layer, shape, first)[0].float().t().to(device) for layer in keeper.layers]

    def gates(self, place: int, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Door.gates`."""
        return self._marks[place][positions - self.first].reshape(-1)


def door_of(keeper: Gatekeeper, positions: Items[int], steps: int, kv_heads: int, device: torch.device) -> Door:
    """Bring a gatekeeper to the device.

    Parameters
    ----------
    keeper : Gatekeeper
    positions : sequence of int
        Where each sequence's first new token stands.
    steps : int
        The most new tokens.
    kv_heads : int
    device : torch.device
    """
    first, last = min(positions), max(positions) + steps
    if isinstance(keeper, GateKeeper):
        return _GateDoor(keeper, first, last, device)
    assert isinstance(keeper, FixedKeeper)
    return _FixedDoor(keeper, first, last, kv_heads, device)
