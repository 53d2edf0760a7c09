"""A policy's admission at work in a model: which keys are promoted when they leave the local window."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvsim.errors import KvsimError
from kvsim.live.gate import TorchGate, Unrotated

__all__ = ["Decision", "FixedKeeper", "GateKeeper", "Gatekeeper"]

_CHUNK = 16384

Decision = tuple[torch.Tensor, torch.Tensor | None]
"""What is admitted, [Hk, n] boolean, and the gates, [Hk, n], where there is a gate."""


class Gatekeeper(Protocol):
    """Decides about keys as they come.

    Attributes
    ----------
    name : str
        The policy's ``admit`` axis.
    window : int
        W: how many recent positions every query sees.
    layers : tuple of int
        The model's indices of the eligible layers, whose keys it decides about.
    """

    name: str
    window: int
    layers: tuple[int, ...]

    def decide(self, layer: int, keys: torch.Tensor, first: int) -> Decision:
        """Decide about the post-RoPE keys [Hk, n, d] of one of the model's layers, at positions from `first` on."""


class GateKeeper:
    """Admits what a write gate gives a score of at least tau (WG-KV section 3.3).

    Parameters
    ----------
    name, window, layers
        See `Gatekeeper`.
    gate : WriteGate
    tau : float
    unrotated : sequence of Unrotated
        For each of `layers`.

    Raises
    ------
    KvsimError
        If the gate is not for these layers.
    """

    def __init__(
        self,
        name: str,
        window: int,
        layers: tuple[int, ...],
        gate: Any,
        *,
        tau: float,
        unrotated: list[Unrotated],
    ) -> None:
        missing = [layer for layer in layers if layer not in gate.layers]
        if missing:
            raise KvsimError(f"{name}: has no gate for layer {missing[0]} (layers: {list(gate.layers)})")
        self.name, self.window, self.layers, self.gate = name, window, layers, gate
        self.networks = TorchGate(gate)
        self.unrotated = dict(zip(layers, unrotated, strict=True))
        # A stored score is float32, and so is the threshold that it meets.
        self.threshold = float(np.float32(tau))

    def decide(self, layer: int, keys: torch.Tensor, first: int) -> Decision:
        """See `Gatekeeper.decide`."""
        if keys.shape[::2] != (self.gate.num_kv_heads, self.gate.head_dim):
            raise KvsimError(
                f"{self.name}: the gate is for {self.gate.num_kv_heads} KV heads of dimension {self.gate.head_dim}, "
                f"the model has {keys.shape[0]} of {keys.shape[2]}"
            )
        scores = torch.empty(keys.shape[:2], device=keys.device)
        for start in range(0, keys.shape[1], _CHUNK):
            own = keys[:, start : start + _CHUNK]
            positions = torch.arange(first + start, first + start + own.shape[1], device=keys.device)
            before = self.unrotated[layer](own, positions)
            scores[:, start : start + _CHUNK] = self.networks.score(layer, before, own)
        return scores >= self.threshold, scores


class FixedKeeper:
    """Admits by position, layer and head alone.

    Parameters
    ----------
    name, window, layers
        See `Gatekeeper`.
    draw : callable
        Given a number of positions n: what is admitted of the first n, [K, Hk, n]; more positions leave the first ones
        as they are.
    """

    def __init__(
        self, name: str, window: int, layers: tuple[int, ...], draw: Callable[[int], npt.NDArray[np.bool_]]
    ) -> None:
        self.name, self.window, self.layers, self._draw = name, window, layers, draw
        self._drawn = draw(1)

    def decide(self, layer: int, keys: torch.Tensor, first: int) -> Decision:
        """See `Gatekeeper.decide`."""
        end = first + keys.shape[1]
        if end > self._drawn.shape[2]:
            self._drawn = self._draw(max(end, 2 * self._drawn.shape[2]))
        own = self._drawn[self.layers.index(layer), :, first:end]
        return torch.from_numpy(own.copy()).to(keys.device), None
