"""Decode attention over a cache of slots in plain PyTorch."""

from typing import NamedTuple

import torch

__all__ = ["Attended", "check", "decode_attention", "visible_slots"]


class Attended(NamedTuple):
    """What one query found.

    Attributes
    ----------
    output : Tensor [batch, H, d]
        In the query's type; zero where nothing was visible.
    logits : Tensor [batch, H, slots] float32, or None
        Scaled and capped dot products, minus infinity for a slot that is not visible; undefined from `lengths` on.
    lse : Tensor [batch, H] float32, or None
        Log of the sum of exp(logits) over the visible slots, sinks left out: ``exp(logits - lse)`` is the attention
        renormalised over what is visible. Minus infinity where nothing is.
    """

    output: torch.Tensor
    logits: torch.Tensor | None
    lse: torch.Tensor | None


def check(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor | None,
    query_positions: torch.Tensor | None,
    window: int | None,
) -> int:
    """Return how many query heads share a KV head, or raise ValueError."""
    batch, heads, dim = query.shape
    if keys.shape != values.shape or keys.shape[0] != batch or keys.shape[3] != dim or heads % keys.shape[1]:
        raise ValueError(
            f"a query of shape {tuple(query.shape)} does not fit keys of shape {tuple(keys.shape)} and values of "
            f"shape {tuple(values.shape)}: [batch, H, d] needs [batch, Hk, slots, d] with H a multiple of Hk"
        )
    if window is not None and (positions is None or query_positions is None or window < 1):
        raise ValueError(f"window={window} must be at least 1 and needs positions and query_positions")
    if positions is not None and (positions.shape[1] not in (1, keys.shape[1]) or positions.shape[2] != keys.shape[2]):
        raise ValueError(f"positions of shape {tuple(positions.shape)} must be [batch, 1 or Hk, slots] of the keys")
    return int(heads // keys.shape[1])


def visible_slots(
    shape: tuple[int, int, int],
    lengths: torch.Tensor,
    positions: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Mark what the queries may see, boolean of `shape` [batch, Hk, slots]; the arguments are `decode_attention`'s."""
    slots = torch.arange(shape[2], device=lengths.device)
    seen = (slots < lengths.view(-1, 1, 1)).expand(shape)
    if positions is not None:
        seen = seen & (positions >= 0)
    if window is not None:
        assert positions is not None
        assert query_positions is not None
        seen = seen & (positions > query_positions.view(-1, 1, 1) - window)
    return seen


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    query_positions: torch.Tensor | None = None,
    window: int | None = None,
    with_logits: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Attended:
    """Attend with one query a sequence.

    Parameters
    ----------
    query : Tensor [batch, H, d]
        Post-RoPE query of each head; query head ``h`` reads KV head ``h // (H // Hk)``.
    keys, values : Tensor [batch, Hk, slots, d]
        The cache. What lies in a slot that is not visible is not read.
    lengths : Tensor [batch] int32
        Slots in use: the first ones.
    scaling : float, optional
        Factor on the dot products, ``d ** -0.5`` by default.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    sink_logits : Tensor [H], optional
        One more logit a head in the softmax of the output (gpt-oss).
    positions : Tensor [batch, 1 or Hk, slots], optional
        Position of each slot's token, below 0 for an empty slot. Without it the slots in use are all visible.
    query_positions : Tensor [batch], optional
        Position of each query; read with `window` only.
    window : int, optional
        See positions ``query_position - window + 1 .. query_position`` only.
    with_logits : bool
        Whether to give logits and log-sum-exp as well.
    dtype : torch.dtype
        The type everything is computed in; float64 is also the type of what is returned.

    Raises
    ------
    ValueError
        If shapes do not fit.
    """
    group = check(query, keys, values, positions, query_positions, window)
    batch, heads, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    seen = visible_slots((batch, keys.shape[1], keys.shape[2]), lengths, positions, query_positions, window)
    grouped = query.to(dtype).view(batch, heads // group, group, dim)
    logits = grouped @ keys.to(dtype).transpose(2, 3) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen.unsqueeze(2), -torch.inf).view(batch, heads, -1)
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if sink_logits is None else torch.logaddexp(lse, sink_logits.to(dtype))
    weights = torch.exp(logits - total.masked_fill(total == -torch.inf, 0).unsqueeze(-1))
    found = values.to(dtype).masked_fill(~seen.unsqueeze(-1), 0)
    output = (weights.view(batch, heads // group, group, -1) @ found).view(batch, heads, dim)
    output = output if dtype == torch.float64 else output.to(query.dtype)
    if not with_logits:
        return Attended(output, None, None)
    wide = torch.promote_types(dtype, torch.float32)
    return Attended(output, logits.to(wide), lse.to(wide))
