"""The offline optimum: exact answers, bounds that hold, and policies that never beat them."""

import itertools
from functools import cache

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from scipy.optimize import linprog
from typer.testing import CliRunner

import kvsim
from kvsim import oracle
from kvsim.cli import app
from kvsim.engines import ENGINES
from kvsim.oracles import exact, prices
from kvsim.oracles.problem import Problem
from kvsim.plan import GROUP_KINDS

NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
RIVALS = [
    "single",
    "cumulative",
    "ema:0.8",
    "ema:0.95,over=step",
    "ema:0.8/refresh=first",
    "ema:0.8/when=overflow",
    "streaming:1",
    "random:3",
    "oracle:future",
]


def enumerated(rows, prompt, budget):
    """The largest mass by trying every retained set at every step."""

    @cache
    def best(t, retained):
        if t == len(rows):
            return 0.0
        visible = retained | {prompt + t}
        seen = sum(rows[t][i] for i in visible)
        if len(visible) <= budget:
            return seen + best(t + 1, visible)
        return seen + max(best(t + 1, frozenset(kept)) for kept in itertools.combinations(sorted(visible), budget))

    return best(0, frozenset(range(prompt)))


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


@pytest.mark.parametrize("seed", range(4))
def test_program_and_enumeration_agree_on_small_instances(seed):
    """8 positions x 4 steps with whole numbers, full of ties."""
    rng = np.random.default_rng(seed)
    for _ in range(500):
        rows, budget = instance(rng), int(rng.integers(1, 7))
        problem = Problem.of_rows(rows, 4, budget)
        want = enumerated(rows, 4, budget)
        best, priced = exact.solve(problem), prices.price(problem)
        assert best.value == pytest.approx(want, abs=1e-9)
        assert seen(rows, 4, budget, best.last) == pytest.approx(best.value, abs=1e-9)
        assert seen(rows, 4, budget, priced.last) == pytest.approx(priced.value, abs=1e-9)
        assert priced.value <= want + 1e-9
        assert want <= best.bound <= want + 1e-8
        assert want <= priced.bound


def test_program_without_prices_agrees_with_a_flow():
    """The textbook flow: places go from set to set, a position's chain of arcs carries them while it is kept."""
    rng = np.random.default_rng(9)
    for _ in range(150):
        prompt, steps, budget = int(rng.integers(2, 7)), int(rng.integers(2, 8)), int(rng.integers(1, 5))
        rows = instance(rng, prompt, steps)
        problem = Problem.of_rows(rows, prompt, budget)
        assert exact.solve(problem).value == pytest.approx(flow(rows, prompt, budget), abs=1e-7)


def flow(rows, prompt, budget):
    """Minimum cost flow as its node-arc program; prompt positions start at once, others when they are made.

    Node e holds the places free in R_e; keeping a position for R_born..R_e is an arc that takes a place at its birth
    and gives it back after e, which is a sum of unit arcs once every position may be kept once.
    """
    steps = len(rows)
    arcs, base = [], rows[0].sum() + sum(row[-1] for row in rows[1:])
    for i in range(prompt + steps):
        born = max(1, i - prompt + 1)
        for e in range(born, steps):
            arcs.append((i, born, e + 1, sum(rows[t][i] for t in range(born, e + 1))))
    conserve = np.zeros((steps, len(arcs) + steps - 1))
    once = np.zeros((prompt + steps, conserve.shape[1]))
    for k, (i, start, end, _) in enumerate(arcs):
        conserve[start - 1, k] += 1
        conserve[end - 1, k] -= 1
        once[i, k] = 1
    for e in range(steps - 1):
        conserve[e, len(arcs) + e] += 1
        conserve[e + 1, len(arcs) + e] -= 1
    supply = np.zeros(steps)
    supply[0], supply[-1] = budget, -budget
    cost = np.concatenate([[-gain for *_, gain in arcs], np.zeros(steps - 1)])
    answer = linprog(cost, A_ub=once, b_ub=np.ones(len(once)), A_eq=conserve, b_eq=supply, bounds=(0, None))
    return base - answer.fun


@pytest.mark.parametrize(
    ("group", "budget"), [("shared", "10%"), ("shared", "25%"), ("layer", "10%"), ("layer", "40%"), ("head", "20%")]
)
@pytest.mark.parametrize("sample", NAMES)
def test_order_on_the_samples(sample, group, budget):
    """Policy <= exact <= bound, rounding <= exact, and the bound is close."""
    trace = kvsim.open_trace(SAMPLES / sample)
    if group == "head" and trace.capture == "scores":
        with pytest.raises(kvsim.PolicyError, match="group=head needs attention of single heads"):
            kvsim.replay(trace, f"oracle:exact/group={group}", budget=budget)
        return
    texts = [f"{rival}/group={group}" for rival in (*RIVALS, "oracle:bound", "oracle:exact")]
    results = kvsim.replay_many(trace, texts, budget=budget, shadow_churn=False)
    kept = [float(result.outcome.metrics["kept_mass"].mean()) for result in results]
    bounded, best = results[-2], results[-1]
    for text, mass in zip(texts, kept, strict=True):
        assert mass <= kept[-1] * (1 + 1e-9), text
    assert kept[-1] <= bounded.oracle_bound
    assert bounded.oracle_gap < 7e-3
    assert best.oracle_gap < 1e-8
    for result, mass in zip(results, kept, strict=True):
        assert oracle.gap(result, trace, "exact") == pytest.approx(1 - mass / kept[-1], abs=1e-8)
        assert oracle.gap(result, trace) >= oracle.gap(result, trace, "exact") - 1e-12


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("group", GROUP_KINDS)
@pytest.mark.parametrize("method", oracle.METHODS)
def test_what_is_replayed_is_the_schedule(tmp_path, method, group, engine):
    trace = write_trace(tmp_path / "t", seed=5, steps=20)
    result = kvsim.replay(trace, f"oracle:{method}/group={group}", budget=7, engine=engine)
    best = oracle.optimum(trace, result.plan.groups, 7, method)
    assert result.summary()["kept_mass"] == pytest.approx(best.kept_mass, abs=1e-12)
    assert result.summary()["oracle_bound"] == best.bound
    assert result.oracle_gap == pytest.approx(best.gap, abs=1e-12)
    assert result.evicted_at[:, :40].min() >= -1
    for t in range(1, 20):
        for g in range(result.plan.groups.count):
            kept = set(result.retained(t, g).tolist())
            assert {i for i in np.flatnonzero(best.last[g] >= t).tolist() if i < 40 + t} <= kept


def test_greedy_is_far_from_the_optimum_where_one_late_peak_blocks_many_early_ones(tmp_path):
    """Each generated position matters to the next step only, and position 0 slightly more, at the very end."""
    steps, prompt = 40, 8
    rows = np.zeros((steps, 1, 1, prompt + steps), dtype=np.float32)
    rows[0, ..., 0] = 1
    for t in range(2, steps):
        rows[t - 1, ..., prompt + t - 2] = 0.5
        rows[t - 1, ..., prompt + t - 1] = 0.5
    rows[-1, ..., 0] = 1
    trace = write_trace(tmp_path / "t", attention=rows, prompt=prompt, kv_heads=1)
    masses = [kvsim.replay(trace, f"oracle:{m}", budget=1).summary()["kept_mass"] * steps for m in oracle.METHODS]
    assert masses == pytest.approx([1 + 0.5 * (steps - 2) + 1, steps - 1, steps - 1], abs=1e-6)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ("when=prefill", "when=prefill"),
        ("when=overflow", "when=overflow"),
        ("refresh=2", "refresh=2"),
        ("score=vnorm", "score=vnorm"),
        ("protect=sink:1", "protect=sink:1"),
    ],
)
def test_axes_that_contradict_are_refused(tmp_path, axes, named):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(kvsim.PolicyError, match=named):
        kvsim.replay(trace, f"oracle:exact/{axes}")


def test_unknown_methods_and_budgets_are_refused(tmp_path):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(kvsim.PolicyError, match="future"):
        kvsim.parse("oracle:past")
    result = kvsim.replay(trace, "tova")
    with pytest.raises(kvsim.KvsimError, match="valid: bound, exact, future"):
        oracle.optimum(trace, result.plan.groups, 5, "past")
    with pytest.raises(kvsim.KvsimError, match="at least 1 token, got 0"):
        oracle.optimum(trace, result.plan.groups, 0)
    with pytest.raises(kvsim.KvsimError, match="valid: bound, exact"):
        oracle.gap(result, trace, "future")
    with pytest.raises(kvsim.KvsimError, match="lets the cache grow"):
        oracle.gap(kvsim.replay(trace, "knorm/when=prefill"), trace)
    with pytest.raises(kvsim.KvsimError, match="sets can return"):
        oracle.gap(kvsim.replay(trace, "tova", shadow=True), trace)
    with pytest.raises(kvsim.KvsimError, match="is a replay of"):
        oracle.gap(result, write_trace(tmp_path / "other", seed=1))


def test_too_large_a_program_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(exact, "LARGEST", 0)
    with pytest.raises(kvsim.KvsimError, match="use oracle:bound"):
        kvsim.replay(write_trace(tmp_path / "t", seed=77, steps=24), "oracle:exact", budget=6)


@pytest.mark.parametrize("method", oracle.METHODS)
@pytest.mark.parametrize(("steps", "budget"), [(1, 5), (2, 1), (12, 500), (12, 52), (12, 51), (12, 1)])
def test_bad_input_gives_defined_values(tmp_path, method, steps, budget):
    trace = write_trace(tmp_path / "t", steps=steps)
    result = kvsim.replay(trace, f"oracle:{method}", budget=budget)
    assert 0 <= result.oracle_gap < (0.2 if method == "future" else 2e-4)
    assert np.isfinite(result.oracle_bound)
    if budget > 51 or steps == 1:
        assert result.oracle_gap == pytest.approx(0, abs=1e-9)
    assert kvsim.replay(trace, f"oracle:{method}", budget=budget, shadow=True).oracle_bound is None


def test_rows_of_zeros_have_nothing_to_keep():
    problem = Problem.of_rows([np.zeros(5 + t) for t in range(1, 9)], 5, 2)
    for found in (prices.price(problem), exact.solve(problem)):
        assert found.value == found.bound == 0
        assert (problem.counts(found.last) <= 2).all()
    assert oracle.Optimum(found.last[None], 0.0, 0.0).gap == 0


def test_full_has_no_gap(tmp_path):
    trace = write_trace(tmp_path / "t")
    assert oracle.gap(kvsim.replay(trace, "full"), trace, "exact") == pytest.approx(0, abs=1e-12)


def test_constant_scores(tmp_path):
    rows = np.zeros((12, 1, 1, 52), np.float32)
    for t in range(12):
        rows[t, ..., : 41 + t] = 1 / (41 + t)
    trace = write_trace(tmp_path / "t", attention=rows, kv_heads=1)
    masses = [kvsim.replay(trace, f"oracle:{method}", budget=9).summary()["kept_mass"] for method in oracle.METHODS]
    assert max(masses) - min(masses) < 1e-12


def test_prices_scale():
    """A larger instance than a program in full would like, with a bound within a thousandth."""
    rng = np.random.default_rng(0)
    taste, drift = 1.5 * rng.normal(size=2128), np.zeros(2128)
    rows = []
    for t in range(1, 129):
        drift = 0.95 * drift + 0.3 * rng.normal(size=2128)
        weights = np.exp(taste + 2 * drift)[: 2000 + t]
        rows.append(weights / weights.sum())
    priced = prices.price(Problem.of_rows(rows, 2000, 200))
    assert 0 <= priced.bound - priced.value < 1e-3 * priced.bound


def test_the_command_prints_bound_and_gap():
    run = CliRunner().invoke(
        app, ["replay", "--trace", str(SAMPLES / NAMES[0]), "--policy", "oracle:bound", "--policy", "tova", "-q"]
    )
    assert run.exit_code == 0, run.output
    assert "upper" in run.output
    assert "gap to" in run.output
    assert "%" in run.output
    described = CliRunner().invoke(app, ["policies", "oracle"])
    assert "upper bound" in " ".join(described.output.split())


def test_only_oracles_need_the_future():
    from kvsim.head import HEADS

    assert [name for name, head in HEADS.items() if head.needs_future] == ["oracle"]
