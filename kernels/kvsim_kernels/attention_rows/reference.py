"""Attention probabilities in plain PyTorch: what fused attention kernels compute and throw away.

The functions take post-RoPE queries and keys and map query heads onto KV heads as grouped-query attention does: query
head ``h`` reads KV head ``h // (H // Hk)``. Everything is computed in float32 (or wider), whatever the input's type.
"""

from collections.abc import Sequence

import torch

_BLOCK_BYTES = 128 * 2**20
_MAX_BLOCK = 1024


def group_size(query: torch.Tensor, keys: torch.Tensor) -> int:
    """Return how many query heads share a KV head, or raise."""
    if query.shape[0] % keys.shape[0] or query.shape[-1] != keys.shape[-1]:
        raise ValueError(
            f"queries of shape {tuple(query.shape)} do not fit keys of shape {tuple(keys.shape)}: "
            "the head dimension must agree and the number of query heads be a multiple of the number of KV heads"
        )
    return int(query.shape[0] // keys.shape[0])


def _probabilities(logits: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of logits [H, ..., n]; a sink takes part in it and is dropped from the result."""
    if sink_logits is None:
        return torch.softmax(logits, dim=-1)
    sink = sink_logits.to(logits.dtype).view(-1, *([1] * (logits.ndim - 1))).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def attention_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Attention probabilities of a single query over its keys.

    Parameters
    ----------
    query : Tensor [H, d]
        The query of each head.
    keys : Tensor [Hk, n, d]
        The keys it may see; H must be a multiple of Hk.
    scaling : float, optional
        Factor on the dot products, ``d ** -0.5`` by default.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)`` (Gemma 2).
    mask : Tensor [n] or [H, n], optional
        Boolean (True = visible) or additive.
    sink_logits : Tensor [H], optional
        One more logit for each head that takes part in the softmax and is then dropped (gpt-oss), so that a row sums
        to less than one.
    dtype : torch.dtype
        The type everything is computed in, float32 by default.

    Returns
    -------
    Tensor [H, n]
        Probabilities in `dtype`.
    """
    group = group_size(query, keys)
    heads, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    grouped = query.to(dtype).view(heads // group, group, dim)
    logits = (grouped @ keys.to(dtype).transpose(1, 2)).view(heads, keys.shape[1]) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return _probabilities(logits, sink_logits)


def layer_rows(
    queries: torch.Tensor,
    keys: Sequence[torch.Tensor],
    *,
    places: Sequence[int],
    out: torch.Tensor,
    sums: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: Sequence[torch.Tensor] | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the rows of several layers' single queries, as `attention_row` gives each of them.

    Parameters
    ----------
    queries : Tensor [G, H, d]
        One for each layer.
    keys : sequence of Tensor [Hk, n, d]
        One for each layer.
    places : sequence of int
        Where in `out` and `sums` each layer's rows go.
    out : Tensor [K, H, m] or [K, m]
        Gets the rows times `scale` at its last n positions, in its own type; or their mean. What is before those stays.
    sums : Tensor [K, H]
        Gets each row's sum.
    scaling, softcap, dtype
        As in `attention_row`.
    sink_logits : sequence of Tensor [H], optional
        One for each layer.
    scale : float
    """
    for index, place in enumerate(places):
        sinks = None if sink_logits is None else sink_logits[index]
        rows = attention_row(
            queries[index], keys[index], scaling=scaling, softcap=softcap, sink_logits=sinks, dtype=dtype
        )
        sums[place] = rows.sum(-1)
        out[place, ..., out.shape[-1] - rows.shape[-1] :] = (rows.mean(0) if out.ndim == 2 else rows) * scale


def prompt_mass(
    queries: torch.Tensor,
    keys: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    sink_logits: torch.Tensor | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """Sum over all queries of a prompt of the causal attention each position received.

    This is the state H2O starts decoding from. Queries are taken in blocks; the largest temporary holds
    ``H * block * L`` numbers and never L x L.

    Parameters
    ----------
    queries : Tensor [H, L, d]
        The queries of the whole prompt.
    keys : Tensor [Hk, L, d]
        Its keys.
    scaling, softcap, sink_logits
        As in `attention_row`.
    sliding_window : int, optional
        Query i sees positions ``i - sliding_window + 1 .. i`` only.
    chunk_size : int, optional
        Query i sees positions of its own chunk ``i // chunk_size`` only.
    block : int, optional
        Queries in a block; by default so many that a block of float32 logits is at most 128 MiB.

    Returns
    -------
    Tensor [H, L]
        Float32; without sinks each head's mass sums to L.
    """
    group = group_size(queries, keys)
    heads, length, dim = queries.shape
    scaling = dim**-0.5 if scaling is None else scaling
    if block is None:
        block = max(1, min(_MAX_BLOCK, _BLOCK_BYTES // (4 * heads * max(1, length))))
    transposed = keys.float().transpose(1, 2)
    positions = torch.arange(length, device=queries.device)
    mass = torch.zeros(heads, length, dtype=torch.float32, device=queries.device)
    for start in range(0, length, block):
        stop = min(start + block, length)
        first = 0
        if sliding_window is not None:
            first = max(first, start - sliding_window + 1)
        if chunk_size is not None:
            first = max(first, start // chunk_size * chunk_size)
        rows, columns = positions[start:stop, None], positions[None, first:stop]
        grouped = queries[:, start:stop].float().reshape(heads // group, group * (stop - start), dim)
        logits = (grouped @ transposed[:, :, first:stop]).view(heads, stop - start, stop - first).mul_(scaling)
        if softcap is not None:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        hidden = columns > rows
        if sliding_window is not None:
            hidden = hidden | (columns <= rows - sliding_window)
        if chunk_size is not None:
            hidden = hidden | (columns // chunk_size != rows // chunk_size)
        mass[:, first:stop] += _probabilities(logits.masked_fill_(hidden, -torch.inf), sink_logits).sum(dim=1)
    return mass
