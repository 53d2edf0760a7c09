"""The exact optimum: a linear program whose corners are integral, solved by HiGHS."""

from dataclasses import replace

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from kvsim.errors import KvsimError
from kvsim.oracles.prices import SLACK, Priced, options, price
from kvsim.oracles.problem import IntArray, Problem
from kvsim.plan import FloatArray

__all__ = ["LARGEST", "TooLargeError", "solve"]

LARGEST = 2_000_000
"""Most variables of the linear program."""


class TooLargeError(KvsimError):
    """The linear program would have more variables than allowed."""


def solve(problem: Problem, most: int | None = None) -> Priced:
    """Find a schedule of the largest mass.

    Prices leave few choices open: those that a schedule better than the one found by prices may make. Between two of a
    position's choices it is kept or not throughout, which is one variable of the program.

    Parameters
    ----------
    problem : Problem
        One group.
    most : int, optional
        Most variables of the program; `LARGEST` by default.

    Returns
    -------
    Priced
        The optimum, with the bound that the program's dual values certify.

    Raises
    ------
    TooLargeError
        If the program would have more variables.
    KvsimError
        If HiGHS fails.
    """
    priced = price(problem)
    if priced.bound <= priced.value or not priced.among.size:
        return priced
    part, allowed = options(problem, priced)
    lengths = np.array([choices.size - 1 for choices in allowed])
    count = int(lengths.sum())
    limit = LARGEST if most is None else most
    if count > limit:
        raise TooLargeError(
            f"the exact optimum would be a linear program of {count} variables, more than {limit}; use oracle:bound"
        )
    lowest = np.array([choices[0] for choices in allowed])
    room = part.budget - part.counts(lowest)
    if not count:
        return replace(priced, bound=priced.value + SLACK * abs(priced.value))
    owner = np.repeat(np.arange(lengths.size), lengths)
    first = np.concatenate([choices[:-1] for choices in allowed])
    after = np.concatenate([choices[1:] for choices in allowed])
    gain = part.mass[owner, after] - part.mass[owner, first]

    # Row e - 1: places of R_e. Then, for each two neighbouring variables of a position: the later is not the larger.
    spans = after - first
    columns = np.repeat(np.arange(count), spans)
    rows = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans) + np.repeat(first, spans)
    linked = np.flatnonzero(owner[1:] == owner[:-1])
    chain = part.num_sets + np.arange(linked.size)
    matrix = csr_array(
        (
            np.concatenate([np.ones(rows.size + linked.size), -np.ones(linked.size)]),
            (np.concatenate([rows, chain, chain]), np.concatenate([columns, linked + 1, linked])),
        ),
        shape=(part.num_sets + linked.size, count),
    )
    scale = float(np.abs(gain).max()) or 1.0
    answer = linprog(
        -gain / scale * 1e3,
        A_ub=matrix,
        b_ub=np.concatenate([room, np.zeros(linked.size)]),
        bounds=(0, 1),
        method="highs-ds",
        options={"dual_feasibility_tolerance": 1e-10, "primal_feasibility_tolerance": 1e-10},
    )
    if answer.status != 0:
        raise KvsimError(f"HiGHS found no optimum: {answer.message}")
    chosen = answer.x > 0.5
    if np.abs(answer.x - chosen).max() > 1e-6:
        raise AssertionError("the linear program has a fractional corner")
    last = lowest.copy()
    np.maximum.at(last, owner[chosen], after[chosen])
    prices = np.maximum(0, -answer.ineqlin.marginals[: part.num_sets]) * scale / 1e3
    spread = problem.born - 1
    spread[priced.among] = last
    if (problem.counts(spread) > problem.budget).any():
        raise AssertionError("the linear program overfills a set")
    value = problem.value(spread)
    if value < priced.value:
        spread, value = priced.last, priced.value
    return replace(priced, last=spread, value=value, bound=max(value, _certified(part, allowed, prices)))


def _certified(part: Problem, allowed: list[IntArray], prices: FloatArray) -> float:
    """Bound the schedules that keep to the allowed choices by prices of R_1 .. R_S."""
    total = np.concatenate([[0.0], np.cumsum(prices)])
    lengths = np.array([choices.size for choices in allowed])
    last = np.concatenate(allowed)
    profit = part.mass[np.repeat(np.arange(lengths.size), lengths), last] - total[last]
    best = np.maximum.reduceat(profit, np.cumsum(lengths) - lengths)
    bound = part.base + float((best + total[part.born - 1]).sum()) + part.budget * float(total[-1])
    return bound + SLACK * abs(bound)
