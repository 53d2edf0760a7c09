"""Merging of partial attentions in plain PyTorch."""

import torch

__all__ = ["check", "merge_partials"]


def check(o1: torch.Tensor, lse1: torch.Tensor, o2: torch.Tensor, lse2: torch.Tensor) -> None:
    """Raise ValueError unless shapes fit."""
    if o1.shape != o2.shape or lse1.shape != o1.shape[:-1] or lse2.shape != lse1.shape:
        raise ValueError(
            f"outputs of shapes {tuple(o1.shape)} and {tuple(o2.shape)} do not fit log-sum-exps of shapes "
            f"{tuple(lse1.shape)} and {tuple(lse2.shape)}: [..., d] and [...] are needed"
        )


def merge_partials(
    o1: torch.Tensor,
    lse1: torch.Tensor,
    o2: torch.Tensor,
    lse2: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attentions of the same queries over disjoint sets of keys into the one over both.

    Parameters
    ----------
    o1, o2 : Tensor [..., d]
        Outputs, each normalised over its own keys.
    lse1, lse2 : Tensor [...]
        Natural logs of the sums of the exponentials of their logits; minus infinity where there was no key, and the
        output is then not read.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Returns
    -------
    output : Tensor [..., d]
        In the type of `o1`; zero where neither had a key.
    lse : Tensor [...]
        Minus infinity there.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(o1, lse1, o2, lse2)
    lse = torch.logaddexp(lse1.to(dtype), lse2.to(dtype))
    base = lse.masked_fill(lse == -torch.inf, 0)
    output = torch.zeros_like(o1, dtype=dtype)
    for o, part in ((o1, lse1), (o2, lse2)):
        weight = torch.exp(part.to(dtype) - base).unsqueeze(-1)
        output = output + torch.where(weight > 0, o.to(dtype) * weight, 0)
    return output if dtype == torch.float64 else output.to(o1.dtype), lse
