"""The write gate in torch: the scores of `kvsim.write_gate.WriteGate` where the keys are."""

from typing import Any

import torch
from kvsim_kernels.write_gate import write_gate
from kvsim_kernels.write_gate_step import unrotated

from kvsim.rope import Rope

__all__ = ["TorchGate", "Unrotated"]


class TorchGate:
    """The networks of a `WriteGate` on one device, in float32 (float64 for float64 keys).

    Parameters
    ----------
    gate : WriteGate
        See `kvsim.write_gate.load_gate`.
    """

    def __init__(self, gate: Any) -> None:
        self.eps = float(gate.rms_eps)
        self.place = {layer: place for place, layer in enumerate(gate.layers)}
        self._parts = tuple(torch.from_numpy(getattr(gate, name).copy()) for name in ("w1", "b1", "w2", "b2"))
        self._placed: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, ...]] = {}

    def parts(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Give w1 [K, Hk, h, 2d], b1 [K, Hk, h], w2 [K, Hk, h] and b2 [K, Hk] on a device."""
        if (device, dtype) not in self._placed:
            self._placed[device, dtype] = tuple(part.to(device, dtype) for part in self._parts)
        return self._placed[device, dtype]

    def score(self, layer: int, keys_pre: torch.Tensor, keys_post: torch.Tensor) -> torch.Tensor:
        """Give the gates [Hk, n] of one of the model's layers, from its keys [Hk, n, d] before and after RoPE."""
        wide = torch.float64 if keys_post.dtype == torch.float64 else torch.float32
        w1, b1, w2, b2 = (part[self.place[layer]] for part in self.parts(keys_post.device, wide))
        return write_gate(keys_pre, keys_post, w1, b1, w2, b2, eps=self.eps, dtype=wide)


class Unrotated:
    """Turns post-RoPE keys back, as `kvsim.rope.Rope.undo` does."""

    def __init__(self, rope: Rope) -> None:
        self._frequencies = torch.from_numpy(rope.frequencies.copy())

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Give keys [Hk, n, d] at positions [n] as they were before the rotation, in float32 or wider."""
        keys = keys if keys.dtype == torch.float64 else keys.float()
        return unrotated(keys, *self.tables(positions, keys.dtype))

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the cosines and sines [n, r / 2] of positions [n]."""
        # Models take this product in float32.
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies.to(positions.device)
        return angles.cos().to(dtype), angles.sin().to(dtype)
