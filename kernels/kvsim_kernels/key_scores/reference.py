"""Scores of cached keys in plain PyTorch."""

from typing import Literal

import torch

__all__ = ["KINDS", "Kind", "check", "key_scores"]

Kind = Literal["norm", "cosine"]
KINDS = ("norm", "cosine")


def check(keys: torch.Tensor, lengths: torch.Tensor, kind: str) -> None:
    """Raise ValueError unless shapes fit and the kind is known."""
    if keys.ndim != 4 or lengths.shape != keys.shape[:1]:
        raise ValueError(
            f"keys of shape {tuple(keys.shape)} must be [batch, Hk, slots, d], with a length for each sequence, got "
            f"{tuple(lengths.shape)}"
        )
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")


def key_scores(
    keys: torch.Tensor, lengths: torch.Tensor, kind: Kind, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Score the slots in use by their keys.

    Parameters
    ----------
    keys : Tensor [batch, Hk, slots, d]
    lengths : Tensor [batch] int32
        Slots in use: the first ones.
    kind : {"norm", "cosine"}
        ``norm``: the L2 norm of the key. ``cosine``: minus the cosine between the key and the mean of the unit keys in
        use (KeyDiff, Park et al., 2025); 0 for a zero key, and everywhere where that mean is zero.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Returns
    -------
    Tensor [batch, Hk, slots] float32
        0 from a sequence's length on; the kernel leaves those as they are.

    Raises
    ------
    ValueError
        If shapes do not fit, or the kind is unknown.
    """
    check(keys, lengths, kind)
    used = torch.arange(keys.shape[2], device=keys.device) < lengths.view(-1, 1, 1)
    wide = keys.to(dtype).masked_fill(~used.unsqueeze(-1), 0)
    norms = wide.norm(dim=-1)
    if kind == "norm":
        return norms
    units = wide / norms.masked_fill(norms == 0, 1).unsqueeze(-1)
    anchor = units.sum(dim=2, keepdim=True)
    size = anchor.norm(dim=-1)
    # Adding 0 makes minus zero zero.
    return -((units * anchor).sum(-1) / size.masked_fill(size == 0, torch.inf)) + 0.0
