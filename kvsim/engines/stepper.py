"""A policy at work on one sequence, a decode step at a time: the definition of update and eviction.

The reference engine drives it with recorded attention, live decoding with the model's own.
"""

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvsim.control import Decide, Moment
from kvsim.plan import FloatArray, Plan
from kvsim.scoring import attention_scores, head_mean_scores, independent_scores, ranking

__all__ = ["BoolArray", "Step", "Stepper", "top"]

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Step:
    """What one step did.

    Attributes
    ----------
    visible : array of bool
        [G, L0+T]: V_t, what each group's queries could see.
    before : array of bool
        [G, L0+T]: R_{t-1}.
    ties : array of int
        [G] positions on both sides of the cut with the float32 state of the cut.
    margins : array
        [G] how far the lowest state kept lies above the highest one lost, over the larger of the two; infinite where
        nothing is lost.
    """

    visible: BoolArray
    before: BoolArray
    ties: npt.NDArray[np.int64]
    margins: FloatArray


class Stepper:
    """The state and the retained sets of all groups of a plan.

    Parameters
    ----------
    plan : Plan
        What to run. It may be replaced between steps by one that knows more keys, queries or values of the same run.
    prompt, positions : int
        L0, and L0 + T.
    shadow : bool
        Evict nothing: the retained set is the top-B of all positions.
    heads_known : bool
        Whether rows are [K, H, n], to be renormalised over what is visible; else they are head means [K, n].

    Attributes
    ----------
    retained : array of bool
        [G, L0+T]: R_t after the last step.
    evicted_at : array of int32
        [G, L0+T]: the step after which a position was gone, 0 before the first, -1 for never.
    a, b : array
        [T, K] coefficients in use: the plan's, or those its control decided on.
    """

    def __init__(
        self, plan: Plan, prompt: int, positions: int, *, shadow: bool = False, heads_known: bool = True
    ) -> None:
        groups = plan.groups.count
        self.plan, self.prompt, self.shadow, self.heads_known = plan, prompt, shadow, heads_known
        self.state = np.zeros((groups, positions))
        self.state[:, :prompt] = plan.m0
        self.retained = np.zeros((groups, positions), dtype=np.bool_)
        self.retained[:, :prompt] = True
        self.evicted_at = np.full((groups, positions), -1, dtype=np.int32)
        self.a, self.b = (plan.a, plan.b) if plan.control is None else (plan.a.copy(), plan.b.copy())
        self._decide: Decide | None = None if plan.control is None else plan.control.begin(plan)
        self._ring = np.zeros((groups, plan.window, positions))
        if plan.ring is not None:
            self._ring[:, :, :prompt] = plan.ring
        self._updates = 0
        self._guarded = np.zeros((groups, positions), dtype=np.bool_)
        self._peak = np.zeros((groups, positions))
        if shadow:
            plan.check_shadow()
            return
        if plan.admission is not None:
            refused = ~plan.admission.admitted[:, : max(0, plan.admission.leaving(prompt, 0))]
            self._refuse(refused, 0)
        if plan.evicts[0]:
            for g in range(groups):
                visible = np.flatnonzero(self.retained[g])
                self._evict(g, 0, visible, plan.target(g, visible.size, 0))
        self._move_window(0)

    def copy(self) -> "Stepper":
        """Give a stepper that goes its own way from here."""
        other = copy.copy(self)
        for name in ("state", "retained", "evicted_at", "a", "b", "_ring", "_guarded", "_peak"):
            setattr(other, name, getattr(self, name).copy())
        # What a control remembers is its own; the plan is the same.
        other._decide = copy.deepcopy(self._decide, {id(self.plan): self.plan})
        return other

    def visible(self, t: int) -> BoolArray:
        """Mark V_t for each group, [G, L0+T]: what was retained, and the step's own position."""
        marks = self.retained.copy()
        marks[:, self.prompt + t - 1] = True
        return marks

    def step(self, t: int, rows: FloatArray) -> Step:
        """Score step t (from 1), update the states, evict, move the local window on.

        Parameters
        ----------
        t : int
            The step; steps come in order.
        rows : array
            [K, H, n] attention of the eligible layers over positions 0..p_t; what a group does not see may be 0.
            [K, n] without heads. Not read on a step that is not scored or by a scorer that needs no attention.
        """
        plan, groups = self.plan, self.plan.groups.count
        n = self.prompt + t
        marks, before = self.visible(t), self.retained.copy()
        seen = [np.arange(n) if self.shadow else np.flatnonzero(marks[g]) for g in range(groups)]
        if plan.scored[t - 1]:
            scores = [self._scores(g, t, rows, seen[g]) for g in range(groups)]
            if self._decide is not None:
                states = [self.state[g, seen[g]] for g in range(groups)]
                self.a[t - 1], self.b[t - 1] = self._decide(Moment(t, seen, states, scores))
            for g in range(groups):
                self._update(g, t, seen[g], scores[g])
            self._updates += 1
        elif n > 1:
            for g in range(groups):
                if seen[g].size > 1:
                    self.state[g, n - 1] = self.state[g, seen[g][:-1]].mean()
        ties, margins = np.zeros(groups, dtype=np.int64), np.full(groups, np.inf)
        for g in range(groups):
            stay = plan.target(g, seen[g].size, t)
            over = seen[g].size > stay
            if over and (self.shadow or plan.evicts[t]):
                self._rescue(g, seen[g])
            if self.shadow:
                ties[g], margins[g] = self._keep(g, seen[g], int(plan.budgets[g]))
            elif plan.evicts[t] and over:
                ties[g], margins[g] = self._evict(g, t, seen[g], stay)
            else:
                self.retained[g] = marks[g]
        self._move_window(t)
        return Step(marks, before, ties, margins)

    def _scores(self, g: int, t: int, rows: FloatArray, visible: npt.NDArray[np.intp]) -> FloatArray:
        plan = self.plan
        if plan.score.kind != "attention":
            scores = independent_scores(plan.score, plan.groups, g, visible, t)
        elif self.heads_known:
            scores = attention_scores(plan.score, rows, plan.groups, g, visible, renormalise=not self.shadow)
        else:
            scores = head_mean_scores(plan.score, rows, plan.groups, g, visible)
        if plan.rescue is not None:
            self._peak[g, visible] = scores.max(axis=0)
        return scores

    def _update(self, g: int, t: int, visible: npt.NDArray[np.intp], scores: FloatArray) -> None:
        plan, m = self.plan, self.state[g]
        if plan.window:
            self._ring[g, self._updates % plan.window, visible] = scores.sum(axis=0)
            m[visible] = self._ring[g][:, visible].sum(axis=0)
            return
        if plan.reset:
            m[visible] = 0
        for a, b, s in zip(self.a[t - 1], self.b[t - 1], scores, strict=True):
            m[visible] = a * m[visible] + b * s

    def _rescue(self, g: int, visible: npt.NDArray[np.intp]) -> None:
        plan = self.plan
        if plan.rescue is not None and not self._guarded[g].any():
            free = visible[~_protected(visible, plan, g)]
            self._guarded[g] = top(self._peak[g], free, int(plan.rescue[g]), self.state.shape[1])

    def _evict(self, g: int, t: int, visible: npt.NDArray[np.intp], stay: int) -> tuple[int, float]:
        cut = self._keep(g, visible, stay)
        self.evicted_at[g, visible[~self.retained[g, visible]]] = t
        return cut

    def _move_window(self, t: int) -> None:
        """Promote the position that leaves the local window after step t, or let it go."""
        admission = self.plan.admission
        if admission is not None and (place := admission.leaving(self.prompt, t)) >= 0:
            refused = np.zeros((self.plan.groups.count, place + 1), dtype=np.bool_)
            refused[:, place] = ~admission.admitted[:, place]
            self._refuse(refused, t)

    def _refuse(self, refused: BoolArray, t: int) -> None:
        """Let go of marked positions, [G, n]."""
        n = refused.shape[1]
        self.retained[:, :n] &= ~refused
        self.evicted_at[:, :n][refused] = t

    def _keep(self, g: int, visible: npt.NDArray[np.intp], stay: int) -> tuple[int, float]:
        """Retain `stay` of `visible`: protected first, then by float32 rank, then the newest; give ties and margin."""
        plan = self.plan
        rank = ranking(plan, g, self.state[g, visible], visible)
        kept = _protected(visible, plan, g)
        if plan.rescue is not None:
            kept |= self._guarded[g, visible]
        free = np.flatnonzero(~kept)
        room = max(0, stay - (visible.size - free.size))
        # A stable sort keeps equal states in order of position, so the lowest of them is evicted first.
        order = free[np.argsort(rank[free].astype(np.float32), kind="stable")]
        over = max(0, free.size - room)
        lost, stays = order[:over], order[over:]
        kept[stays] = True
        self.retained[g] = False
        self.retained[g, visible] = kept
        if not lost.size or not stays.size:
            return 0, np.inf
        highest, lowest = float(rank[lost].max()), float(rank[stays].min())
        ties = 0
        if np.float32(rank[stays[0]]) == np.float32(highest):
            ties = int((rank[free].astype(np.float32) == np.float32(highest)).sum())
        gap, size = lowest - highest, max(abs(highest), abs(lowest))
        return ties, gap / size if size else 0.0


def top(m: FloatArray, among: npt.NDArray[np.intp], count: int, positions: int) -> BoolArray:
    """Mark the `count` highest of m[among] by float32 value; among equal ones the highest positions."""
    mask = np.zeros(positions, dtype=np.bool_)
    # A stable sort keeps equal states in order of position, so the lowest of them is evicted first.
    order = np.argsort(m[among].astype(np.float32), kind="stable")
    mask[among[order[max(0, among.size - max(0, count)) :]]] = True
    return mask


def _protected(visible: npt.NDArray[np.intp], plan: Plan, g: int) -> BoolArray:
    """Mark the first and the most recent positions that the plan protects."""
    marks: BoolArray = (visible < plan.n_sink[g]) | (visible > visible[-1] - plan.n_recent[g])
    return marks
