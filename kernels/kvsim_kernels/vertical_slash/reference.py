"""Vertical-slash attention in plain PyTorch."""

from typing import NamedTuple

import torch

__all__ = ["Attended", "check", "vertical_slash_mask", "vertical_slash_reference"]


class Attended(NamedTuple):
    """What the queries found.

    Attributes
    ----------
    output : Tensor [H, L, d]
    lse : Tensor [H, L]
        Natural log of the sum of exp(logits) over what each query sees.
    """

    output: torch.Tensor
    lse: torch.Tensor


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float | None) -> int:
    """Return how many query heads share a KV head, or raise ValueError."""
    heads, length, dim = query.shape
    if key.shape != value.shape or key.shape[1:] != (length, dim) or heads % key.shape[0]:
        raise ValueError(
            f"a query of shape {tuple(query.shape)} does not fit a key of shape {tuple(key.shape)} and a value of "
            f"shape {tuple(value.shape)}: [H, L, d] needs [Hk, L, d] with H a multiple of Hk"
        )
    if window < 1:
        raise ValueError(f"window={window} must be at least 1: a query sees itself")
    if scaling is not None and scaling <= 0:
        raise ValueError(f"scaling={scaling} must be positive")
    return int(heads // key.shape[0])


def vertical_slash_mask(mask: torch.Tensor, window: int, chunk: int | None = None) -> torch.Tensor:
    """Mark what query i sees of key j: ``j <= i`` and (``i - j < window`` or admitted), bool [Hk, L, L].

    Parameters
    ----------
    mask : Tensor [Hk, L] bool
        Which positions are admitted.
    window : int
    chunk : int, optional
        Leave out the admitted keys at or before ``(i // chunk) * chunk - window``, which all queries of i's chunk see.
    """
    i = torch.arange(mask.shape[1], device=mask.device)[:, None]
    j = i.T
    admitted = mask[:, None, :]
    if chunk is not None:
        admitted = admitted & (j > i // chunk * chunk - window)
    return (j <= i) & ((i - j < window) | admitted)


def vertical_slash_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    window: int,
    scaling: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Attended:
    """Attend with every query of a prompt to its last `window` positions and to the admitted ones before.

    The mask of WG-KV, section 4.2: query i sees key j if ``j <= i`` and (``i - j < window`` or j is admitted). Memory
    grows with the square of the length.

    Parameters
    ----------
    query : Tensor [H, L, d]
        Post-RoPE; query head ``h`` reads KV head ``h // (H // Hk)``.
    key, value : Tensor [Hk, L, d]
    mask : Tensor [Hk, L] bool
        Which positions each KV head admits.
    window : int
        Positions seen whatever is admitted, the query's own among them.
    scaling : float, optional
        Factor on the dot products, positive, ``d ** -0.5`` by default.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    chunk : int, optional
        As in `vertical_slash_mask`; `merge_partials` adds what is left out here.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Raises
    ------
    ValueError
        If shapes do not fit, or window or scaling is not positive.
    """
    group = check(query, key, value, window, scaling)
    heads, length, dim = query.shape
    seen = vertical_slash_mask(mask, window, chunk).unsqueeze(1)
    grouped = query.to(dtype).view(heads // group, group, length, dim)
    logits = grouped @ key.to(dtype).unsqueeze(1).transpose(2, 3) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(logits, -1)
    output = (torch.exp(logits - lse.unsqueeze(-1)) @ value.to(dtype).unsqueeze(1)).view(heads, length, dim)
    return Attended(output if dtype == torch.float64 else output.to(query.dtype), lse.view(heads, length))
