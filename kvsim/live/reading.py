"""Selection in a running model: which of the visible positions a step's query reads."""

import torch

from kvsim.plan import Selection

__all__ = ["read_marks"]


def read_marks(
    selection: Selection, visible: torch.Tensor, rows: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: int
) -> torch.Tensor:
    """Mark S_t within V_t for one sequence's decode step, as `kvsim.selecting` defines it.

    Parameters
    ----------
    selection : Selection
    visible : Tensor [Hk, n]
        Boolean, in order of position; the last one is the newest.
    rows : Tensor [H, n]
        Attention of the query heads, of which ``topk`` takes the mean.
    query : Tensor [H, d]
        Post-RoPE.
    key : Tensor [Hk, n, d]
        Post-RoPE.
    window : int
        Last positions that are read in any case, 0 without admission.

    Returns
    -------
    Tensor [Hk, n]
        Boolean.
    """
    kv_heads, length = visible.shape
    if selection.kind == "topk":
        means = rows.double().view(kv_heads, -1, length).mean(dim=1).float().masked_fill(~visible, -1.0)
        # Of equal ones the highest positions: a stable sort leaves them last.
        order = means.argsort(dim=1, stable=True)[:, -selection.tokens :]
        return torch.zeros_like(visible).scatter_(1, order, True) & visible
    return _quest(selection, visible, query, key, window)


def _quest(
    selection: Selection, visible: torch.Tensor, query: torch.Tensor, key: torch.Tensor, window: int
) -> torch.Tensor:
    kv_heads, length = visible.shape
    paged = visible.clone()
    if window:
        # The window is the last visible positions: nothing of it is ever evicted.
        newest = visible.flip(1).cumsum(1).flip(1) <= window
        paged &= ~newest
    place = paged.long().cumsum(1) - 1
    pages = torch.div(place, selection.page, rounding_mode="floor").clamp(min=0)
    count = int(pages.max()) + 1
    # Positions outside pages go to one of their own, which is dropped.
    pages = torch.where(paged, pages, count)
    dim = key.shape[-1]
    index = pages.unsqueeze(-1).expand(-1, -1, dim)
    low, high = (
        torch.full((kv_heads, count + 1, dim), limit, device=key.device).scatter_reduce_(1, index, key.float(), how)
        for limit, how in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    low, high = low[:, :count, :].double(), high[:, :count, :].double()
    grouped = query.double().view(kv_heads, -1, 1, dim)
    filled = torch.isfinite(low[..., 0])
    bounds = torch.maximum(grouped * low.unsqueeze(1), grouped * high.unsqueeze(1)).sum(-1).amax(1)
    bounds = bounds.float().masked_fill(~filled, -torch.inf)
    if not window:
        newest_page = pages[:, -1:]
        bounds.scatter_(1, newest_page, torch.inf)
    take = min(count, (selection.tokens - min(window, length)) // selection.page)
    # Of equal bounds the later page first.
    order = bounds.flip(1).argsort(dim=1, descending=True, stable=True)[:, :take]
    chosen = torch.zeros(kv_heads, count + 1, dtype=torch.bool, device=key.device)
    chosen.scatter_(1, count - 1 - order, True)
    chosen[:, :count] &= filled
    chosen[:, count] = False
    return (visible & ~paged) | chosen.gather(1, pages)
