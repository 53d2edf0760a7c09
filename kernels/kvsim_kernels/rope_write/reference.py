"""Normalise, rotate and write the vectors of one decode step in plain PyTorch."""

import torch

__all__ = ["check", "rope_write"]


def check(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_slots: torch.Tensor,
    query: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Raise ValueError unless shapes fit."""
    batch, kv_heads, dim = key.shape
    slots = keys.shape[2]
    if keys.shape != (batch, kv_heads, slots, dim) or values.shape != (batch, kv_heads, slots, value.shape[2]):
        raise ValueError(
            f"a key of shape {tuple(key.shape)} and a value of shape {tuple(value.shape)} do not fit a cache of shapes "
            f"{tuple(keys.shape)} and {tuple(values.shape)}: [batch, Hk, d] needs [batch, Hk, slots, d]"
        )
    if new_slots.shape not in ((batch, 1), (batch, kv_heads)):
        raise ValueError(f"new_slots of shape {tuple(new_slots.shape)} must be [batch, 1 or Hk]")
    if query is not None and (query.shape[0] != batch or query.shape[2] != dim):
        raise ValueError(f"a query of shape {tuple(query.shape)} must be [batch, H, d] of the keys")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together")
    if cos is not None and sin is not None and (cos.shape != sin.shape or cos.shape[1] > dim or cos.shape[1] % 2):
        raise ValueError(f"cos of shape {tuple(cos.shape)} must be [positions, an even number up to d], as sin")


def rope_write(
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    new_slots: torch.Tensor,
    *,
    query: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    first_position: int = 0,
    query_norm: torch.Tensor | None = None,
    key_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    value_norms: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write a step's keys and values into their slots, in place, and give the query rotated.

    Parameters
    ----------
    key, value : Tensor [batch, Hk, d]
        Of the step's position; the two may differ in d.
    keys, values : Tensor [batch, Hk, slots, d]
        The cache.
    new_slots : Tensor [batch, 1 or Hk] int32
        Where to write; below 0 for nowhere.
    query : Tensor [batch, H, d], optional
    cos, sin : Tensor [n, r], optional
        Rotary tables of n positions; the first r numbers of queries and keys are turned, halves against halves. Without
        them nothing is turned.
    positions : Tensor [batch] int32, optional
        Position of the step; needed with `cos`.
    first_position : int
        The position of the tables' first row.
    query_norm, key_norm : Tensor [d], optional
        Weights of an RMSNorm of each head that comes before the rotation (Qwen3).
    eps : float
        Of the norms.
    value_norms : Tensor [batch, Hk, slots] float32, optional
        Where to write the L2 norms of the values.

    Returns
    -------
    Tensor [batch, H, d] or None
        The query after norm and rotation, in its own type.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(key, value, keys, values, new_slots, query, cos, sin)
    rows = None
    if cos is not None and sin is not None:
        assert positions is not None
        place = positions.long() - first_position
        rows = cos[place].float().unsqueeze(1), sin[place].float().unsqueeze(1)
    turned = _turned(key, key_norm, eps, rows)
    slots = new_slots.long().expand(key.shape[:2])
    batch, head = (index.flatten() for index in torch.meshgrid(*map(torch.arange, key.shape[:2]), indexing="ij"))
    is_new = slots.flatten().cpu() >= 0
    batch, head, slot = batch[is_new], head[is_new], slots.flatten().cpu()[is_new]
    keys[batch, head, slot] = turned[batch, head].to(keys.dtype)
    values[batch, head, slot] = value[batch, head].to(values.dtype)
    if value_norms is not None:
        value_norms[batch, head, slot] = value[batch, head].float().norm(dim=-1)
    return None if query is None else _turned(query, query_norm, eps, rows).to(query.dtype)


def _turned(
    x: torch.Tensor, norm: torch.Tensor | None, eps: float, rows: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    x = x.float()
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
    if rows is None:
        return x
    cos, sin = rows
    width = cos.shape[-1]
    part, rest = x[..., :width], x[..., width:]
    half = torch.cat([-part[..., width // 2 :], part[..., : width // 2]], dim=-1)
    return torch.cat([part * cos + half * sin, rest], dim=-1)
