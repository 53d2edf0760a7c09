"""One retention group as a problem: what each position would add, kept up to each step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.mass import group_rows
from kvsim.plan import FloatArray, Groups

__all__ = ["Builder", "IntArray", "Problem", "pool", "problems"]

IntArray = npt.NDArray[np.int64]

CHUNK_BYTES = 2**29
"""Gains of as many groups are held at a time as fit in this, or of one."""

BLOCK_STEPS = 64


@dataclass(frozen=True)
class Problem:
    """Choose for each position the last set that keeps it, so that every set has at most `budget` positions.

    ``R_1`` to ``R_S``, S = T - 1, are chosen; step t's query sees ``R_(t-1)`` and its own position, and step 1's the
    whole prompt.

    Attributes
    ----------
    mass : array
        [N, S + 1]: the mass that a position adds when R_e is the last set with it, over e; minus infinity where e is
        before ``born - 1``, which stands for a position that is never kept.
    born : array of int
        [N]: the first set that can keep a position, 1 for the prompt.
    budget : int
        Most positions of a set, B.
    base : float
        Mass that is seen whatever is chosen.
    """

    mass: FloatArray
    born: IntArray
    budget: int
    base: float = 0.0

    @classmethod
    def of_rows(cls, rows: Sequence[FloatArray], prompt: int, budget: int) -> "Problem":
        """Build the problem of explicit rows: step t's over its `prompt` + t positions."""
        builder = Builder(prompt, len(rows))
        for t, row in enumerate(rows, start=1):
            builder.add(t, np.asarray(row, dtype=np.float64))
        return builder.problem(budget)

    @property
    def num_sets(self) -> int:
        """Number of sets that are chosen, S."""
        return int(self.mass.shape[1]) - 1

    def value(self, last: IntArray) -> float:
        """Give the mass seen over all steps when position i is last kept by ``R_last[i]``."""
        return self.base + float(self.mass[np.arange(last.size), last].sum())

    def counts(self, last: IntArray) -> IntArray:
        """Count the positions of R_1 .. R_S."""
        size = self.num_sets + 2
        change = np.bincount(self.born, minlength=size) - np.bincount(last + 1, minlength=size)
        counts: IntArray = np.cumsum(change)[1 : self.num_sets + 1]
        return counts


def pool(parts: Sequence[Problem]) -> Problem:
    """Join groups into one problem: every set has as many positions as all of theirs together, in any group."""
    return Problem(
        mass=np.concatenate([part.mass for part in parts]),
        born=np.concatenate([part.born for part in parts]),
        budget=sum(part.budget for part in parts),
        base=sum(part.base for part in parts),
    )


class Builder:
    """Fills a problem's mass row by row; blocks of steps are transposed at once.

    Parameters
    ----------
    prompt, steps : int
        L0 and T.
    """

    def __init__(self, prompt: int, steps: int) -> None:
        self._prompt, self._steps = prompt, steps
        self._mass = np.zeros((prompt + steps, steps))
        self._block = np.zeros((BLOCK_STEPS, prompt + steps))
        self._base = 0.0

    def add(self, t: int, row: FloatArray) -> None:
        """Take step t's row over its positions; steps come in order."""
        if t == 1:
            self._base += float(row.sum())
        else:
            self._base += float(row[-1])
            self._block[(t - 1) % BLOCK_STEPS, : row.size - 1] = row[:-1]
        if t % BLOCK_STEPS == 0 or t == self._steps:
            first = (t - 1) // BLOCK_STEPS * BLOCK_STEPS
            self._mass[:, first:t] = self._block[: t - first].T
            self._block[:] = 0

    def problem(self, budget: int) -> Problem:
        """Finish: what is kept longer adds up."""
        np.cumsum(self._mass, axis=1, out=self._mass)
        for k in range(2, self._steps + 1):
            self._mass[self._prompt + k - 1, : k - 1] = -np.inf
        born = np.ones(self._prompt + self._steps, dtype=np.int64)
        born[self._prompt :] = np.arange(1, self._steps + 1)
        return Problem(self._mass, born, budget, self._base)


def problems(trace: Trace, groups: Groups, budgets: IntArray) -> Iterator[Problem]:
    """Give each group's problem on a trace, in order; few are in memory at a time.

    Parameters
    ----------
    trace : Trace
        The recording.
    groups : Groups
        The retention groups.
    budgets : array of int
        [G] budgets.
    """
    size = trace.num_positions * trace.num_steps * 8
    chunk = max(1, CHUNK_BYTES // size)
    for first in range(0, groups.count, chunk):
        own = range(first, min(first + chunk, groups.count))
        builders = [Builder(trace.prompt_length, trace.num_steps) for _ in own]
        for t in range(1, trace.num_steps + 1):
            for builder, row in zip(builders, group_rows(trace, groups, t, own), strict=True):
                builder.add(t, row)
        builders.reverse()
        for g in own:
            yield builders.pop().problem(int(budgets[g]))
