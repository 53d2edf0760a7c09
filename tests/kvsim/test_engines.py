"""Every engine returns what the reference returns, on the whole shared case list."""

import numpy as np
import pytest
from cases import ADMITTING, CPU_ENGINES, NEEDS_HEADS, NEEDS_KEYS, POLICIES, SELECTING, named, write_trace

import kvsim

OTHERS = sorted(set(CPU_ENGINES) - {"reference"})


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_the_cosines_of_two_keys_to_their_mean_are_equal(tmp_path, engine):
    """With one token kept there are two to choose from, as unlike their mean as each other: the newest stays."""
    trace = write_trace(tmp_path / "t", capture="qk", prompt=2, steps=30, head_dim=16)
    result = kvsim.replay(trace, "keydiff", budget=1, engine=engine)
    for group in range(result.plan.groups.count):
        assert [result.retained(t, group).tolist() for t in range(2, 31)] == [[t + 1] for t in range(2, 31)]
    assert result.steps["ties"].to_list()[1:] == [2.0] * 29


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_equal_scores_are_never_pivotal(tmp_path, engine):
    rows = np.zeros((20, 3, 1, 21), np.float32)
    for t in range(20):
        rows[t, ..., : t + 2] = 1 / (t + 2)
    trace = write_trace(tmp_path / "t", attention=rows, prompt=1, kv_heads=1)
    result = kvsim.replay(trace, "cumulative/score=pivotal/group=layer", budget=2, engine=engine)
    assert [result.retained(t, group=0).tolist() for t in range(1, 21)] == [[t - 1, t] for t in range(1, 21)]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return {
        "heads": write_trace(folder / "heads", seed=11, steps=16, prompt=48, kv_heads=2),
        "scores": write_trace(folder / "scores", seed=12, capture="scores", steps=16, prompt=48),
        "qkv": write_trace(folder / "qkv", seed=13, capture="qkv", steps=16, prompt=48),
        "long": write_trace(folder / "long", seed=14, steps=40, prompt=9, layers=5, heads=3, kv_heads=1),
        "wide": write_trace(folder / "wide", seed=15, steps=5, prompt=30, layers=9, heads=9, kv_heads=3),
    }


@pytest.mark.parametrize("shadow", [False, True], ids=["irreversible", "shadow"])
@pytest.mark.parametrize("kind", ["heads", "scores", "qkv", "long", "wide"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("engine", OTHERS)
def test_equals_the_reference(traces, engine, policy, kind, shadow):
    if kind == "scores" and policy in NEEDS_HEADS + NEEDS_KEYS:
        pytest.skip("needs heads or keys")
    budget = 8 if "sink" in policy or "streaming" in policy else 5
    want, got = (
        kvsim.replay(traces[kind], policy, budget=budget, engine=e, shadow=shadow, shadow_churn=False)
        for e in ("reference", engine)
    )
    if shadow:
        assert np.array_equal(want.outcome.retained, got.outcome.retained)
    else:
        assert np.array_equal(want.evicted_at, got.evicted_at)
    for name, column in want.outcome.metrics.items():
        np.testing.assert_allclose(got.outcome.metrics[name], column, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("kind", ["heads", "qkv", "long", "wide"])
@pytest.mark.parametrize("policy", ADMITTING + SELECTING)
@pytest.mark.parametrize("engine", OTHERS)
def test_admission_and_selection_equal_the_reference(traces, engine, policy, kind):
    text = named(policy, traces[kind])
    want, got = (
        kvsim.replay(traces[kind], text, budget=10, engine=e, shadow_churn=False) for e in ("reference", engine)
    )
    assert np.array_equal(want.evicted_at, got.evicted_at)
    for name, column in want.outcome.metrics.items():
        np.testing.assert_allclose(got.outcome.metrics[name], column, rtol=1e-9, atol=1e-12, err_msg=name)
    assert want.summary()["attended_pairs"] == got.summary()["attended_pairs"]
