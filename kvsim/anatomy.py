"""Where two policies part: which tokens one keeps and the other does not, since when, and what later queries give them.

>>> import kvsim
>>> from kvsim.anatomy import dissect
>>> trace = kvsim.open_trace("traces/samples/smollm2-needle-512")  # doctest: +SKIP
>>> dissect(kvsim.replay_many(trace, ["ema:0.8", "cumulative"]), trace).pairs[0].worst(3)  # doctest: +SKIP
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.held import held
from kvsim.mass import group_rows
from kvsim.plan import FloatArray, Groups
from kvsim.result import Result

__all__ = ["Anatomy", "Difference", "Parting", "TokenGain", "dissect"]

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parting:
    """A position in one group that one policy kept and the other did not.

    Attributes
    ----------
    position : int
        The position.
    token : str or None
        Its text, where the recording has texts.
    group : str
        The retention group: ``all layers``, ``layer 3`` or ``layer 3 head 1``.
    kept_by, lost_by : str
        Who held it at the parting, and who did not.
    parted : int
        First step after which one retained it and the other did not; 0 for before the first step.
    held_until : int or None
        Step after which the keeper lost it as well; None for never, and in shadow mode, where sets can return.
    mass_after : float
        Attention that the full cache's rows give it at all later steps, averaged over the group's layers and heads.
    mass_gained : float
        The part of it that the keeper alone could see, less what the other alone could see (in shadow mode, where a
        position can change sides). Summed over positions this is the difference in kept mass, over all steps.
    """

    position: int
    token: str | None
    group: str
    kept_by: str
    lost_by: str
    parted: int
    held_until: int | None
    mass_after: float
    mass_gained: float


@dataclass(frozen=True)
class TokenGain:
    """A position over all groups: what one policy gained by keeping it where the other did not.

    Attributes
    ----------
    position : int
        The position.
    token : str or None
        Its text, where the recording has texts.
    gained_by, other : str
        Who gained on the whole, and who lost.
    groups_gained_by, groups_other : int
        Groups in which the one, or the other, held it at their parting and the other one did not.
    parted : int
        First step after which it parted them in some group.
    mass_after : float
        `Parting.mass_after`, summed over those groups.
    mass_gained : float
        The gain of `gained_by`, summed over groups. Summed over positions, with a sign, and divided by the number of
        groups it is the difference in kept mass, over all steps.
    """

    position: int
    token: str | None
    gained_by: str
    other: str
    groups_gained_by: int
    groups_other: int
    parted: int
    mass_after: float
    mass_gained: float


@dataclass(frozen=True)
class Difference:
    """Two policies on one recording.

    Attributes
    ----------
    a, b : str
        Canonical policies with their budgets.
    jaccard : array
        [T] Jaccard of the two retained sets after each step, averaged over groups.
    equal : array of bool
        [T] whether the retained sets are equal in all groups.
    groups : Groups
        The retention groups, of both.
    texts : list of str or None
        Each position's text, where the recording has texts.
    parted : array of int
        [G, L0+T] step of the parting, -1 for none.
    keeper : array of int
        [G, L0+T] 1 where `a` held it at the parting, -1 where `b` did, 0 for no parting.
    held_until, mass_after, mass_gained : array
        [G, L0+T] as in `Parting`, but -1 for never and with the gain of `a` over `b`.
    """

    a: str
    b: str
    jaccard: FloatArray
    equal: BoolArray
    groups: Groups = field(repr=False)
    texts: list[str] | None = field(repr=False)
    parted: IntArray = field(repr=False)
    keeper: IntArray = field(repr=False)
    held_until: IntArray = field(repr=False)
    mass_after: FloatArray = field(repr=False)
    mass_gained: FloatArray = field(repr=False)

    @property
    def count(self) -> int:
        """Number of partings: of positions that one kept and the other did not, over all groups."""
        return int((self.parted >= 0).sum())

    def worst(self, limit: int | None = None) -> list[Parting]:
        """Give the partings that made the largest difference, by `Parting.mass_gained`, largest first.

        What both lost soon after the parting made little, however much attention it got later.

        Parameters
        ----------
        limit : int, optional
            How many; all by default.
        """
        groups, positions = np.nonzero(self.parted >= 0)
        order = np.argsort(-np.abs(self.mass_gained[groups, positions]), kind="stable")[:limit]
        found = []
        for g, i in zip(groups[order].tolist(), positions[order].tolist(), strict=True):
            keeper, until = int(self.keeper[g, i]), int(self.held_until[g, i])
            kept_by, lost_by = (self.a, self.b) if keeper > 0 else (self.b, self.a)
            found.append(
                Parting(
                    position=i,
                    token=None if self.texts is None else self.texts[i],
                    group=self.groups.label(g),
                    kept_by=kept_by,
                    lost_by=lost_by,
                    parted=int(self.parted[g, i]),
                    held_until=None if until < 0 else until,
                    mass_after=float(self.mass_after[g, i]),
                    mass_gained=keeper * float(self.mass_gained[g, i]) + 0.0,
                )
            )
        return found

    def tokens(self, limit: int | None = None) -> list[TokenGain]:
        """Give the positions that made the largest difference over all groups together, largest first.

        Parameters
        ----------
        limit : int, optional
            How many; all by default.
        """
        apart = self.parted >= 0
        gained = np.where(apart, self.mass_gained, 0).sum(axis=0)
        positions = np.flatnonzero(apart.any(axis=0))
        order = np.argsort(-np.abs(gained[positions]), kind="stable")[:limit]
        found = []
        for i in positions[order].tolist():
            own = apart[:, i]
            by_a, by_b = (int((self.keeper[own, i] == side).sum()) for side in (1, -1))
            (gainer, mine), (other, others) = ((self.a, by_a), (self.b, by_b))[:: 1 if gained[i] >= 0 else -1]
            found.append(
                TokenGain(
                    position=i,
                    token=None if self.texts is None else self.texts[i],
                    gained_by=gainer,
                    other=other,
                    groups_gained_by=mine,
                    groups_other=others,
                    parted=int(self.parted[own, i].min()),
                    mass_after=float(self.mass_after[own, i].sum()),
                    mass_gained=abs(float(gained[i])),
                )
            )
        return found

    def summary(self, limit: int | None = None) -> dict[str, Any]:
        """Give everything, ready for JSON, with the `limit` worst partings and positions."""
        return {
            "a": self.a,
            "b": self.b,
            "jaccard": float(self.jaccard.mean()),
            "jaccard_steps": self.jaccard.tolist(),
            "invariant_steps": float(self.equal.mean()),
            "partings": self.count,
            "groups": self.groups.count,
            "worst": [vars(parting) for parting in self.worst(limit)],
            "worst_tokens": [vars(token) for token in self.tokens(limit)],
        }


@dataclass(frozen=True)
class Anatomy:
    """What `dissect` found.

    Attributes
    ----------
    trace_name, trace_hash : str
        The recording.
    mode : {"irreversible", "shadow"}
        Of all results.
    loops : tuple of str
        Of the results, each once: ``open``, ``closed`` or ``live``.
    policies : list of str
        Canonical policies with their budgets.
    pairs : list of Difference
        Every policy but the first, beside the first.
    """

    trace_name: str
    trace_hash: str
    mode: str
    loops: tuple[str, ...]
    policies: list[str]
    pairs: list[Difference]

    @property
    def equal(self) -> BoolArray:
        """Whether all policies retain the same sets after each step, [T]."""
        equal: BoolArray = np.stack([pair.equal for pair in self.pairs]).min(axis=0)
        return equal

    @property
    def invariant_steps(self) -> float:
        """Share of steps after which all policies retain the same sets."""
        return float(self.equal.mean())

    @property
    def invariant(self) -> bool:
        """Whether all policies retain the same sets after every step."""
        return bool(self.equal.all())

    def summary(self, limit: int | None = None) -> dict[str, Any]:
        """Give everything, ready for JSON, with the `limit` worst partings of each pair."""
        return {
            "trace": self.trace_name,
            "trace_hash": self.trace_hash,
            "mode": self.mode,
            "policies": self.policies,
            "invariant": self.invariant,
            "invariant_steps": self.invariant_steps,
            "pairs": [pair.summary(limit) for pair in self.pairs],
        }


def dissect(results: Sequence[Result], trace: Trace, *, progress: Progress | None = None) -> Anatomy:
    """Compare what policies retained, position by position and step by step.

    InertiaKV's App. I calls an example invariant across temporal rules when all of them answer it alike. A replay
    answers nothing; here a step is invariant when all rules retain the same sets, and a recording when all its steps
    are, which is stricter.

    Parameters
    ----------
    results : sequence of Result
        Replays of different policies, all irreversible or all in shadow mode, with the same kind of groups.
    trace : Trace
        The recording that they are replays of.
    progress : callable, optional
        Called with (steps done, steps in all).

    Raises
    ------
    KvsimError
        If there are fewer than two results, a policy is there twice, or they differ in recording, mode or groups.
    """
    results = list(results)
    _check(results, trace)
    first, *others = results
    groups, steps = first.plan.groups, trace.num_steps
    shape = len(others), groups.count, trace.num_positions
    parted, keeper = np.full(shape, -1, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    after, gained = np.zeros(shape), np.zeros(shape)
    jaccard = np.empty((len(others), steps))
    for t in range(steps + 1):
        own, rivals = held(first, t), np.stack([held(other, t) for other in others])
        apart = own.astype(np.int8) - rivals
        new = (apart != 0) & (parted < 0)
        parted[new], keeper[new] = t, apart[new]
        if t:
            union, both = (own | rivals).sum(axis=2), (own & rivals).sum(axis=2)
            jaccard[:, t - 1] = np.divide(both, union, out=np.ones(union.shape), where=union > 0).mean(axis=1)
            if progress is not None:
                progress(t, steps)
        if t < steps:
            n = trace.prompt_length + t
            mass = group_rows(trace, groups, t + 1)[:, :n]
            after[..., :n] += mass * (parted[..., :n] >= 0)
            gained[..., :n] += mass * apart[..., :n]
    texts = trace.texts() if trace.has("text") else None
    pairs = [
        Difference(
            a=first.policy,
            b=other.policy,
            jaccard=jaccard[k],
            equal=jaccard[k] == 1,
            groups=groups,
            texts=texts,
            parted=parted[k],
            keeper=keeper[k],
            held_until=_until(first, other, keeper[k]),
            mass_after=after[k],
            mass_gained=gained[k],
        )
        for k, other in enumerate(others)
    ]
    loops = tuple(dict.fromkeys(result.loop for result in results))
    return Anatomy(trace.path.name, trace.hash, first.mode, loops, [result.policy for result in results], pairs)


def _check(results: list[Result], trace: Trace) -> None:
    if len(results) < 2:
        raise KvsimError("name at least two policies to compare")
    first = results[0]
    names = [result.policy for result in results]
    for index, result in enumerate(results):
        if result.trace_hash != trace.hash:
            raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
        if result.mode != first.mode:
            raise KvsimError(f"{result.policy} is {result.mode}, {first.policy} {first.mode}: compare one mode only")
        kind, wanted = result.plan.groups.kind, first.plan.groups.kind
        if kind != wanted:
            raise KvsimError(
                f"{first.policy} has group={wanted} and {result.policy} group={kind}: their sets cannot be compared; "
                "give both the same group="
            )
        if result.policy in names[:index]:
            raise KvsimError(f"{result.policy} is given twice")


def _until(a: Result, b: Result, keeper: IntArray) -> IntArray:
    """Give the step after which the keeper lost a position, -1 for never or unknown."""
    if a.mode == "shadow":
        return np.full(keeper.shape, -1, dtype=np.int64)
    return np.where(keeper > 0, a.evicted_at, b.evicted_at).astype(np.int64)
