"""What became of every token in one retention group: kept, protected, or thrown away, and what that cost.

>>> import kvsim
>>> from kvsim.fates import fates_of
>>> result = kvsim.replay("traces/samples/smollm2-needle-512", "ema:0.8")  # doctest: +SKIP
>>> fates_of(result).left(step=10)  # doctest: +SKIP
"""

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.mass import group_rows
from kvsim.plan import FloatArray, Groups
from kvsim.result import Result

if TYPE_CHECKING:
    import polars as pl

__all__ = ["FATES", "Fates", "Given", "fates_of", "given_to", "table_of"]

BoolArray = npt.NDArray[np.bool_]
Steps = npt.NDArray[np.int32]

FATES = {
    "absent": "is not generated yet",
    "kept": "is retained after the step",
    "protected": "is retained, and the policy may not evict it",
    "evicted now": "left the retained set after this very step",
    "evicted": "had left it before",
}
"""Name and meaning of what a token can be after a step; `Fates.at` gives their places here."""


@dataclass(frozen=True)
class Fates:
    """The history of every position in one retention group.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    group : int
        The group.
    label : str
        Its name: ``all layers``, ``layer 3`` or ``layer 3 head 1``.
    mode : {"irreversible", "shadow"}
        Of the replay. Only in shadow mode, where sets can return, does a position change sides more than once.
    groups : Groups
        All groups of the replay.
    prompt_length, num_steps : int
        L0 and T.
    starts : array of int32
        [L0+T+1]; ``changes[starts[i]:starts[i + 1]]`` are those of position i.
    changes : array of int32
        The steps after which positions changed sides, ascending for each: out, in, out, ... A position comes in.
    n_sink, n_recent : int
        How many of the first and of the last positions the policy protects. What a policy rescues for good while it
        runs is not among them.
    """

    policy: str
    group: int
    label: str
    mode: str
    groups: Groups
    prompt_length: int
    num_steps: int
    starts: Steps
    changes: Steps
    n_sink: int
    n_recent: int

    @cached_property
    def born(self) -> Steps:
        """[L0+T]: the step at which each position came, 0 for the prompt."""
        positions = np.arange(self.prompt_length + self.num_steps, dtype=np.int32)
        born: Steps = np.maximum(0, positions - self.prompt_length + 1)
        return born

    @cached_property
    def _owners(self) -> npt.NDArray[np.intp]:
        return np.repeat(np.arange(self.starts.size - 1), np.diff(self.starts))

    @cached_property
    def held(self) -> npt.NDArray[np.int64]:
        """[T+1]: tokens that the group retains before step 1 and after each step."""
        return np.array([self.inside(step).sum() for step in range(self.num_steps + 1)])

    def inside(self, step: int) -> BoolArray:
        """Mark the positions that are retained after a step, [L0+T]; 0 is before step 1.

        Raises
        ------
        KvsimError
            If there is no such step.
        """
        step = self._checked(step)
        changed = np.bincount(self._owners[self.changes <= step], minlength=self.born.size)
        inside: BoolArray = (changed % 2 == 0) & (self.born <= step)
        return inside

    def visible(self, step: int) -> BoolArray:
        """Mark V_t, what the query of a step from 1 on can see, [L0+T]."""
        marks = self.inside(self._checked(step, first=1) - 1)
        marks[self.prompt_length + step - 1] = True
        return marks

    def left(self, step: int) -> npt.NDArray[np.int64]:
        """Give the positions that left the retained set after a step, ascending; 0 is before step 1."""
        step = self._checked(step)
        gone = np.unique(self._owners[self.changes == step])
        out: npt.NDArray[np.int64] = gone[~self.inside(step)[gone]]
        return out

    def protected(self, step: int) -> BoolArray:
        """Mark the positions that the policy may not evict after a step while others remain, [L0+T]."""
        positions, end = np.arange(self.born.size), self.prompt_length + self._checked(step)
        marks: BoolArray = (positions < self.n_sink) | (positions >= end - self.n_recent)
        return marks & (positions < end)

    def at(self, step: int) -> npt.NDArray[np.uint8]:
        """Say what each position is after a step, as places in `FATES`, [L0+T]."""
        inside = self.inside(step)
        code = {name: np.uint8(place) for place, name in enumerate(FATES)}
        fates = np.where(self.protected(step), code["protected"], code["kept"])
        fates[~inside] = code["evicted"]
        fates[self.left(step)] = code["evicted now"]
        fates[self.born > step] = code["absent"]
        return fates

    @cached_property
    def first_left(self) -> Steps:
        """[L0+T]: the first step after which each position was out, 0 before step 1, -1 for never.

        Where eviction is irreversible this is `Result.evicted_at`.
        """
        first = np.full(self.born.size, -1, dtype=np.int32)
        some = np.flatnonzero(np.diff(self.starts))
        first[some] = self.changes[self.starts[some]]
        return first

    def _checked(self, step: int, first: int = 0) -> int:
        step = operator.index(step)
        if not first <= step <= self.num_steps:
            raise KvsimError(f"step must be in {first}..{self.num_steps}, got {step}")
        return step


@dataclass(frozen=True)
class Given:
    """What the full cache's attention gives to each position, as one retention group sees it.

    Attributes
    ----------
    mass : array
        [L0+T]: summed over the steps, averaged over the group's layers and heads.
    mass_later : array
        [L0+T]: the part of it that came from queries which could not see the position any more (in shadow mode: while
        it was out). Summed over positions and divided by T, it is 1 minus the group's kept mass.
    """

    mass: FloatArray
    mass_later: FloatArray


def fates_of(result: Result, group: int = 0) -> Fates:
    """Follow every position through a replay.

    Parameters
    ----------
    result : Result
        The replay.
    group : int
        Retention group, 0 to G - 1.

    Raises
    ------
    KvsimError
        If there is no such group.
    """
    groups, plan = result.plan.groups, result.plan
    group = operator.index(group)
    if not 0 <= group < groups.count:
        raise KvsimError(f"group must be in 0..{groups.count - 1}, got {group}")
    if result.outcome.retained is None:
        gone = result.evicted_at[group]
        counts, changes = gone >= 0, gone[gone >= 0]
    else:
        counts, changes = _changes(result.outcome.retained[:, group], result.prompt_length)
    return Fates(
        policy=result.policy,
        group=group,
        label=groups.label(group),
        mode=result.mode,
        groups=groups,
        prompt_length=result.prompt_length,
        num_steps=result.num_steps,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        changes=changes.astype(np.int32),
        n_sink=int(plan.n_sink[group]),
        n_recent=int(plan.n_recent[group]),
    )


def _changes(retained: BoolArray, prompt: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Give how often each position changed sides, and the steps, of the sets [T, L0+T] of every step."""
    steps = np.arange(1, retained.shape[0] + 1)[:, None]
    born = np.maximum(0, np.arange(retained.shape[1]) - prompt + 1)
    before = np.concatenate([np.ones_like(retained[:1]), retained[:-1]])
    before |= steps <= born
    changed = (retained != before) & (steps >= born)
    _, rows = np.nonzero(changed.T)
    return changed.sum(axis=0), rows + 1


def given_to(fates: Fates, trace: Trace, *, progress: Progress | None = None) -> Given:
    """Sum what each position was given, and what of it came too late.

    Parameters
    ----------
    fates : Fates
        A group of a replay of the recording.
    trace : Trace
        The recording.
    progress : callable, optional
        Called with (steps done, steps in all).
    """
    mass, later = np.zeros(trace.num_positions), np.zeros(trace.num_positions)
    for step in range(1, fates.num_steps + 1):
        end = fates.prompt_length + step
        row = group_rows(trace, fates.groups, step, [fates.group])[0]
        mass[:end] += row
        later[:end] += row * ~fates.visible(step)[:end]
        if progress is not None:
            progress(step, fates.num_steps)
    return Given(mass, later)


def table_of(fates: Fates, trace: Trace, given: Given | None = None) -> "pl.DataFrame":
    """Tabulate the group: a row a position.

    Parameters
    ----------
    fates : Fates
        The group.
    trace : Trace
        The recording, for its tokens.
    given : Given, optional
        From `given_to`.

    Returns
    -------
    DataFrame
        `position`; `token` and `id` where the recording has them; `evicted_at` as in `Result`, or in shadow mode
        `first_left` and `times_left`; `mass` and `mass_later` as in `Given`.
    """
    import polars as pl

    columns: dict[str, npt.NDArray[np.generic] | list[str]] = {"position": np.arange(trace.num_positions)}
    if trace.has("text"):
        columns["token"] = trace.texts()
    if trace.tokens is not None:
        columns["id"] = trace.tokens
    if fates.mode == "irreversible":
        columns["evicted_at"] = fates.first_left
    else:
        columns["first_left"] = fates.first_left
        columns["times_left"] = (np.diff(fates.starts) + 1) // 2
    if given is not None:
        columns |= {"mass": given.mass, "mass_later": given.mass_later}
    return pl.DataFrame(columns)
