"""Prices per step: an upper bound on every schedule, and schedules that come close to it.

With a price on each set's places, positions no longer compete: each is kept as long as it pays. What they earn
together, plus the price of all places, bounds every feasible schedule (Lagrange). The prices follow Polyak's
subgradient; positions that no schedule better than the best known one can keep are left out as the bound falls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvsim.oracles.problem import IntArray, Problem
from kvsim.plan import FloatArray

__all__ = ["SLACK", "Priced", "greedy", "options", "price", "rounding", "upper_bound"]

BoolArray = npt.NDArray[np.bool_]

BLOCK = 2**17
"""Elements of a temporary; a megabyte of them stays in a core's cache."""

SLACK = 1e-12
"""Relative room for the rounding of sums."""

FIRST_PACE, PATIENCE, MEMORY = 0.3, 8, 0.9
"""First share of Polyak's step, rounds without a better bound until it is halved, weight of earlier directions."""


@dataclass(frozen=True)
class Priced:
    """What `price` found.

    Attributes
    ----------
    last : array of int
        [N]: the best feasible schedule found, as the last set that keeps each position.
    value : float
        Its mass over all steps.
    bound : float
        No schedule's mass is above it.
    total : array
        [S + 1]: sum of the prices of R_1 .. R_e, over e, of the best bound.
    among : array of int
        The positions that a schedule better than `value` may keep.
    """

    last: IntArray
    value: float
    bound: float
    total: FloatArray
    among: IntArray


def upper_bound(problem: Problem, total: FloatArray) -> tuple[float, IntArray]:
    """Bound every schedule's mass by prices; give the bound and what each position would choose.

    Parameters
    ----------
    problem : Problem
        One group.
    total : array
        [S + 1] running sum of prices of at least 0, from 0.
    """
    earned, last = 0.0, np.empty(problem.born.size, dtype=np.int64)
    for rows in _blocks(problem):
        profit = problem.mass[rows] - total
        last[rows] = profit.argmax(axis=1)
        best = profit[np.arange(profit.shape[0]), last[rows]]
        earned += float((best + total[problem.born[rows] - 1]).sum())
    bound = problem.base + earned + problem.budget * float(total[-1])
    return bound + SLACK * abs(bound), last


def rounding(problem: Problem, total: FloatArray) -> IntArray:
    """Make a feasible schedule of prices: each set keeps those that would earn the most from there on.

    Without prices that is the largest remaining mass. Among equals the newest stay.
    """
    sets, budget = problem.num_sets, problem.budget
    last = problem.born - 1
    prompt = np.flatnonzero(problem.born == 1)
    if not sets:
        return last
    worth = np.empty(prompt.size)
    for rows in _cut(prompt.size, sets + 1):
        worth[rows] = (problem.mass[prompt[rows], 1:] - total[1:]).max(axis=1)
    first = prompt[_top(worth, budget)]
    able = np.concatenate([first, np.flatnonzero((problem.born > 1) & (problem.born <= sets))])
    rank, alive = _ranks(problem, able, total), np.arange(first.size)
    for e in range(1, sets + 1):
        if e > 1:
            alive = np.concatenate([alive, np.flatnonzero(problem.born[able] == e)])
            if alive.size > budget:
                alive = alive[_top(rank[e, alive], budget)]
        last[able[alive]] = e
    return last


def greedy(problem: Problem) -> IntArray:
    """Keep the B positions with the largest remaining mass, at every step."""
    return rounding(problem, np.zeros(problem.num_sets + 1))


def price(
    problem: Problem,
    *,
    tolerance: float = 1e-5,
    rounds: int = 300,
    watch: Callable[[float, float], None] | None = None,
) -> Priced:
    """Find prices whose bound is low and a schedule whose mass is high.

    Parameters
    ----------
    problem : Problem
        One group.
    tolerance : float
        Relative gap at which the search ends.
    rounds : int
        Most steps of the subgradient.
    watch : callable, optional
        Called at each step with (best bound, best mass).
    """
    everyone = np.arange(problem.born.size)
    last = greedy(problem)
    value = problem.value(last)
    total = _first_prices(problem, last)
    best, best_total, stale, pace = np.inf, total, 0, FIRST_PACE
    free, _ = upper_bound(problem, np.zeros_like(total))
    if (problem.counts(last) == problem.counts(np.full_like(last, problem.num_sets))).all():
        return Priced(last, value, free, np.zeros_like(total), everyone[:0])
    whole, among = problem, everyone
    mean, direction = np.diff(total), np.zeros(problem.num_sets)
    for step in range(rounds):
        bound, choice = upper_bound(problem, total)
        if bound < best - 1e-3 * (best - value):
            stale = 0
        if bound < best:
            best, best_total = bound, total
        if watch is not None:
            watch(best, value)
        if step % 10 == 0 or step == rounds - 1:
            for prices in (np.diff(best_total), mean):
                found = _everyone(rounding(problem, _running(prices)), among, whole)
                if (reached := whole.value(found)) > value:
                    last, value = found, reached
            kept = _may_matter(problem, best_total, best, value)
            if kept.sum() < 0.9 * kept.size:
                among, problem = among[kept], _only(problem, kept)
                continue
        if best - value <= tolerance * abs(value):
            break
        stale += 1
        if stale > PATIENCE:
            pace, stale, total, direction = pace / 2, 0, best_total, np.zeros_like(direction)
            continue
        prices, slope = np.diff(total), problem.budget - problem.counts(choice)
        slope = np.where((prices <= 0) & (slope > 0), 0, slope)
        direction = MEMORY * direction + (1 - MEMORY) * slope if direction.any() else slope.astype(np.float64)
        if not (length := float(direction @ direction)):
            break
        prices = np.maximum(0, prices - pace * (bound - value) / length * direction)
        mean = 0.9 * mean + 0.1 * prices
        total = _running(prices)
    return Priced(last, value, max(best, value), best_total, among)


def options(problem: Problem, priced: Priced) -> tuple[Problem, list[IntArray]]:
    """Give the positions in `priced.among`, and for each the last sets that a schedule better than known may choose."""
    part = _only(problem, priced.among)
    bound, _ = upper_bound(part, priced.total)
    room = bound - priced.value + 1e-9 * abs(bound)
    allowed = []
    for rows in _blocks(part):
        profit = part.mass[rows] - priced.total
        near = profit >= profit.max(axis=1, keepdims=True) - room
        allowed += [np.flatnonzero(row) for row in near]
    return part, allowed


def _first_prices(problem: Problem, last: IntArray) -> FloatArray:
    """Price a place from each set on at what the least of the greedy schedule's positions would still add."""
    sets = problem.num_sets
    rest = np.zeros(sets + 2)
    for e in range(1, sets + 1):
        inside = (problem.born <= e) & (last >= e)
        if inside.sum() >= problem.budget:
            rest[e] = (problem.mass[inside, sets] - problem.mass[inside, e - 1]).min()
    prices = np.maximum(0, rest[1 : sets + 1] - rest[2:])
    return _running(prices)


def _running(prices: FloatArray) -> FloatArray:
    """Sum prices of R_1 .. R_S up, from 0."""
    return np.concatenate([[0.0], np.cumsum(prices)])


def _may_matter(problem: Problem, total: FloatArray, bound: float, value: float) -> BoolArray:
    """Mark the positions whose keeping does not push the bound below a known schedule's mass."""
    needed = value - bound - 1e-9 * abs(value)
    marks = np.zeros(problem.born.size, dtype=np.bool_)
    for rows in _blocks(problem):
        profit = problem.mass[rows] - total
        born = problem.born[rows]
        idle = np.arange(profit.shape[0]), born - 1
        start = profit[idle]
        profit[idle] = -np.inf
        marks[rows] = profit.max(axis=1) - start >= needed
    return marks


def _only(problem: Problem, which: BoolArray | IntArray) -> Problem:
    return replace(problem, mass=problem.mass[which], born=problem.born[which])


def _everyone(last: IntArray, among: IntArray, whole: Problem) -> IntArray:
    """Spread a schedule of some positions over all; the others are never kept."""
    spread = whole.born - 1
    spread[among] = last
    return spread


def _ranks(problem: Problem, rows: IntArray, total: FloatArray) -> FloatArray:
    """Give what positions would earn from each set on if kept, at best, over being evicted before it, [S + 1, n]."""
    ranks = np.empty((problem.num_sets + 1, rows.size))
    for part in _cut(rows.size, problem.num_sets + 1):
        profit = problem.mass[rows[part]] - total
        highest = np.maximum.accumulate(profit[:, ::-1], axis=1)[:, ::-1]
        ranks[1:, part] = (highest[:, 1:] - profit[:, :-1]).T
    return ranks


def _top(rank: FloatArray, count: int) -> IntArray:
    """Give the places of the `count` highest, ascending; among equals the last."""
    if count >= rank.size:
        return np.arange(rank.size)
    if count == rank.size - 1:
        return np.delete(np.arange(rank.size), rank.argmin())
    cut = np.partition(rank, rank.size - count)[rank.size - count]
    above, equal = np.flatnonzero(rank > cut), np.flatnonzero(rank == cut)
    return np.sort(np.concatenate([above, equal[equal.size - (count - above.size) :]]))


def _blocks(problem: Problem) -> list[slice]:
    return _cut(problem.born.size, problem.mass.shape[1])


def _cut(count: int, width: int) -> list[slice]:
    size = max(1, BLOCK // width)
    return [slice(first, first + size) for first in range(0, count, size)]
