"""The offline optimum of small instances three ways: linear program, minimum cost flow, every set at every step."""

import numba
import numpy as np
import pytest

from kvsim.oracles import exact, prices
from kvsim.oracles.problem import Problem, pool

PER_SEED = 2500


@numba.njit
def tried(rows, prompt, budget):
    """The largest mass by trying every retained set at every step; sets are bit masks."""
    steps, positions = rows.shape
    best = np.full(1 << positions, -1.0)
    best[(1 << prompt) - 1] = 0.0
    for t in range(steps):
        after = np.full(1 << positions, -1.0)
        for retained in range(1 << positions):
            if best[retained] >= 0:
                visible = retained | (1 << (prompt + t))
                seen = best[retained]
                for i in range(positions):
                    if visible >> i & 1:
                        seen += rows[t, i]
                kept = visible
                while True:
                    size = 0
                    for i in range(positions):
                        size += kept >> i & 1
                    if size <= budget:
                        after[kept] = max(after[kept], seen)
                    if kept == 0:
                        break
                    kept = (kept - 1) & visible
        best = after
    return best.max()


@numba.njit
def flowed(rows, prompt, budget):
    """The largest mass as a minimum cost flow of `budget` places, by successive shortest paths.

    A place goes from slot to slot, R_1 to R_S and on to the sink, at no cost. At a position's first set, and only
    there, it may enter that position's own chain, whose arcs cost minus what the next query gives; it may leave the
    chain at every set.
    """
    steps, positions = rows.shape
    sets = steps - 1
    size = sets + 2 + positions * (sets + 1)
    most = sets + 3 * positions * sets
    tail, head = np.zeros(2 * most, np.int64), np.zeros(2 * most, np.int64)
    room, cost = np.zeros(2 * most), np.zeros(2 * most)
    arcs = 0
    for e in range(1, sets + 1):
        tail[arcs], head[arcs], room[arcs] = e, e + 1, budget
        arcs += 2
    base = rows[0].sum()
    for t in range(1, steps):
        base += rows[t, prompt + t]
    for i in range(positions):
        born = max(1, i - prompt + 1)
        for e in range(born, sets + 1):
            own = sets + 2 + i * (sets + 1) + e
            tail[arcs], head[arcs] = e if e == born else own - 1, own
            room[arcs], cost[arcs] = 1, -rows[e, i]
            arcs += 2
            tail[arcs], head[arcs], room[arcs] = own, e + 1, 1
            arcs += 2
    for k in range(0, arcs, 2):
        tail[k + 1], head[k + 1], cost[k + 1] = head[k], tail[k], -cost[k]
    gained = 0.0
    for _ in range(budget if sets else 0):
        away, via = np.full(size, np.inf), np.full(size, -1)
        away[1] = 0.0
        changed = True
        while changed:
            changed = False
            for k in range(arcs):
                if room[k] > 0 and away[tail[k]] + cost[k] < away[head[k]]:
                    away[head[k]], via[head[k]], changed = away[tail[k]] + cost[k], k, True
        node = sets + 1
        gained -= away[node]
        while node != 1:
            k = via[node]
            room[k] -= 1
            room[k ^ 1] += 1
            node = tail[k]
    return base + gained


def dense(rows):
    """Rows of growing length as one array, zero where a position does not exist yet."""
    table = np.zeros((len(rows), len(rows[-1])))
    for t, row in enumerate(rows):
        table[t, : len(row)] = row
    return table


def seen(rows, prompt, budget, last):
    """The mass of a schedule, step by step, with its sets checked."""
    total = 0.0
    for t, row in enumerate(rows, start=1):
        kept = [i for i in range(prompt + t - 1) if t == 1 or last[i] >= t - 1]
        assert t == 1 or len(kept) <= budget
        total += row[kept].sum() + row[-1]
    return total


def instance(rng, prompt=4, steps=4):
    top = rng.integers(2, 10)
    return [rng.integers(0, top, prompt + t).astype(float) for t in range(1, steps + 1)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_program_flow_and_trying_everything_agree(seed):
    """8 positions x 4 steps with whole numbers, full of ties."""
    rng = np.random.default_rng(seed)
    ties = 0
    for _ in range(PER_SEED):
        rows, budget = instance(rng), int(rng.integers(1, 7))
        problem = Problem.of_rows(rows, 4, budget)
        want = tried(dense(rows), 4, budget)
        assert flowed(dense(rows), 4, budget) == want
        best, priced = exact.solve(problem), prices.price(problem)
        assert best.value == want
        assert want <= best.bound <= want + 1e-8
        assert priced.value <= want <= priced.bound
        for found in (best, priced):
            assert seen(rows, 4, budget, found.last) == found.value
        gains = problem.mass[np.isfinite(problem.mass)]
        ties += np.unique(gains).size < gains.size
    assert ties == PER_SEED


def test_program_and_flow_agree_on_larger_instances():
    rng = np.random.default_rng(9)
    for _ in range(200):
        prompt, steps, budget = int(rng.integers(2, 30)), int(rng.integers(1, 20)), int(rng.integers(1, 12))
        rows = instance(rng, prompt, steps)
        best = exact.solve(Problem.of_rows(rows, prompt, budget))
        assert best.value == flowed(dense(rows), prompt, budget)
        assert seen(rows, prompt, budget, best.last) == best.value


def test_greedy_does_not_answer_such_instances():
    """Else the agreement above would say little."""
    rng = np.random.default_rng(0)
    short = 0
    for _ in range(200):
        rows, budget = instance(rng), int(rng.integers(1, 7))
        problem = Problem.of_rows(rows, 4, budget)
        short += problem.value(prices.greedy(problem)) < tried(dense(rows), 4, budget)
    assert short > 20


def test_a_pooled_budget_of_one_set_takes_the_highest():
    rng = np.random.default_rng(1)
    for _ in range(50):
        parts, total = [instance(rng, 4, 2) for _ in range(3)], int(rng.integers(3, 9))
        problem = pool(
            [Problem.of_rows(rows, 4, budget) for rows, budget in zip(parts, (1, 1, total - 2), strict=True)]
        )
        gains = np.sort(np.concatenate([rows[1][:-1] for rows in parts]))
        seen_anyway = sum(rows[0].sum() + rows[1][-1] for rows in parts)
        assert exact.solve(problem).value == seen_anyway + gains[gains.size - total :].sum()


def test_a_pooled_budget_is_divided_anew_at_every_step():
    rng = np.random.default_rng(2)
    better = 0
    for _ in range(60):
        parts, total = [instance(rng) for _ in range(2)], int(rng.integers(2, 8))
        best = [[exact.solve(Problem.of_rows(rows, 4, b)).value for b in range(1, total + 1)] for rows in parts]
        pooled = exact.solve(pool([Problem.of_rows(rows, 4, b) for rows, b in zip(parts, (1, total - 1), strict=True)]))
        fixed = max(best[0][b - 1] + best[1][total - b - 1] for b in range(1, total))
        assert fixed <= pooled.value <= best[0][-1] + best[1][-1]
        better += pooled.value > fixed
    assert better > 10
