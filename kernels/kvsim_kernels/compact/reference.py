"""Compaction of a cache of slots in plain PyTorch."""

import torch

__all__ = ["check", "compact"]


def check(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, width: int) -> None:
    """Raise ValueError unless shapes fit."""
    batch, kv_heads = keys.shape[:2]
    if keys.shape[:3] != values.shape[:3] or slots.shape[0] != batch or slots.shape[1] not in (1, kv_heads):
        raise ValueError(
            f"keys of shape {tuple(keys.shape)}, values of shape {tuple(values.shape)} and slots of shape "
            f"{tuple(slots.shape)} do not fit: [batch, Hk, slots, d] twice and [batch, 1 or Hk, n] are needed"
        )
    if width < slots.shape[2]:
        raise ValueError(f"width={width} is less than the {slots.shape[2]} slots that stay")


def compact(
    keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, *, width: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of some slots.

    Parameters
    ----------
    keys, values : Tensor [batch, Hk, slots, d]
        The cache of one layer; the two may differ in d.
    slots : Tensor [batch, 1 or Hk, n] int32
        Which slots, in the order in which they are to lie, one list for all heads or one for each; below 0 for none.
    width : int, optional
        Slots of the new cache, n by default.

    Returns
    -------
    keys, values : Tensor [batch, Hk, width, d]
        Zero where there is no slot, so that nothing undefined is ever multiplied.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    width = slots.shape[2] if width is None else width
    check(keys, values, slots, width)
    index = torch.nn.functional.pad(slots.long(), (0, width - slots.shape[2]), value=-1)
    index = index.expand(-1, keys.shape[1], -1).unsqueeze(-1)
    moved = [
        old.gather(2, index.clamp(min=0).expand(-1, -1, -1, old.shape[3])).masked_fill(index < 0, 0)
        for old in (keys, values)
    ]
    return moved[0], moved[1]
