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
from kvsim.live.fast.states import WindowSums, independent_scores, pooled
from kvsim.live.sequence import NEAR, Sequence
from kvsim.plan import Plan

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
    key_scores : Tensor [K, batch, Hk, slots] float32 or None
        Of each layer's keys, where scores are made of those.
    cuts : dict
        Steps that cut a batch of positions away, and what each sequence keeps then.
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
        self.cuts = _cuts(plans, self.prompts, budgets, steps)
        if rule.batch:
            # Nothing leaves one by one.
            budgets = self.most
            self.widest = max(self.most)
        limits = [
            np.stack([np.full_like(plan.n_sink, budget), plan.n_sink, np.minimum(plan.n_recent, budget)], axis=-1)
            for plan, budget in zip(plans, budgets, strict=True)
        ]
        self.limits = self._spread(limits, torch.int32)
        self._caps = self._row_values(self.most)
        # The last column is nobody's.
        shape = self.rows, self.groups, max(totals) + 1
        self.evicted_at = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.near = torch.zeros(self.rows, self.groups, steps + 1, dtype=torch.int8, device=device)
        self.last = prompts.clone()
        self.lengths = prompts + 1
        self.new_slots = prompts.view(-1, 1).expand(-1, self.groups).contiguous()
        self.step = torch.ones(1, dtype=torch.int32, device=device)
        slots = padded(max(self.prompts) + 1 if 1 in self.cuts else max(self.most))
        self._allocate(slots)
        for row, prompt in enumerate(prompts.tolist()):
            self.positions[row, :, : prompt + 1] = torch.arange(prompt + 1, dtype=torch.int32, device=device)
        start = [np.pad(plan.m0, ((0, 0), (0, slots - plan.m0.shape[1]))) for plan in plans]
        self.state.copy_(self._spread(start, torch.float32))
        self._window = self._first_window(plans, slots)
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
    def constant(self) -> int | None:
        """Slots that all queries see once the first step has cut: None where rows differ or still fill up."""
        full = all(prompt + 2 >= most for prompt, most in zip(self.prompts, self.most, strict=True))
        return self.most[0] if full and len(set(self.most)) == 1 and not self.rule.batch else None

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
        if self._window is not None:
            self._window.seat(self.new_slots)
        if not scored:
            unscored_update(self.state, self.lengths, self.new_slots)
        elif self._table is not None or self.key_scores is not None:
            self._independent_update()
        elif self._window is not None:
            scores, one = torch.zeros_like(self.state), torch.ones_like(self.a)
            self._attention_update(scores, one, one, reset=True)
            self._window.take(scores, self.state)
        else:
            self._attention_update(self.state, self.a, self.b, reset=rule.reset)

    def evict(self) -> None:
        """Evict one position of each group that is over its budget, and seat the next one."""
        cut = (self._ranked(), self.positions, self.lengths, self.limits, self.last)
        seat(
            *cut, select_evicted(*cut), self.step,
            new_slots=self.new_slots, evicted_at=self.evicted_at, near=self.near, margin=NEAR,
        )  # fmt: skip
        torch.minimum(self.lengths + 1, self._caps, out=self.lengths)
        self._advance()

    def cut(self, step: int) -> torch.Tensor:
        """Evict down to what `cuts` says for a step; slots are in the order of their positions then.

        The first step's cut makes everything here as small as it will stay; later ones move what stays to the front.

        Returns
        -------
        Tensor [rows, G, width] int32
            The slots that stay, for `kvsim_kernels.compact`.
        """
        rank, limits = self._ranked(), self.limits.clone()
        limits[..., 0] = self._row_values(self.cuts[step]).unsqueeze(-1)
        width = min(self.widest, self.slots)
        found = select_survivors(rank, self.positions, self.lengths, limits, self.last, width=width, ordered=True)
        is_kept = found.slots >= 0
        index = found.slots.clamp(min=0).long()
        kept = torch.zeros_like(self.positions).scatter_add_(2, index, is_kept.int()) > 0
        lost = (self.positions >= 0) & ~kept
        nobody = self.evicted_at.shape[2] - 1
        self.evicted_at.scatter_(2, torch.where(lost, self.positions, nobody).long(), step)
        self.near[..., step] = self._near(rank, kept, lost)
        held = [self.state.gather(2, index).masked_fill_(~is_kept, 0)]
        held.append(self.positions.gather(2, index).masked_fill_(~is_kept, -1))
        norms = None if self.norms is None else self._gathered_norms(index, is_kept)
        slots = padded(max(self.most))
        if step == 1:
            self._allocate(slots)
        for whole, part in zip((self.state, self.positions), held, strict=True):
            whole[..., :width] = part
            whole[..., width:] = 0 if whole is self.state else -1
        if self._window is not None:
            self._window.keep(index, is_kept, slots)
        if self.norms is not None and norms is not None:
            self.norms[..., :width] = norms
        is_room = found.counts < slots
        self.new_slots.copy_(torch.where(is_room, found.counts, -1))
        place = self.new_slots.clamp(min=0).long().unsqueeze(-1)
        following = (self.last + 1).view(-1, 1, 1).expand(-1, self.groups, 1)
        following = torch.where(is_room.unsqueeze(-1), following, self.positions.gather(2, place))
        self.positions.scatter_(2, place, following)
        torch.minimum(found.counts[:, 0] + 1, self._caps, out=self.lengths)
        self._advance()
        return found.slots

    def of_sequence(self, row: int, tensor: torch.Tensor) -> npt.NDArray[Any]:
        """Give one sequence's part of a tensor [rows, G, …], [all groups, …], on the host."""
        layers = self.layers if self.by_layer else 1
        own = tensor.view(layers, self.batch, *tensor.shape[1:])[:, row].flatten(0, 1)
        found: npt.NDArray[Any] = own.cpu().numpy()
        return found

    def _advance(self) -> None:
        self.last += 1
        self.step += 1

    def _attention_update(self, state: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, reset: bool) -> None:
        rule = self.rule
        score_update(
            state,
            self._by_row(self.logits),
            self._by_row(self.lse),
            self.lengths,
            a,
            b,
            new_slots=self.new_slots,
            heads=rule.heads,
            value_norms=None if self.norms is None else self._by_row(self.norms),
            entropy=rule.entropy,
            reset=reset,
        )

    def _independent_update(self) -> None:
        """Update by scores that no attention is needed for, of all layers at once: the recurrence is linear."""
        if self.key_scores is None:
            assert self._table is not None
            scores = self._table[self.positions.clamp(min=0).long()].expand(self.a.numel(), -1, -1, -1)
        else:
            scores = independent_scores(
                self.rule, self.key_scores, self.lengths,
                batch=self.batch, by_layer=self.by_layer, groups=self.groups,
            )  # fmt: skip
        if self._window is not None:
            self._window.take(scores.sum(0), self.state)
            return
        m = torch.zeros_like(self.state) if self.rule.reset else self.state
        m.scatter_(2, self.new_slots.long().clamp(min=0).unsqueeze(-1), 0)
        later = torch.cat([self.a.flip(0).cumprod(0).flip(0)[1:], self.a.new_ones(1)])
        weights = (self.b * later).view(-1, 1, 1, 1)
        self.state.copy_(self.a.prod() * m + (weights * scores).sum(0))

    def _ranked(self) -> torch.Tensor:
        """Give what positions are ranked by."""
        if self.rule.pool == 1:
            return self.state
        return pooled(self.state, self.positions, self.lengths, self.rule.pool)

    def _first_window(self, plans: Items[Plan], slots: int) -> WindowSums | None:
        """Lay out the scores of the queries before step 1."""
        window = self.rule.window
        if not window:
            return None
        places = torch.zeros(window, self.rows, self.groups, slots, device=self.device)
        if plans[0].ring is not None:
            rings = [plan.ring for plan in plans if plan.ring is not None]
            wide = [np.pad(ring, ((0, 0), (0, 0), (0, slots - ring.shape[2]))) for ring in rings]
            places.copy_(self._spread(wide, torch.float32).permute(2, 0, 1, 3))
        return WindowSums(places)

    def _allocate(self, slots: int) -> None:
        shape = (self.rows, self.groups, slots)
        self.state = torch.zeros(shape, device=self.device)
        self.positions = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        by_head = (self.layers, self.batch, self.heads, slots)
        # Let go of the larger ones first.
        self.logits = self.lse = self.norms = self.key_scores = None
        if self.rule.reads_attention:
            self.logits = torch.empty(by_head, device=self.device)
            self.lse = torch.empty(by_head[:3], device=self.device)
        if self.rule.keys is not None:
            self.key_scores = torch.zeros(self.layers, self.batch, self.kv_heads, slots, device=self.device)
        if self.rule.vnorm:
            self.norms = torch.zeros(self.layers, self.batch, self.kv_heads, slots, device=self.device)

    def _near(self, rank: torch.Tensor, kept: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """Mark the groups whose cut is closer than rounding, [rows, G]."""
        n_sink, n_recent = self.limits[..., 1:2], self.limits[..., 2:3]
        free = (self.positions >= n_sink) & (self.positions <= self.last.view(-1, 1, 1) - n_recent)
        low = rank.masked_fill(~lost, -torch.inf).amax(2)
        high = rank.masked_fill(~(kept & free), torch.inf).amin(2)
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


def _cuts(plans: Items[Plan], prompts: Items[int], budgets: list[int], steps: int) -> dict[int, list[int]]:
    """Say at which steps positions leave in batches, and what each sequence keeps then."""
    if not any(plan.batch for plan in plans):
        is_cut = any(prompt > budget for prompt, budget in zip(prompts, budgets, strict=True))
        return {1: budgets} if is_cut else {}
    visible, cuts = list(prompts), dict[int, list[int]]()
    for t in range(1, steps + 1):
        seen = [held + 1 for held in visible]
        visible = [plan.target(0, own, t) for plan, own in zip(plans, seen, strict=True)]
        if visible != seen:
            cuts[t] = visible
    return cuts
