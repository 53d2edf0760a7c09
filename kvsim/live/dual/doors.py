"""A gatekeeper on the device: gates of a step's keys, of all layers at once, without waiting for the host."""

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from kvsim_kernels.write_gate_step.kernel import write_gate_step

from kvsim.errors import KvsimError
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

    def gates(self, keys: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Give the gates [K, batch, Hk] float32 of all eligible layers' new keys.

        The post-RoPE keys are in `slots` [K, batch, Hk] of `keys` [K, batch, Hk, slots, d], and stand at `positions`.
        """


class _GateDoor:
    """The write gate: each row's key is turned back to what it was before the rotary embedding."""

    def __init__(self, keeper: GateKeeper, first: int, last: int, device: torch.device) -> None:
        self.tau, self.first = keeper.threshold, first
        self._eps = keeper.networks.eps
        order = [keeper.networks.place[layer] for layer in keeper.layers]
        parts = keeper.networks.parts(device, torch.float32)
        if order != list(range(len(parts[0]))):
            parts = tuple(part[order] for part in parts)
        self._parts = tuple(part.contiguous() for part in parts)
        positions = torch.arange(first, last, device=device)
        tables = [keeper.unrotated[layer].tables(positions, torch.float32) for layer in keeper.layers]
        if len({cos.shape for cos, _ in tables}) > 1:
            raise KvsimError("the dual cache needs one rotary width in all layers; the plain engine does not")
        self._cos, self._sin = (torch.stack(part) for part in zip(*tables, strict=True))

    def gates(self, keys: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Door.gates`."""
        return write_gate_step(
            keys, slots, self._cos, self._sin, positions, *self._parts, first_position=self.first, eps=self._eps
        )


class _FixedDoor:
    """Known beforehand: a gate is 1 or 0."""

    tau = 0.5

    def __init__(self, keeper: FixedKeeper, first: int, last: int, kv_heads: int, device: torch.device) -> None:
        self.first = first
        shape = torch.empty(kv_heads, last - first, 0)
        marks = [keeper.decide(layer, shape, first)[0].float().t() for layer in keeper.layers]
        self._marks = torch.stack(marks).to(device)

    def gates(self, keys: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Door.gates`."""
        return self._marks.index_select(1, positions - self.first)


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

    Raises
    ------
    KvsimError
        If layers are rotated by different widths.
    """
    first, last = min(positions), max(positions) + steps
    if isinstance(keeper, GateKeeper):
        return _GateDoor(keeper, first, last, device)
    assert isinstance(keeper, FixedKeeper)
    return _FixedDoor(keeper, first, last, kv_heads, device)
