"""Who stays, on the device: states, positions and evictions of all groups, updated once a step by a few kernels.

A state is float32 here, where the plain form keeps float64 and rounds to compare: states closer than rounding may be
ranked the other way round. Cuts that close are counted.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_kernels.score_update.kernel import score_update, unscored_update
from kvsim_kernels.seat.kernel import seat
from kvsim_kernels.select.kernel import select_evicted, select_survivors

from kvsim.live.fast.rules import FastRule
from kvsim.live.sequence import NEAR, Sequence

__all__ = ["Ranks", "padded"]

_PAD = 16


def padded(slots: int) -> int:
    """Round a number of slots up, so that rows start where wide loads can."""
    return -(-slots // _PAD) * _PAD


class Ranks:
    """The groups of a batch while positions leave; a row is a sequence, or a layer of one.

    Parameters
    ----------
    rule : FastRule
    sequences : sequence of Sequence
        One for each sequence of the batch, with its plan.
    device : torch.device

    Attributes
    ----------
    state : Tensor [rows, G, slots] float32
    positions : Tensor [rows, G, slots] int32
        Of each slot's token, -1 for an empty one; the slot of the next position is set already.
    lengths : Tensor [rows] int32
        Slots that the next query sees.
    last : Tensor [rows] int32
        Position of the next query.
    new_slots : Tensor [rows, G] int32
        Where its key and value go.
    step : Tensor [1] int32
        The next step, from 1.
    logits, lse : Tensor [K, batch, H, slots], [K, batch, H] float32
        What the layers' attention leaves for the scorer; None where nothing reads them.
    norms : Tensor [K, batch, Hk, slots] float32 or None
        Of the values.
    """

    def __init__(self, rule: FastRule, sequences: Items[Sequence], device: torch.device) -> None:
        plans = [sequence.plan for sequence in sequences]
        groups = plans[0].groups
        self.rule, self.device = rule, device
        self.batch, self.layers = len(plans), len(groups.layers)
        self.heads, self.kv_heads = groups.num_heads, groups.num_kv_heads
        self.by_layer = groups.kind != "shared"
        self.groups = self.kv_heads if groups.kind == "head" else 1
        self.rows = self.batch * (self.layers if self.by_layer else 1)
        self.prompts = [sequence.prefix.length for sequence in sequences]
        steps = sequences[0].steps
        prompts = self._row_values(self.prompts)
        totals = [prompt + steps for prompt in self.prompts]
        budgets = [min(int(plan.budgets[0]), total) for plan, total in zip(plans, totals, strict=True)]
        self.most = [min(budget + 1, total) for budget, total in zip(budgets, totals, strict=True)]
        self.widest = max(min(budget, prompt + 1) for budget, prompt in zip(budgets, self.prompts, strict=True))
        limits = [
            np.stack([np.full_like(plan.n_sink, budget), plan.n_sink, np.minimum(plan.n_recent, budget)], axis=-1)
            for plan, budget in zip(plans, budgets, strict=True)
        ]
        self.limits = self._spread(limits, torch.int32)
        self._caps = self._row_values(self.most)
        self.evicted_at = torch.full((self.rows, self.groups, max(totals)), -1, dtype=torch.int32, device=device)
        self.near = torch.zeros(self.rows, self.groups, steps + 1, dtype=torch.int8, device=device)
        self.last = prompts.clone()
        self.lengths = prompts + 1
        self.new_slots = prompts.view(-1, 1).expand(-1, self.groups).contiguous()
        self.step = torch.ones(1, dtype=torch.int32, device=device)
        slots = padded(max(self.prompts) + 1 if self.is_cut_first else max(self.most))
        self._allocate(slots)
        for row, prompt in enumerate(prompts.tolist()):
            self.positions[row, :, : prompt + 1] = torch.arange(prompt + 1, dtype=torch.int32, device=device)
        start = [np.pad(plan.m0, ((0, 0), (0, slots - plan.m0.shape[1]))) for plan in plans]
        self.state.copy_(self._spread(start, torch.float32))
        self._a, self._b = (torch.tensor(x, dtype=torch.float32, device=device) for x in (rule.a, rule.b))
        self._constant = bool((rule.a == rule.a[0]).all() and (rule.b == rule.b[0]).all())
        self.a, self.b = self._a[0].clone(), self._b[0].clone()
        self._table = None
        if rule.static is not None:
            self._table = torch.tensor(rule.static, dtype=torch.float32, device=device)

    @property
    def slots(self) -> int:
        """Slots of each layer."""
        return int(self.state.shape[2])

    @property
    def is_cut_first(self) -> bool:
        """Whether the first step drops more than one position of some sequence."""
        return any(prompt + 1 > most for prompt, most in zip(self.prompts, self.most, strict=True))

    @property
    def constant(self) -> int | None:
        """Slots that all queries see once the first step has cut: None where rows differ or still fill up."""
        full = all(prompt + 2 >= most for prompt, most in zip(self.prompts, self.most, strict=True))
        return self.most[0] if full and len(set(self.most)) == 1 else None

    def of_layer(self, layer: int) -> slice:
        """Give the rows of an eligible layer, counted among those."""
        return slice(layer * self.batch, (layer + 1) * self.batch) if self.by_layer else slice(None)

    def load_coefficients(self, step: int) -> None:
        """Have the coefficients of a step in place; a copy on the device where steps differ."""
        if not self._constant:
            self.a.copy_(self._a[step - 1])
            self.b.copy_(self._b[step - 1])

    def update(self, *, scored: bool) -> None:
        """Bring the states up to date after a step's attention."""
        rule = self.rule
        if not scored:
            unscored_update(self.state, self.lengths, self.new_slots)
        elif self._table is not None:
            m = torch.zeros_like(self.state) if rule.reset else self.state
            m.scatter_(2, self.new_slots.long().clamp(min=0).unsqueeze(-1), 0)
            later = torch.cat([self.a.flip(0).cumprod(0).flip(0)[1:], self.a.new_ones(1)])
            scores = self._table[self.positions.clamp(min=0).long()]
            self.state.copy_(self.a.prod() * m + (self.b * later).sum() * scores)
        else:
            score_update(
                self.state,
                self._by_row(self.logits),
                self._by_row(self.lse),
                self.lengths,
                self.a,
                self.b,
                new_slots=self.new_slots,
                heads=rule.heads,
                value_norms=None if self.norms is None else self._by_row(self.norms),
                entropy=rule.entropy,
                reset=rule.reset,
            )

    def evict(self) -> None:
        """Evict one position of each group that is over its budget, and seat the next one."""
        cut = (self.state, self.positions, self.lengths, self.limits, self.last)
        seat(
            *cut, select_evicted(*cut), self.step,
            new_slots=self.new_slots, evicted_at=self.evicted_at, near=self.near, margin=NEAR,
        )  # fmt: skip
        self._advance()

    def cut(self) -> torch.Tensor:
        """Evict down to the budgets after the first step, when slots still are positions.

        Returns
        -------
        Tensor [rows, G, width] int32
            The slots that stay, for `kvsim_kernels.compact`. Everything here is the smaller cache's from now on.
        """
        found = select_survivors(
            self.state, self.positions, self.lengths, self.limits, self.last, width=self.widest, ordered=True
        )
        is_kept = found.slots >= 0
        index = found.slots.clamp(min=0).long()
        kept = torch.zeros_like(self.positions).scatter_add_(2, index, is_kept.int()) > 0
        lost = (self.positions >= 0) & ~kept
        known = min(self.slots, self.evicted_at.shape[2])
        self.evicted_at[..., :known].masked_fill_(lost[..., :known], 1)
        self.near[..., 1] = self._near(kept, lost)
        state, slots = self.state.gather(2, index), found.slots
        norms = None if self.norms is None else self._gathered_norms(index, is_kept)
        self._allocate(padded(max(self.most)))
        width = index.shape[2]
        self.state[..., :width] = state.masked_fill_(~is_kept, 0)
        self.positions[..., :width] = slots
        if self.norms is not None and norms is not None:
            self.norms[..., :width] = norms
        self.new_slots.copy_(found.counts)
        following = (self.last + 1).view(-1, 1, 1).expand(-1, self.groups, 1)
        self.positions.scatter_(2, found.counts.long().unsqueeze(-1), following)
        self._advance()
        return slots

    def of_sequence(self, row: int, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Give one sequence's part of a tensor [rows, G, …], [all groups, …], on the host."""
        layers = self.layers if self.by_layer else 1
        own = tensor.view(layers, self.batch, *tensor.shape[1:])[:, row].flatten(0, 1)
        found: npt.NDArray[Any] = own.cpu().numpy()
        return found

    def _advance(self) -> None:
        self.last += 1
        self.step += 1
        torch.minimum(self.last + 1, self._caps, out=self.lengths)

    def _allocate(self, slots: int) -> None:
        shape = (self.rows, self.groups, slots)
        self.state = torch.zeros(shape, device=self.device)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        by_head = (self.layers, self.batch, self.heads, slots)
        # Let go of the larger ones first.
        self.logits = self.lse = self.norms = None
        if self.rule.reads_attention:
            self.logits = torch.empty(by_head, device=self.device)
            self.lse = torch.empty(by_head[:3], device=self.device)
        if self.rule.vnorm:
            self.norms = torch.zeros(self.layers, self.batch, self.kv_heads, slots, device=self.device)

    def _near(self, kept: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """Mark the groups whose cut is closer than rounding, [rows, G]."""
        n_sink, n_recent = self.limits[..., 1:2], self.limits[..., 2:3]
        free = (self.positions >= n_sink) & (self.positions <= self.last.view(-1, 1, 1) - n_recent)
        low = self.state.masked_fill(~lost, -torch.inf).amax(2)
        high = self.state.masked_fill(~(kept & free), torch.inf).amin(2)
        size = torch.maximum(low.abs(), high.abs())
        near = (high - low < NEAR * size) | (size == 0)
        return near & torch.isfinite(low) & torch.isfinite(high)

    def _gathered_norms(self, index: torch.Tensor, is_kept: torch.Tensor) -> torch.Tensor:
        assert self.norms is not None
        shape = (self.layers if self.by_layer else 1, self.batch, self.groups, index.shape[2])
        wide = (self.layers, self.batch, self.kv_heads, index.shape[2])
        return self.norms.gather(3, index.view(shape).expand(wide)) * is_kept.view(shape)

    def _by_row(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """Put what layers do not share, [K, batch, …], into the batch, [1, K * batch, …]."""
        assert tensor is not None
        return tensor.view(1, -1, *tensor.shape[2:]) if self.by_layer else tensor

    def _row_values(self, of_sequences: Items[int]) -> torch.Tensor:
        """Repeat a number of each sequence for each of its rows, [rows] int32."""
        values = torch.tensor(of_sequences, dtype=torch.int32, device=self.device)
        return values.repeat(self.rows // self.batch)

    def _spread(self, of_sequences: Items[npt.NDArray[Any]], dtype: torch.dtype) -> torch.Tensor:
        """Lay out what each sequence has for all its groups, [all groups, …], as [rows, G, …]."""
        layers = self.layers if self.by_layer else 1
        parts = [torch.from_numpy(np.ascontiguousarray(x)).to(self.device, dtype) for x in of_sequences]
        return torch.stack([x.view(layers, self.groups, *x.shape[1:]) for x in parts], dim=1).flatten(0, 1)
