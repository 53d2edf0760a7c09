"""Attention of a whole prompt under admission: the last W keys, and of earlier ones those that were admitted."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from kvsim_traces.manifest import LayerInfo

from kvsim.live.attention import Call, attended, masked_logits

__all__ = ["Admitted", "admitted_attention"]

BLOCK_ELEMENTS = 2**25
"""Logits that a block of queries may have; no tensor of all heads is [L, L]."""


@dataclass(frozen=True)
class Admitted:
    """What admission decided about a prompt.

    Attributes
    ----------
    name : str
        The policy's ``admit`` axis.
    window : int
        W: how many recent positions every query sees.
    admitted : array of bool
        [G, L0], G over eligible layers and KV heads.
    scores : array of float32 or None
        [G, L0] gates, where there is a gate.
    """

    name: str
    window: int
    admitted: npt.NDArray[np.bool_]
    scores: npt.NDArray[np.float32] | None = None


def admitted_attention(
    call: Call, info: LayerInfo, admitted: torch.Tensor, windows: torch.Tensor, starts: torch.Tensor
) -> torch.Tensor:
    """Attend within ``(i - j < W) or admitted[j]`` for j <= i (WG-KV section 4.2), block by block of queries.

    Parameters
    ----------
    call : Call
        Of a prefill: as many queries as keys.
    info : LayerInfo
        Kind and window of the layer, which bounds what can be seen at all.
    admitted : Tensor [batch, Hk, n]
        Boolean.
    windows, starts : Tensor [batch]
        W of each row, and its first column that is not padding.

    Returns
    -------
    Tensor [batch, n, H, d]
    """
    batch, heads, length, _ = call.query.shape
    device = call.query.device
    block = max(1, BLOCK_ELEMENTS // (batch * heads * length))
    output = call.query.new_empty(batch, length, heads, call.value.shape[-1])
    windows, starts = (part.view(-1, 1, 1, 1) for part in (windows, starts))
    for first in range(0, length, block):
        last = min(length, first + block)
        own = torch.arange(first, last, device=device)
        columns = torch.arange(last, device=device)
        distance = own[:, None] - columns
        visible = (distance < windows) | admitted[:, :, None, :last]
        visible = visible & (columns >= starts) & _reach(info, own[:, None], columns, starts)
        # Padding sees itself: a softmax over nothing would not be a number.
        visible = visible | (distance == 0)
        part = replace(
            call, query=call.query[:, :, first:last], key=call.key[:, :, :last], value=call.value[:, :, :last]
        )
        output[:, first:last] = attended(part, masked_logits(part, visible), visible)
    return output


def _reach(info: LayerInfo, own: torch.Tensor, columns: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Mark what queries [q, 1] could see of columns [n] in a full cache."""
    seen = columns <= own
    width = info.sliding_window
    if width is None:
        return seen
    if info.type == "chunked_attention":
        # Chunks count from a row's first token.
        chunks = (torch.div(place - starts, width, rounding_mode="floor") for place in (own, columns))
        return seen & (next(chunks) == next(chunks))
    return seen & (columns > own - width)
