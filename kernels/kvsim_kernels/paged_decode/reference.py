"""Paged decode attention in plain PyTorch."""

import torch

__all__ = ["PAGE", "check", "page_slots", "paged_decode"]

PAGE = 16


def check(
    query: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    ring: int | None,
) -> None:
    """Raise ValueError unless shapes fit."""
    rows, _, dim = query.shape
    if pool_keys.shape != pool_values.shape or pool_keys.shape[1:] != (PAGE, dim):
        raise ValueError(
            f"pools of shapes {tuple(pool_keys.shape)} and {tuple(pool_values.shape)} do not fit queries of d={dim}: "
            f"[P, {PAGE}, d] twice is needed"
        )
    if table.ndim != 2 or len(table) != rows or lengths.shape != (rows,):
        raise ValueError(
            f"a table of shape {tuple(table.shape)} and lengths of shape {tuple(lengths.shape)} do not fit {rows} rows"
        )
    if ring is not None and ring < 1:
        raise ValueError(f"ring={ring} must be at least 1")


def page_slots(tokens: torch.Tensor, ring: int | None = None) -> torch.Tensor:
    """Give the slot of a row's n-th token, counted along its pages; the rest of the ring's last page is left out."""
    return tokens if ring is None else tokens + torch.where(tokens >= ring, -ring % PAGE, 0)


def paged_decode(
    query: torch.Tensor,
    pool_keys: torch.Tensor,
    pool_values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    ring: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attend with one query a row, KV heads folded into the batch (WG-KV, appendix B).

    Parameters
    ----------
    query : Tensor [R, G, d]
        The query heads of each row's KV head, R = batch * Hk.
    pool_keys, pool_values : Tensor [P, 16, d]
        Pages of all rows. What lies beyond a row's length is not read.
    table : Tensor [R, M] int32
        The pages of each row, in order.
    lengths : Tensor [R] int32
        Tokens of each row, in the first slots of its pages.
    scaling : float, optional
        Factor on the dot products, ``d ** -0.5`` by default.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    ring : int, optional
        The first ``ceil(ring / 16)`` pages are a ring of this many slots; the rest of its last page is left out.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Returns
    -------
    Tensor [R, G, d]
        In the query's type; zero for a row without tokens.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    check(query, pool_keys, pool_values, table, lengths, ring)
    output = torch.zeros_like(query, dtype=dtype)
    for row, length in enumerate(lengths.tolist()):
        slot = page_slots(torch.arange(length, device=query.device), ring)
        page = table[row, slot // PAGE].long()
        keys, values = (pool[page, slot % PAGE].to(dtype) for pool in (pool_keys, pool_values))
        logits = query[row].to(dtype) @ keys.T * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if length:
            output[row] = logits.softmax(-1) @ values
    return output if dtype == torch.float64 else output.to(query.dtype)
