"""Gathering admitted keys in plain PyTorch."""

from dataclasses import dataclass

import torch

__all__ = ["Admitted", "check", "gather_admitted"]


@dataclass(frozen=True)
class Admitted:
    """What each KV head admits of a prompt, one head after the other.

    Attributes
    ----------
    keys, values : Tensor [N, d]
        Contiguous. Rows from ``starts[Hk]`` on are undefined.
    positions : Tensor [N] int32
        Ascending within a head.
    starts : Tensor [Hk + 1] int32
        Head h has rows ``starts[h]`` to ``starts[h + 1] - 1``.
    """

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor


def check(key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise ValueError unless shapes and types fit."""
    if key.ndim != 3 or value.shape != key.shape or mask.shape != key.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"a key of shape {tuple(key.shape)}, a value of shape {tuple(value.shape)} and a {mask.dtype} mask "
            f"of shape {tuple(mask.shape)} do not fit: [Hk, L, d] twice and a boolean [Hk, L] are needed"
        )


def gather_admitted(
    key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, *, capacity: int | None = None
) -> Admitted:
    """Gather the keys and values of the positions that are admitted.

    Parameters
    ----------
    key, value : Tensor [Hk, L, d]
    mask : Tensor [Hk, L] bool
        Which positions each KV head admits.
    capacity : int, optional
        Rows to give, of which those beyond the admitted ones are zero; as many as are admitted by default.

    Raises
    ------
    ValueError
        If shapes or types do not fit, or more is admitted than `capacity`.
    """
    check(key, value, mask)
    head, position = mask.nonzero(as_tuple=True)
    count = len(head)
    capacity = count if capacity is None else capacity
    if count > capacity:
        raise ValueError(f"{count} positions are admitted, more than capacity={capacity}")
    rows = [torch.nn.functional.pad(x[head, position], (0, 0, 0, capacity - count)) for x in (key, value)]
    positions = torch.nn.functional.pad(position.int(), (0, capacity - count))
    starts = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    return Admitted(rows[0], rows[1], positions, starts)
