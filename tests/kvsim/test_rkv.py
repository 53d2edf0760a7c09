"""R-KV: redundancy of keys, against the published formula written out and between the engines."""

import numpy as np
import pytest
from cases import write_trace

import kvsim
from kvsim.scoring import ranking, redundancy


def published(keys, threshold):
    """Redundancy of one head's visible keys [n, d], pair by pair."""
    n = len(keys)
    units = [key / np.linalg.norm(key) for key in keys]
    similarity = np.array([[0.0 if i == j else float(units[i] @ units[j]) for j in range(n)] for i in range(n)])
    for i in range(n):
        similar = [j for j in range(n) if j != i and similarity[i, j] > threshold]
        if similar:
            similarity[i, max(similar)] = 0
    mean = similarity.mean(axis=0)
    return np.exp(mean) / np.exp(mean).sum()


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5, 0.99])
def test_redundancy_is_the_published_one(tmp_path, threshold):
    trace = write_trace(tmp_path / "t", head_dim=3, seed=1)
    plan = kvsim.parse(f"ema/score=rkv:0.1,threshold={threshold}/group=head").plan(trace)
    visible = np.array([0, 3, 4, 9, 17, 25, 26, 30, 41])
    for group, (layer, head) in enumerate((layer, head) for layer in range(3) for head in range(2)):
        want = published(trace.keys(layer)[head, visible].astype(np.float64), threshold)
        np.testing.assert_allclose(redundancy(plan.score.redundancy, plan.groups, group, visible), want, rtol=1e-12)
    shared = kvsim.parse(f"ema/score=rkv:0.1,threshold={threshold}").plan(trace)
    mean = np.mean([redundancy(plan.score.redundancy, plan.groups, group, visible) for group in range(6)], axis=0)
    np.testing.assert_allclose(redundancy(shared.score.redundancy, shared.groups, 0, visible), mean, rtol=1e-12)


def test_ranking_mixes_importance_and_redundancy(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1)
    policy = kvsim.parse("window:2,pool=3/score=rkv:0.3/group=head/protect=sink:1").with_budget(kvsim.Budget(6))
    plan = policy.plan(trace)
    visible = np.arange(5, 15)
    m = np.random.default_rng(0).random(10)
    pooled = np.array([m[max(0, j - 1) : j + 2].max() for j in range(10)])
    repeated = published(trace.keys(1)[0, visible].astype(np.float64), 0.5)
    # The two most recent positions are the window's, protected and left out of the sum.
    want = 0.3 * pooled / m[:-2].sum() - 0.7 * repeated
    np.testing.assert_allclose(ranking(plan, 2, m, visible), want, rtol=1e-12)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("dim", [2, 5])
@pytest.mark.parametrize(
    "policy",
    [
        "rkv:4,mix=0.01",
        "rkv:4,mix=0.3/when=overflow:20%",
        "ema:0.5/score=rkv:0.05,threshold=0.9/group=layer/refresh=5",
        "single/score=rkv:0,threshold=-0.5",
        "cumulative/score=rkv:1/group=head",
    ],
)
def test_engines_agree_where_keys_repeat(tmp_path, policy, dim, shadow):
    """The cpu engine keeps sums up to date; in few dimensions most keys are similar to many."""
    trace = write_trace(tmp_path / "t", head_dim=dim, steps=60, prompt=30, layers=2, seed=7)
    want, got = (
        kvsim.replay(trace, policy, budget=20, engine=engine, shadow=shadow, shadow_churn=False).outcome
        for engine in ("reference", "cpu")
    )
    if shadow:
        assert np.array_equal(want.retained, got.retained)
    else:
        assert np.array_equal(want.evicted_at, got.evicted_at)


def test_a_repeated_key_goes_first(tmp_path):
    """Of two tokens that get equal attention the one whose key others repeat is evicted; the latest copy stays."""
    prompt, steps = 12, 3
    attention = np.zeros((steps, 1, 1, prompt + steps), np.float32)
    for t in range(steps):
        attention[t, ..., : prompt + t + 1] = 1 / (prompt + t + 1)
    keys = np.eye(16, dtype=np.float32)[None, None, : prompt + steps]
    keys = np.where(np.isin(np.arange(prompt + steps), [2, 5, 8])[:, None], keys[..., 2:3, :], keys)
    trace = write_trace(tmp_path / "t", attention=attention, prompt=prompt, kv_heads=1, head_dim=16, keys=keys)
    for engine in ("reference", "cpu"):
        result = kvsim.replay(trace, "single/score=rkv:0.5/group=head", budget=11, engine=engine, shadow_churn=False)
        assert sorted(np.flatnonzero(result.evicted_at[0] == 1).tolist()) == [2, 5]


@pytest.mark.parametrize(
    ("text", "message"), [("rkv:2", "mix of 'rkv'"), ("rkv:0.1,threshold=2", "threshold of 'rkv'")]
)
def test_bad_arguments(text, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.parse(f"ema/score={text}")
