"""Metrics that need more than the replay: raw top-B sets and attention outputs, in float64 with PyTorch."""

from collections.abc import Callable
from typing import Any

import torch

from kvsim.engines.gpu.rows import Piece
from kvsim.plan import Groups

__all__ = ["OutputErrors", "RawMetrics", "attention_reader"]

CHUNK_BYTES = 2**28
"""Most bytes of masked attention at once."""


class RawMetrics:
    """Compares the retained sets of N groups with raw top-B sets, step after step.

    Parameters
    ----------
    groups : Groups
        The retention groups of every plan.
    steps : int
        T.
    budgets : Tensor of int64
        [P, G].

    Attributes
    ----------
    columns : dict of Tensor
        [P, G, T] for each metric.
    """

    NAMES = ("raw_agreement", "raw_top_evicted", "raw_churn", "newest_wronged")

    def __init__(self, groups: Groups, steps: int, budgets: Any) -> None:
        self._groups, self._budgets = groups, budgets
        shape = (*budgets.shape, steps)
        self.columns = {
            name: torch.full(shape, torch.nan, dtype=torch.float64, device=budgets.device) for name in self.NAMES
        }
        self._before: Any = None

    def step(self, t: int, a: Any, kept: Any) -> None:
        """Take step t (from 0): its attention, float64 [n, K, H], and what is retained after it, bool [P, G, n]."""
        raw = self._raw(a)
        n = a.shape[0]
        both = (raw & kept).sum(-1)
        size, others = raw.sum(-1), kept.sum(-1)
        self.columns["raw_agreement"][..., t] = both / (size + others - both).double()
        self.columns["raw_top_evicted"][..., t] = 1 - both / size.double()
        self.columns["newest_wronged"][..., t] = (raw[..., n - 1] & ~kept[..., n - 1]).double()
        if self._before is not None:
            shared = (raw[..., :-1] & self._before).sum(-1)
            self.columns["raw_churn"][..., t] = 1 - shared / (size + self._before.sum(-1) - shared).double()
        self._before = raw

    def _raw(self, a: Any) -> Any:
        """Mark the highest float32 means of each group, of equal ones the latest: bool [P, G, n]."""
        n, layers, heads = a.shape
        kind, kv_heads = self._groups.kind, self._groups.num_kv_heads
        if kind == "shared":
            means = a.reshape(n, 1, -1)
        elif kind == "layer":
            means = a
        else:
            means = a.reshape(n, layers * kv_heads, heads // kv_heads)
        keys = means.sum(-1).div(means.shape[-1]).float().T
        order = torch.sort(keys, dim=1, stable=True).indices
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(n, device=a.device).expand_as(order))
        return rank >= n - self._budgets[..., None]


class OutputErrors:
    """Computes output errors step after step; `kvsim.engines.output.output_error_of_step` defines them.

    Parameters
    ----------
    groups : Groups
        The retention groups of every plan.
    values : Tensor of float64
        [K, Hk, L0+T, d].
    plans, steps : int
        P and T.

    Attributes
    ----------
    errors : Tensor
        [P, T].
    """

    def __init__(self, groups: Groups, values: Any, plans: int, steps: int) -> None:
        self._groups, self._values = groups, values
        self.errors = torch.zeros((plans, steps), dtype=torch.float64, device=values.device)

    def step(self, t: int, a: Any, visible: Any) -> None:
        """Take step t (from 0): its attention, float64 [n, K, H], and what its queries see, bool [P, G, n]."""
        n, layers, heads = a.shape
        kv_heads = self._groups.num_kv_heads
        rows = a.permute(1, 2, 0).reshape(layers, kv_heads, heads // kv_heads, n)
        values = self._values[:, :, :n]
        full = rows @ values
        norm = full.flatten(1).norm(dim=1)
        plans = visible.shape[0]
        members = {"shared": (1, 1), "layer": (layers, 1), "head": (layers, kv_heads)}[self._groups.kind]
        seen = visible.reshape(plans, *members, 1, n)
        size = max(1, CHUNK_BYTES // (8 * rows.numel()))
        for first in range(0, plans, size):
            masked = rows * seen[first : first + size]
            mass = masked.sum(-1, keepdim=True)
            out = masked @ values / torch.where(mass > 0, mass, 1.0)
            lost = (full - out).flatten(2).norm(dim=2)
            errors = torch.where(norm > 0, lost / torch.where(norm > 0, norm, 1.0), 0.0)
            self.errors[first : first + size, t] = errors.mean(dim=1)


def attention_reader(piece: Piece, prompt: int, layers: int) -> Callable[[int], Any]:
    """Give a function that reads the attention of a step (from 0) of a piece, float64 [n, K, H]."""
    bases = piece.bases.tolist()

    def attention(t: int) -> Any:
        n, width = prompt + t + 1, layers * piece.heads
        rows = piece.data.as_strided((n, width), (piece.stride, 1), bases[t])
        return rows.double().mul_(piece.scale).reshape(n, layers, piece.heads)

    return attention
