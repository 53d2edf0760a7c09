"""Many policies at work on one text, a decode step at a time, in PyTorch: `kvsim.engines.stepper` for linear rules."""

from collections.abc import Sequence as Items
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsim.errors import PolicyError
from kvsim.live.sequence import NEAR
from kvsim.plan import Plan

__all__ = ["Done", "Rules", "State"]


@dataclass(frozen=True)
class State:
    """Where P policies stand.

    Attributes
    ----------
    m : Tensor [P, G, L0 + T] float64
        States of the positions.
    retained : Tensor [P, G, L0 + T] bool
    evicted_at : Tensor [P, G, L0 + T] int32
        See `kvsim.Result.evicted_at`.
    """

    m: torch.Tensor
    retained: torch.Tensor
    evicted_at: torch.Tensor

    def of(self, rows: torch.Tensor) -> "State":
        """Give the state of some policies, a copy."""
        return State(self.m[rows], self.retained[rows], self.evicted_at[rows])

    def of_groups(self, groups: slice) -> "State":
        """Give the state of some groups, a copy."""
        return State(*(part[:, groups].clone() for part in (self.m, self.retained, self.evicted_at)))

    def put(self, rows: torch.Tensor, other: "State") -> None:
        """Take over the state of some policies."""
        for name in ("m", "retained", "evicted_at"):
            getattr(self, name)[rows] = getattr(other, name)

    def where(self, chosen: torch.Tensor, other: "State") -> "State":
        """Give this state for the policies chosen [P], the other one for the rest."""
        marks = chosen.view(-1, 1, 1)
        return State(
            torch.where(marks, self.m, other.m),
            torch.where(marks, self.retained, other.retained),
            torch.where(marks, self.evicted_at, other.evicted_at),
        )


@dataclass(frozen=True)
class Done:
    """What one step did.

    Attributes
    ----------
    state : State
        After it.
    near : Tensor [P]
        Cuts closer than rounding.
    kept_mass : Tensor [P] float64
        Attention on what was visible, averaged over heads, layers and groups.
    """

    state: State
    near: torch.Tensor
    kept_mass: torch.Tensor


class Rules:
    """The plans of P policies with one kind of groups, as tables on a device.

    Sums run over positions, heads and layers in another order than in the reference, so states agree to float64
    rounding; the order of eviction is that of their float32 values, the lowest position first among equals.

    Parameters
    ----------
    plans : sequence of Plan
        Of one prompt; linear rules over attention, averaged over heads.
    prompt, positions : int
        L0, and L0 + T.
    device : torch.device

    Attributes
    ----------
    count, depth, heads : int
        G, K of a group, and query heads that a group has of a layer.
    after, weights : Tensor float64
        [P, T] what a step multiplies the state by, and [P, T, K] each layer's renormalised rows, summed over heads.
    scored, evicts, reset : Tensor of bool
        [P, T], [P, T + 1], [P].
    budgets, sinks, recent : Tensor int64
        [P, G].

    Raises
    ------
    PolicyError
        If a plan does more than that, or groups are of several kinds.
    """

    def __init__(self, plans: Items[Plan], prompt: int, positions: int, device: torch.device) -> None:
        for plan in plans:
            _accept(plan)
        kinds = {plan.groups.kind for plan in plans}
        if len(kinds) > 1:
            raise PolicyError(f"policies of one batch must share a kind of groups, got {', '.join(sorted(kinds))}")
        self.prompt, self.device = prompt, device
        groups = plans[0].groups
        self.count, self.depth = groups.count, groups.depth
        self.heads = groups.num_heads // (groups.num_kv_heads if groups.kind == "head" else 1)
        self.where = torch.arange(positions, device=device)

        def table(arrays: list[Any], dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.stack([np.ascontiguousarray(one) for one in arrays])).to(device, dtype)

        self.after = table([plan.a.prod(axis=1) for plan in plans], torch.float64)
        self.weights = table([plan.b * _later(plan.a) for plan in plans], torch.float64) / self.heads
        self.scored = table([plan.scored for plan in plans], torch.bool)
        self.evicts = table([plan.evicts for plan in plans], torch.bool)
        self.reset = table([plan.reset for plan in plans], torch.bool)
        self.budgets, self.sinks, self.recent = (
            table([getattr(plan, name) for plan in plans], torch.int64) for name in ("budgets", "n_sink", "n_recent")
        )
        self._m0 = table([plan.m0 for plan in plans], torch.float64)

    def of_groups(self, groups: slice) -> "Rules":
        """Give the rules of some of the groups."""
        part = copy(self)
        for name in ("budgets", "sinks", "recent", "_m0"):
            setattr(part, name, getattr(self, name)[:, groups].contiguous())
        part.count = part.budgets.shape[1]
        return part

    def start(self) -> State:
        """Give the state before step 1 of plans that evict nothing before it."""
        shape = *self.budgets.shape, self.where.numel()
        m = torch.zeros(shape, dtype=torch.float64, device=self.device)
        m[..., : self.prompt] = self._m0
        retained = (self.where < self.prompt).expand(shape).clone()
        return State(m, retained, torch.full(shape, -1, dtype=torch.int32, device=self.device))

    def visible(self, state: State, t: torch.Tensor) -> torch.Tensor:
        """Mark what the queries of steps t [P] see, [P, G, L0 + T]."""
        return state.retained | self._newest(t)

    def step(self, rules: torch.Tensor, state: State, t: torch.Tensor, rows: torch.Tensor) -> Done:
        """Score a step, update the states, evict.

        Parameters
        ----------
        rules : Tensor [P] int64
            Which of the plans.
        state : State
            Of P policies.
        t : Tensor [P] int64
            The step of each, from 1.
        rows : Tensor [P, K, H, L0 + T]
            Attention over the full cache, 0 for positions that do not exist yet.
        """
        newest, at = self._newest(t), t - 1
        visible = state.retained | newest
        grouped = (
            rows.reshape(len(rules), self.count, self.depth, -1, rows.shape[-1]).double() * visible[:, :, None, None]
        )
        mass = grouped.sum(dim=-1)
        weights = self.weights[rules, at].view(-1, 1, self.depth, 1)
        shares = torch.where(mass > 0, weights / mass, 0)
        scores = (shares.flatten(2).unsqueeze(2) @ grouped.flatten(2, 3)).squeeze(2)
        before = torch.where(self.reset[rules].view(-1, 1, 1) & visible, 0, state.m)
        after = self.after[rules, at].view(-1, 1, 1)
        others = (state.m * state.retained).sum(-1, keepdim=True) / state.retained.sum(-1, keepdim=True).clamp(min=1)
        m = torch.where(
            self.scored[rules, at].view(-1, 1, 1),
            torch.where(visible, after * before + scores, state.m),
            torch.where(newest, others, state.m),
        )
        lost, near = self._lost(rules, m, visible, t)
        found = State(m, visible & ~lost, torch.where(lost, t.view(-1, 1, 1).int(), state.evicted_at))
        return Done(found, near, mass.mean(dim=(1, 2, 3)))

    def _newest(self, t: torch.Tensor) -> torch.Tensor:
        return self.where == (self.prompt + t - 1).view(-1, 1, 1)

    def _lost(
        self, rules: torch.Tensor, m: torch.Tensor, visible: torch.Tensor, t: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mark what leaves after steps t [P], and count close cuts [P]."""
        newest = (self.prompt + t - 1).view(-1, 1, 1)
        free = (
            visible
            & (self.where >= self.sinks[rules].unsqueeze(-1))
            & (self.where <= newest - self.recent[rules].unsqueeze(-1))
        )
        size, room, budgets = visible.sum(-1), free.sum(-1), self.budgets[rules]
        over = (size > budgets) & self.evicts[rules, t].unsqueeze(1)
        # What is protected stays, even above the budget.
        count = torch.where(over, room - (budgets - (size - room)).clamp(min=0), 0).clamp(min=0)
        bits = (m.float() + 0.0).view(torch.int32)
        ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
        keys = torch.where(free, ordered * 2**32 + self.where, torch.iinfo(torch.int64).max)
        cut = keys.sort(dim=-1).values.gather(2, (count - 1).clamp(min=0).unsqueeze(2))
        lost = free & (keys <= cut) & (count > 0).unsqueeze(2)
        highest = m.masked_fill(~lost, -torch.inf).amax(2)
        lowest = m.masked_fill(~free | lost, torch.inf).amin(2)
        scale = torch.maximum(highest.abs(), lowest.abs())
        near = ((lowest - highest < NEAR * scale) | (scale == 0)) & highest.isfinite() & lowest.isfinite()
        return lost, near.sum(1)


def _later(a: Any) -> Any:
    """Give what the layers after each one multiply its score by, [T, K]."""
    later = np.ones_like(a)
    later[:, :-1] = np.cumprod(a[:, :0:-1], axis=1)[:, ::-1]
    return later


def _accept(plan: Plan) -> None:
    score = plan.score
    found = {
        "coefficients that are chosen on the way": plan.control is not None,
        "a window of scored steps": plan.window > 0,
        "pooled states": plan.pool > 1,
        "when=overflow": plan.batch > 0,
        "a rescue": plan.rescue is not None,
        "redundancy": score.redundancy is not None,
        "scores of other things than attention": score.kind != "attention" and bool(plan.scored.any()),
        "weights of the attention": score.weight is not None or score.entropy or score.pivotal or score.signed,
        "the maximum over heads": score.heads != "mean",
    }
    for what, has in found.items():
        if has:
            raise PolicyError(f"{plan.policy}: the closed loop on the device does not run {what}; closed_loop does")
