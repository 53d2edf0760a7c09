"""LagKV and CAKE: scores and budgets of the prompt, against their formulas written out."""

import numpy as np
import pytest
from cases import write_trace

import kvsim
from kvsim.policies.cake import layer_budgets


def lag_scores(keys, values, sink, lag):
    """Scores of one head's prompt, token by token."""
    prompt = len(keys)
    scores = np.ones(prompt)
    partitions = (prompt - sink) // lag
    for part in range(partitions - 1):
        own = range(sink + part * lag, sink + (part + 1) * lag)
        following = slice(sink + (part + 1) * lag, sink + (part + 2) * lag)
        total = np.zeros(lag)
        for states in (keys, values):
            low, high = states[following].min(axis=0), states[following].max(axis=0)
            spread = np.array([np.std((states[i] - low) / (high - low), ddof=1) for i in own])
            total += np.exp(spread) / np.exp(spread).sum() / 2
        scores[list(own)] = np.argsort(np.argsort(total)) / lag
    return scores


@pytest.mark.parametrize(("sink", "lag"), [(4, 5), (0, 9), (3, 18)])
def test_lagkv_scores(tmp_path, sink, lag):
    trace = write_trace(tmp_path / "t", capture="qkv", prompt=40)
    plan = kvsim.parse(f"single/score=lagkv:{lag},n_sink={sink}").plan(trace)
    for layer in range(3):
        for head in range(2):
            keys, values = (read(layer)[head, :40].astype(np.float64) for read in (trace.keys, trace.values))
            want = lag_scores(keys, values, sink, lag)
            np.testing.assert_allclose(plan.score.values[layer, head, :40], want)
    assert (plan.score.values[..., 40:] == 1).all()


def test_lagkv_keeps_sinks_tail_and_generated_tokens(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qkv", prompt=40)
    result = kvsim.replay(trace, "lagkv:6", budget=20)
    for group in range(6):
        kept = set(result.retained(0, group).tolist())
        assert {0, 1, 2, 3, *range(34, 40)} <= kept
        assert len(kept) == 20
    assert (result.evicted_at[:, 40:] == -1).all()
    short = kvsim.replay(trace, "lagkv:32", budget=10)
    assert short.retained(0, group=0).tolist() == [0, 1, 2, 3, *range(34, 40)], (
        "too short for two partitions: by position"
    )


def test_lagkv_of_constant_keys_is_finite(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qkv", keys=np.ones((3, 2, 52, 8), np.float32))
    plan = kvsim.parse("lagkv:5").plan(trace)
    assert np.isfinite(plan.score.values).all()


@pytest.mark.parametrize("text", ["lagkv:1", "lagkv:4,n_sink=-1"])
def test_lagkv_arguments(text):
    with pytest.raises(kvsim.PolicyError, match="of 'lagkv' must be"):
        kvsim.parse(f"single/score={text}")


def test_cake_budgets_and_ranks(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk", prompt=40, layers=4)
    window, gamma, tau1, tau2 = 5, 3.0, 1.6, 0.8
    policy = f"cake:{window},gamma={gamma},tau1={tau1},tau2={tau2}/budget=12"
    plan = kvsim.parse(policy).plan(trace)
    preferences = []
    for layer in range(4):
        queries = trace.prompt_queries()[layer, :, -window:].astype(np.float64)
        keys = trace.keys(layer)[:, :40].astype(np.float64)
        rows = np.zeros((4, window, 40))
        for head in range(4):
            for w in range(window):
                seen = 40 - window + w + 1
                logits = keys[head // 2, :seen] @ queries[head, w] / np.sqrt(8)
                rows[head, w, :seen] = np.exp(logits) / np.exp(logits).sum()
        rows = rows[..., : 40 - window]
        entropy = -(rows * np.log(rows + 1e-10)).sum()
        variance = rows.var(axis=1, ddof=1)
        preferences.append(entropy ** (1 / tau1) * variance.sum() ** (1 / tau2))
        scores = rows.mean(axis=1) + gamma * variance
        for kv in range(2):
            padded = np.pad(scores[2 * kv : 2 * kv + 2].mean(axis=0), 2)
            want = [padded[i : i + 5].sum() / 5 for i in range(35)]
            np.testing.assert_allclose(plan.m0[2 * layer + kv], [*want, *[0] * 5])
    shares = window + 28 * np.array(preferences) / sum(preferences)
    assert plan.budgets.sum() == 8 * 12
    assert np.abs(plan.budgets[::2] - shares).max() < 1
    assert np.array_equal(plan.budgets[::2], plan.budgets[1::2])
    result = kvsim.replay(trace, policy)
    for group in range(8):
        kept = result.retained(0, group)
        assert set(range(35, 40)) <= set(kept.tolist())
        assert len(kept) == plan.budgets[group]


def test_layer_budgets():
    assert layer_budgets([1, 3], 12, 4, 40) == [8, 16]
    assert layer_budgets([0, 1], 12, 4, 17) == [7, 17], "what a layer cannot use goes to the others"
    assert layer_budgets([0, 0, 0], 7, 4, 40) == [7, 7, 7]
    assert layer_budgets([1, 2], 4, 4, 40) == [4, 4]
    assert layer_budgets([1, 2], 40, 4, 40) == [40, 40]
    for budget in range(1, 45):
        budgets = layer_budgets([0.1, 5.0, 0.3, 1.7], budget, 6, 40)
        assert sum(budgets) == 4 * budget
        assert min(budgets) >= 1
        assert max(budgets) <= max(40, budget)


def test_cake_errors(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk")
    for policy, message in [
        ("cake:5/group=shared", "use group=layer or head"),
        ("cake:5/when=every", "use when=prefill"),
        ("cake:5/score=knorm", "by attention"),
        ("cake:30", "--prompt-queries 30"),
        ("cake:1", "at least 2"),
        ("cake:5,gamma=-1", "gamma of 'preference'"),
        ("cake:5,tau1=0", "tau1 of 'preference'"),
    ]:
        with pytest.raises(kvsim.PolicyError, match=message):
            kvsim.replay(trace, policy)


@pytest.mark.parametrize("policy", ["cake:8", "cake:8/group=layer", "cake:8,tau1=0.009", "cake:8,tau2=0.0001"])
def test_cake_where_the_window_is_the_prompt_and_at_extreme_temperatures(tmp_path, policy):
    for prompt in (8, 40):
        trace = write_trace(tmp_path / str(prompt), prompt=prompt, capture="qk")
        result = kvsim.replay(trace, policy, budget=10, shadow_churn=False)
        assert result.plan.budgets.mean() == 10
