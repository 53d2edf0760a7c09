"""The write gates of a decode step, of all layers, in plain PyTorch."""

import torch

from kvsim_kernels.write_gate.reference import check as check_weights
from kvsim_kernels.write_gate.reference import write_gate

__all__ = ["check", "unrotated", "write_gate_step"]


def check(
    keys: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor,
    w2: torch.Tensor,
    b2: torch.Tensor,
) -> None:
    """Raise ValueError unless shapes fit."""
    if keys.ndim != 5 or positions.shape != keys.shape[1:2] or slots.shape != keys.shape[:3]:
        raise ValueError(
            f"keys of shape {tuple(keys.shape)}, slots of shape {tuple(slots.shape)} and positions of shape "
            f"{tuple(positions.shape)} must be [K, batch, Hk, slots, d], [K, batch, Hk] and [batch]"
        )
    layers, dim = keys.shape[0], keys.shape[4]
    if cos.ndim != 3 or cos.shape != sin.shape or len(cos) != layers or 2 * cos.shape[2] > dim:
        raise ValueError(
            f"cos and sin of shapes {tuple(cos.shape)} and {tuple(sin.shape)} must both be [K={layers}, positions, "
            f"r / 2] with r at most d={dim}"
        )
    if any(len(part) != layers for part in (w1, b1, w2, b2)):
        raise ValueError(f"weights must be of K={layers} layers, got {[len(part) for part in (w1, b1, w2, b2)]}")
    by_head = keys[0, :, :, 0].transpose(0, 1)
    check_weights(by_head, by_head, w1[0], b1[0], w2[0], b2[0])


def unrotated(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn keys [..., d] back by angles whose cosines and sines are [..., r / 2]; what is beyond r was never turned."""
    half = cos.shape[-1]
    first, second, rest = keys[..., :half], keys[..., half : 2 * half], keys[..., 2 * half :]
    return torch.cat([first * cos + second * sin, second * cos - first * sin, rest], dim=-1)


def write_gate_step(
    keys: torch.Tensor,
    slots: torch.Tensor,
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
    """Score the keys of a decode step where they lie; see `kvsim_kernels.write_gate.reference.write_gate`.

    Parameters
    ----------
    keys : Tensor [K, batch, Hk, slots, d]
        Of K layers, after RoPE, whose pairs are an element and the one r / 2 further on.
    slots : Tensor [K, batch, Hk] int32
        Where each row's new key lies; below 0 where there is none, whose gate is 0.
    cos, sin : Tensor [K, positions, r / 2]
        Of the angles at `first_position` and the positions after it.
    positions : Tensor [batch] of int
        Where each sequence's key stands.
    w1, b1, w2, b2, eps, dtype
        As there, of each layer: ``[K, ...]``.
    first_position : int

    Returns
    -------
    Tensor [K, batch, Hk]

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(keys, slots, cos, sin, positions, w1, b1, w2, b2)
    at = positions.long() - first_position
    index = slots.clamp(min=0).long()[..., None, None].expand(*slots.shape, 1, keys.shape[4])
    after = keys.gather(3, index)[:, :, :, 0].to(dtype)
    turns = [part[:, at].unsqueeze(2).to(dtype) for part in (cos, sin)]
    before = unrotated(after, *turns)
    gates = torch.stack([
        write_gate(
            before[layer].transpose(0, 1), after[layer].transpose(0, 1), w1[layer], b1[layer], w2[layer], b2[layer],
            eps=eps, dtype=dtype,
        ).t()
        for layer in range(len(keys))
    ])  # fmt: skip
    return gates.masked_fill(slots < 0, 0)
