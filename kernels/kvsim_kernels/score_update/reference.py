"""Scores of cached slots and their aggregation in plain PyTorch.

A group is a set of heads that share one retained set, and has one state for each slot. ``G`` groups of a layer divide
its query heads evenly: ``G = 1`` for groups of kind ``shared`` and ``layer``, ``G = Hk`` for kind ``head``.
"""

from typing import Literal

import torch

__all__ = ["check", "score_update", "unscored_update"]


def check(
    state: torch.Tensor, logits: torch.Tensor, lse: torch.Tensor, heads: str, value_norms: torch.Tensor | None
) -> int:
    """Return how many query heads a group has, or raise ValueError."""
    batch, groups, slots = state.shape
    layers, _, count, _ = logits.shape
    if logits.shape != (layers, batch, count, slots) or lse.shape != logits.shape[:3] or count % groups:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} and lse of shape {tuple(lse.shape)} do not fit a state of shape "
            f"{tuple(state.shape)}: they must be [K, batch, H, slots], [K, batch, H] and [batch, G, slots], "
            "with H a multiple of G"
        )
    if heads not in ("mean", "max"):
        raise ValueError(f"heads={heads!r} must be 'mean' or 'max'")
    if value_norms is not None:
        kv_heads = value_norms.shape[2]
        if value_norms.shape != (layers, batch, kv_heads, slots) or count % kv_heads or kv_heads % groups:
            raise ValueError(
                f"value_norms of shape {tuple(value_norms.shape)} must be [K, batch, Hk, slots] with H a multiple of "
                f"Hk and Hk a multiple of G; H is {count} and G is {groups}"
            )
    return int(count // groups)


def score_update(
    state: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    lengths: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    new_slots: torch.Tensor | None = None,
    heads: Literal["mean", "max"] = "mean",
    value_norms: torch.Tensor | None = None,
    entropy: bool = False,
    reset: bool = False,
) -> None:
    """Score the visible slots and update their state in place: ``m <- a[l] * m + b[l] * s[l]``, layer after layer.

    The attention of a head, ``exp(logits - lse)``, is multiplied by the norms of the values over their mean over the
    visible slots where these are given, combined over the group's heads, and where asked multiplied by the entropy of
    the result (over its sum) divided by log n. A slot is visible if its logits are not minus infinity; the state of
    other slots is left alone. Layers that do not share a state go into the batch, with K = 1.

    Parameters
    ----------
    state : Tensor [batch, G, slots]
        Updated in place; everything is computed in its type.
    logits : Tensor [K, batch, H, slots]
        Of K layers, as `kvsim_kernels.decode_attention` gives them.
    lse : Tensor [K, batch, H]
        Log-sum-exp of the logits of the visible slots.
    lengths : Tensor [batch] int32
        Slots in use: the first ones.
    a, b : Tensor [K] or [batch, K]
        Coefficients of the step.
    new_slots : Tensor [batch, G] int32, optional
        The slot of the step's own position, whose state starts at 0; below 0 for none.
    heads : {"mean", "max"}
        How the heads of a group are combined.
    value_norms : Tensor [K, batch, Hk, slots], optional
        Norms of the values in the slots (scorer vnorm).
    entropy : bool
        Weight by entropy.
    reset : bool
        Start every slot at 0 (``over=layer``).

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    members = check(state, logits, lse, heads, value_norms)
    batch, groups, slots = state.shape
    inside = torch.arange(slots, device=state.device) < lengths.view(-1, 1)
    m = torch.zeros_like(state) if reset else state.clone()
    if new_slots is not None:
        m.masked_fill_(torch.arange(slots, device=state.device) == new_slots.unsqueeze(-1), 0)
    seen = torch.zeros_like(state, dtype=torch.bool)
    for layer in range(logits.shape[0]):
        row = logits[layer].to(state.dtype).masked_fill(~inside.unsqueeze(1), -torch.inf)
        seen_by = row != -torch.inf
        p = torch.where(seen_by, torch.exp(row - lse[layer].to(state.dtype).unsqueeze(-1)), 0)
        if value_norms is not None:
            share = row.shape[1] // value_norms.shape[2]
            norms = value_norms[layer].to(state.dtype).repeat_interleave(share, dim=1).masked_fill(~seen_by, 0)
            mean = norms.sum(-1, keepdim=True) / seen_by.sum(-1, keepdim=True)
            p = torch.where(mean > 0, p * norms / mean, 0)
        p = p.view(batch, groups, members, slots)
        s = p.amax(2) if heads == "max" else p.mean(2)
        seen = seen_by.view(batch, groups, members, slots).any(2)
        if entropy:
            share_of_mass = s / s.sum(-1, keepdim=True)
            spread = -torch.special.xlogy(share_of_mass, share_of_mass).sum(-1, keepdim=True).nan_to_num(0)
            count = seen.sum(-1, keepdim=True).to(state.dtype)
            s = torch.where(count > 1, s * spread / torch.log(count), s)
        m = a[..., layer, None, None] * m + b[..., layer, None, None] * s
    state.copy_(torch.where(seen, m, state))


def unscored_update(
    state: torch.Tensor,
    lengths: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
) -> None:
    """On a step that is not scored, give the new position the mean of the states of the other visible slots, in place.

    Parameters
    ----------
    state : Tensor [batch, G, slots]
        Updated in place.
    lengths : Tensor [batch] int32
        Slots in use: the first ones.
    new_slots : Tensor [batch, G] int32
        The slot of the step's own position; below 0 for none.
    positions : Tensor [batch, 1 or G, slots], optional
        Position of each slot's token, below 0 for an empty slot. Without it the slots in use are all visible.
    """
    slots = torch.arange(state.shape[-1], device=state.device)
    new = slots == new_slots.unsqueeze(-1)
    others = (slots < lengths.view(-1, 1, 1)) & ~new
    if positions is not None:
        others = others & (positions >= 0)
    total = torch.where(others, state, 0).sum(-1, keepdim=True)
    state.copy_(torch.where(new, total / others.sum(-1, keepdim=True).clamp(min=1), state))
