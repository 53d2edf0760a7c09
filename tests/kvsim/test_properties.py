"""Properties that hold for every policy on every trace."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases import NEEDS_KEYS, POLICIES, random_attention, write_trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvsim

CAUSAL_POLICIES = [p for p in POLICIES if p not in NEEDS_KEYS and not kvsim.parse(p).needs_future]
CAUSAL_POLICIES += [
    "cumulative/admit=random:0.5,window=3",
    "ema:0.8/refresh=2/when=overflow:30%/admit=random:0.7,window=2",
    "full/admit=local:window=1,sink=2",
]
PERMUTABLE = ["single", "cumulative", "ema:0.8", "ema:0.8,over=step", "ema:0.6/group=layer", "ema:0.8/refresh=first"]

shapes = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 8),
        "layers": st.integers(1, 3),
        "heads": st.sampled_from([1, 2, 4]),
        "prompt": st.integers(8, 30),
        "seed": st.integers(0, 2**20),
    }
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def fresh(directory, **options):
    return write_trace(Path(tempfile.mkdtemp(dir=directory)) / "t", **options)


def attention(shape):
    rng = np.random.default_rng(shape["seed"])
    return random_attention(rng, shape["steps"], shape["layers"], shape["heads"], shape["prompt"])


@quick
@given(shapes, st.sampled_from(POLICIES), st.integers(6, 40))
def test_budget_irreversibility_and_bookkeeping(tmp_path, shape, policy, budget):
    trace = fresh(tmp_path, kv_heads=1, **shape)
    result = kvsim.replay(trace, policy, budget=budget, shadow_churn=False)
    plan = result.plan
    for g in range(plan.groups.count):
        before = result.retained(0, g)
        for t in range(1, trace.num_steps + 1):
            now = result.retained(t, g)
            visible = set(before.tolist()) | {trace.prompt_length + t - 1}
            assert set(now.tolist()) <= visible, "a position came back or came from the future"
            if plan.batch:
                assert len(now) <= plan.budgets[g]
            elif plan.evicts[t]:
                assert len(now) == min(len(visible), plan.budgets[g]), "evicts down to the budget and no further"
            before = now
    assert result.evicted_at.min() >= -1
    assert result.evicted_at.max() <= trace.num_steps
    steps = result.steps
    assert steps["kept_mass"].is_between(0, 1.01).all()
    if plan.budgets.max() <= trace.prompt_length and not plan.batch:
        bound = 2 / (plan.budgets.min() + 1) + 1e-9
        assert steps["churn"].drop_nulls().le(bound).all(), "churn of irreversible eviction is at most 2/(B+1)"


@quick
@given(shapes, st.sampled_from(CAUSAL_POLICIES), st.data())
def test_prefix_causality(tmp_path, shape, policy, data):
    """Changing attention after step t never changes R_t."""
    rows = attention(shape)
    cut = data.draw(st.integers(0, shape["steps"] - 1))
    changed = rows.copy()
    changed[cut:] = random_attention(np.random.default_rng(1), shape["steps"], *rows.shape[1:3], shape["prompt"])[cut:]
    results = [
        kvsim.replay(
            fresh(tmp_path, attention=r, prompt=shape["prompt"], kv_heads=1), policy, budget=6, shadow_churn=False
        )
        for r in (rows, changed)
    ]
    for t in range(cut + 1):
        for g in range(results[0].plan.groups.count):
            assert results[0].retained(t, g).tolist() == results[1].retained(t, g).tolist()


@quick
@given(shapes, st.sampled_from(PERMUTABLE))
def test_order_invariance(tmp_path, shape, policy):
    """Renaming the prompt's positions renames the retained sets: a rule looks at scores, not at places."""
    rows = attention(shape)
    prompt = shape["prompt"]
    order = np.random.default_rng(shape["seed"]).permutation(prompt)
    shuffled = rows.copy()
    shuffled[..., :prompt] = rows[..., order]
    plain, renamed = (
        kvsim.replay(fresh(tmp_path, attention=r, prompt=prompt, kv_heads=1), policy, budget=6, shadow_churn=False)
        for r in (rows, shuffled)
    )
    if plain.steps["ties"].sum() == renamed.steps["ties"].sum() == 0:
        assert np.array_equal(plain.evicted_at[:, order], renamed.evicted_at[:, :prompt])
        assert np.array_equal(plain.evicted_at[:, prompt:], renamed.evicted_at[:, prompt:])


@quick
@given(shapes, st.integers(6, 20))
def test_equal_scores_keep_the_newest(tmp_path, shape, budget):
    prompt, steps = shape["prompt"], shape["steps"]
    rows = np.zeros((steps, 1, 1, prompt + steps), dtype=np.float32)
    for t in range(steps):
        rows[t, ..., : prompt + t + 1] = 1 / (prompt + t + 1)
    trace = fresh(tmp_path, attention=rows, prompt=prompt, kv_heads=1)
    result = kvsim.replay(trace, "single", budget=budget)
    for t in range(1, steps + 1):
        assert result.retained(t).tolist() == list(range(max(0, prompt + t - budget), prompt + t))


@pytest.mark.parametrize("policy", ["single", "cumulative", "ema:0.8", "ema:0.8,over=step"])
def test_uniform_positive_scaling_of_the_scores_changes_nothing(tmp_path, policy):
    """Corollary 2: halving every score leaves every retained set as it was."""
    rows = random_attention(np.random.default_rng(0), 8, 2, 1, 30)
    results = []
    for factor in (1.0, 0.5):
        trace = write_trace(tmp_path / str(factor), attention=rows, prompt=30, kv_heads=1)
        plan = kvsim.parse(policy).with_budget(kvsim.Budget(8)).plan(trace)
        scaled = type(plan)(**{**vars(plan), "b": plan.b * factor})
        from kvsim.engines.reference import run

        results.append(run(trace, scaled).evicted_at)
    assert np.array_equal(*results)


def test_full_keeps_everything(tmp_path):
    trace = write_trace(tmp_path / "t")
    result = kvsim.replay(trace, "full")
    assert (result.evicted_at == -1).all()
    assert result.summary()["kept_mass"] == pytest.approx(1, abs=1e-3)
    assert result.summary()["budget"] == trace.num_positions
