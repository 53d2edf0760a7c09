"""The write gate of a decode step in plain PyTorch."""

import torch

from kvsim_kernels.write_gate.reference import check as check_weights
from kvsim_kernels.write_gate.reference import write_gate

__all__ = ["check", "unrotated", "write_gate_step"]


def check(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> None:
    """Raise ValueError unless shapes fit."""
    if keys.ndim != 3 or positions.shape != keys.shape[:1]:
        raise ValueError(
            f"keys of shape {tuple(keys.shape)} and positions of shape {tuple(positions.shape)} must be "
            "[batch, Hk, d] and [batch]"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > keys.shape[2]:
        raise ValueError(
            f"cos and sin of shapes {tuple(cos.shape)} and {tuple(sin.shape)} must both be [positions, r / 2] with r "
            f"at most d={keys.shape[2]}"
        )
    by_head = keys.transpose(0, 1)
    check_weights(by_head, by_head, w1, b1, w2, b2)


def unrotated(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn keys [..., d] back by angles whose cosines and sines are [..., r / 2]; what is beyond r was never turned."""
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def write_gate_step(
    keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
    *,
    first_position: int = 0,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Score the keys of a decode step; see `kvsim_kernels.write_gate.reference.write_gate`.

    Parameters
    ----------
    keys : Tensor [batch, Hk, d]
        After RoPE, whose pairs are an element and the one r / 2 further on.
    cos, sin : Tensor [positions, r / 2]
        Of the angles at `first_position` and the positions after it.
    positions : Tensor [batch] of int
        Where each sequence's key stands.
    w1, b1, w2, b2, eps, dtype
        As there.
    first_position : int

    Returns
    -------
    Tensor [batch * Hk]

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(keys, cos, sin, positions, w1, b1, w2, b2)
    at = positions.long() - first_position
    after = keys.to(dtype)
    before = unrotated(after, cos[at].unsqueeze(1).to(dtype), sin[at].unsqueeze(1).to(dtype))
    gates = write_gate(before.transpose(0, 1), after.transpose(0, 1), w1, b1, w2, b2, eps=eps, dtype=dtype)
    return gates.t().reshape(-1)
