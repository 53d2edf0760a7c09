"""Write gates as a torch module, and on their way to and from a file."""

import math
from typing import Any

import torch
from torch import nn

from kvsim.write_gate import RMS_EPS, WriteGate

__all__ = ["SHARE", "START", "Gates", "default_hidden"]

SHARE = 0.004
"""Parameters of the gates over those of the model (WG-KV section 5.3: about 0.4%)."""

START = 2.0
"""What b2 starts from: the sigmoid of it is 0.88, so training starts close to full attention, but not so close that
the gates hardly move. The paper does not say."""

NAMES = ("w1", "b1", "w2", "b2")


def default_hidden(parameters: int, num_gates: int, head_dim: int) -> int:
    """Hidden units that make all gates `SHARE` of a model's parameters, a multiple of 16, at least 16."""
    units = SHARE * parameters / (num_gates * (2 * head_dim + 2))
    return max(16, 16 * round(units / 16))


class Gates(nn.Module):  # type: ignore[misc]
    """The gates of all eligible layers; see `kvsim.write_gate.WriteGate` for what they compute.

    Rows of ``w1`` and ``b1`` start uniform within 1 / sqrt(2d), ``w2`` within 1 / sqrt(h), as torch's linear layers
    do, and ``b2`` from `START`.

    Parameters
    ----------
    layers : tuple of int
        The model's indices of the K eligible layers.
    num_kv_heads, head_dim, hidden : int
        Hk, d and h.
    rms_eps : float
    seed : int
        Seed of the initial numbers.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        num_kv_heads: int,
        head_dim: int,
        hidden: int,
        *,
        rms_eps: float = RMS_EPS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.layers, self.rms_eps = layers, rms_eps
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        generator = torch.Generator().manual_seed(seed)

        def uniform(width: int, *shape: int) -> nn.Parameter:
            drawn = torch.rand(len(layers), num_kv_heads, *shape, generator=generator, dtype=torch.float32)
            return nn.Parameter((2 * drawn - 1) / math.sqrt(width))

        self.w1 = uniform(2 * head_dim, hidden, 2 * head_dim)
        self.b1 = uniform(2 * head_dim, hidden)
        self.w2 = uniform(hidden, hidden)
        self.b2 = nn.Parameter(torch.full((len(layers), num_kv_heads), START))

    def forward(self, place: int, keys_pre: torch.Tensor, keys_post: torch.Tensor) -> torch.Tensor:
        """Give one layer's gates.

        Parameters
        ----------
        place : int
            The layer's place in `layers`.
        keys_pre, keys_post : Tensor [batch, Hk, n, d]
            Keys before and after the rotary embedding.

        Returns
        -------
        Tensor [batch, Hk, n]
            In the type of the parameters, whatever autocast says.
        """
        with torch.autocast(keys_post.device.type, enabled=False):
            wide = self.w1.dtype
            both = [keys.to(wide) for keys in (keys_pre, keys_post)]
            x = torch.cat([nn.functional.rms_norm(keys, keys.shape[-1:], eps=self.rms_eps) for keys in both], dim=-1)
            hidden = torch.einsum("bjni,jhi->bjnh", x, self.w1[place]) + self.b1[place][:, None]
            logits = torch.einsum("bjnh,jh->bjn", nn.functional.gelu(hidden), self.w2[place])
            return torch.sigmoid(logits + self.b2[place][:, None])

    def gate(self, **facts: Any) -> WriteGate:
        """Give the gates as arrays; `facts` are the other fields of `WriteGate`."""
        arrays = {name: getattr(self, name).detach().float().cpu().numpy().copy() for name in NAMES}
        return WriteGate(
            **arrays,
            layers=self.layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_eps=self.rms_eps,
            **facts,
        )

    @classmethod
    def of(cls, gate: WriteGate) -> "Gates":
        """Make the module of a file's gates."""
        found = cls(gate.layers, gate.num_kv_heads, gate.head_dim, gate.hidden, rms_eps=gate.rms_eps)
        with torch.no_grad():
            for name in NAMES:
                getattr(found, name).copy_(torch.from_numpy(getattr(gate, name)))
        return found
