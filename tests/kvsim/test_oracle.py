"""The offline optimum: exact answers, bounds that hold, and policies that never beat them."""

import numpy as np
import pytest
from cases import CPU_ENGINES, SAMPLES, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import oracle
from kvsim.bench_oracle import drifting
from kvsim.cli import app
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


@pytest.mark.parametrize("group", ["layer", "head"])
def test_no_division_of_the_budget_beats_the_pooled_optimum(tmp_path, group):
    """Policy <= exact at equal budgets of each group <= exact at their sum <= bound."""
    trace = write_trace(tmp_path / "t", seed=4, steps=16)
    texts = ["nonuniform/score=knorm", "cumulative", "pyramid:2", "oracle:exact", "adahead:0/score=knorm"]
    texts = [f"{text}/group={group}" for text in texts if group == "head" or not text.startswith("adahead")]
    results = kvsim.replay_many(trace, texts, budget=6, shadow_churn=False)
    assert len({tuple(result.plan.budgets) for result in results}) > 1
    best = oracle.optimum(trace, results[0].plan.groups, 6, "exact", pooled=True)
    bound = oracle.optimum(trace, results[0].plan.groups, 6, "bound", pooled=True).bound
    groups = results[0].plan.groups.count
    assert best.last.shape == (groups, 56)
    assert best.kept_mass * (1 - 1e-9) <= best.bound <= bound
    for t in range(1, 16):
        held = (best.last >= t) & (np.arange(56) < 40 + t)
        assert held.sum() <= 6 * groups
    for result in results:
        own = oracle.optimum(trace, result.plan.groups, result.plan.budgets, "exact").kept_mass
        kept = result.summary()["kept_mass"]
        assert result.plan.budgets.sum() == 6 * groups
        assert kept <= own * (1 + 1e-9)
        assert own <= best.kept_mass * (1 + 1e-9)
        assert oracle.gap(result, trace, "exact", pooled=True) == pytest.approx(1 - kept / best.kept_mass, abs=1e-8)
        assert oracle.gap(result, trace, pooled=True) >= oracle.gap(result, trace) - 1e-5


def test_one_group_has_nothing_to_pool(tmp_path):
    trace = write_trace(tmp_path / "t")
    result = kvsim.replay(trace, "ema:0.8", budget=6)
    assert oracle.gap(result, trace, pooled=True) == oracle.gap(result, trace)


def test_too_large_a_pool_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(oracle, "LARGEST_POOL", 1000)
    trace = write_trace(tmp_path / "t")
    result = kvsim.replay(trace, "tova", budget=6)
    with pytest.raises(kvsim.KvsimError, match="3 groups together"):
        oracle.gap(result, trace, pooled=True)


@pytest.mark.parametrize("group", GROUP_KINDS)
def test_the_gap_over_time_sums_to_the_gap(tmp_path, group):
    trace = write_trace(tmp_path / "t", seed=5, steps=20)
    result = kvsim.replay(trace, f"ema:0.8/group={group}", budget=7)
    for method in ("exact", "bound"):
        for pooled in (False, True):
            best = oracle.optimum(trace, result.plan.groups, result.plan.budgets, method, pooled=pooled)
            found = oracle.gap_over_time(result, trace, method, pooled=pooled)
            assert found.optimum.mean() == pytest.approx(best.kept_mass, abs=1e-12)
            assert found.policy.mean() == pytest.approx(result.summary()["kept_mass"], abs=1e-12)
            assert found.optimum.sum() > found.policy.sum()
    own = oracle.gap_over_time(kvsim.replay(trace, f"oracle:exact/group={group}", budget=7), trace, "exact")
    assert own.policy == pytest.approx(own.optimum, abs=1e-12)


@pytest.mark.parametrize("engine", CPU_ENGINES)
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
    for budgets in (2.7, [5, 5]):
        with pytest.raises(kvsim.KvsimError, match="whole number of tokens, or 3 of them"):
            oracle.optimum(trace, result.plan.groups, budgets)
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
    seen = []
    priced = prices.price(drifting(2000, 128, 200), watch=lambda bound, value: seen.append((bound, value)))
    assert 0 <= priced.bound - priced.value < 1e-3 * priced.bound
    assert len(seen) > 10
    assert all(value <= bound for bound, value in seen)
    assert seen == sorted(seen, key=lambda pair: -pair[0])


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
