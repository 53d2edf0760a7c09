"""The reference engine against hand-computed cases and an independent implementation in plain Python."""

import numpy as np
import pytest
from cases import random_attention, write_trace
from naive import replay as naive_replay

import kvsim


def history(result):
    return {g: {int(i): int(t) for i, t in enumerate(row) if t >= 0} for g, row in enumerate(result.evicted_at)}


CASES = [
    ("single", {"rule": "single"}),
    ("cumulative", {"rule": "cumulative"}),
    ("ema:0.8", {}),
    ("ema:0.8,over=step", {"over": "step"}),
    ("ema:0.8,over=layer", {"over": "layer"}),
    ("ema:0.6/refresh=3", {"alpha": 0.6, "refresh": 3}),
    ("ema:0.8/refresh=first", {"refresh": "first"}),
    ("ema:0.5,over=layer/refresh=2", {"alpha": 0.5, "over": "layer", "refresh": 2}),
    ("ema:0.8/protect=sink:2+recent:3", {"sink": 2, "recent": 3}),
]


@pytest.mark.parametrize("group", ["shared", "layer", "head"])
@pytest.mark.parametrize(("policy", "options"), CASES, ids=[policy for policy, _ in CASES])
def test_agrees_with_an_independent_implementation(tmp_path, policy, options, group):
    trace = write_trace(tmp_path / "t", seed=3, steps=10, prompt=30)
    rows = np.zeros((10, 3, 4, 40))
    for t in range(10):
        rows[t, ..., : 31 + t] = trace.attention_rows(t + 1)
    expected, sets = naive_replay(rows, 30, 9, group=group, kv_heads=2, **options)
    result = kvsim.replay(trace, f"{policy}/group={group}", budget=9, shadow_churn=False)
    assert history(result) == expected
    for g, per_step in sets.items():
        assert [result.retained(t + 1, g).tolist() for t in range(10)] == per_step
    shadow = kvsim.replay(trace, f"{policy}/group={group}", budget=9, shadow=True)
    _, shadow_sets = naive_replay(rows, 30, 9, group=group, kv_heads=2, shadow=True, **options)
    for g, per_step in shadow_sets.items():
        assert [shadow.retained(t + 1, g).tolist() for t in range(10)] == per_step


def two_steps():
    """One layer, one head, three prompt tokens, two steps; every number below can be checked on paper."""
    rows = np.zeros((2, 1, 1, 5), dtype=np.float32)
    rows[0, 0, 0, :4] = [0.5, 0.125, 0.25, 0.125]
    rows[1, 0, 0, :5] = [0.125, 0.25, 0.125, 0.25, 0.25]
    return rows


def test_by_hand_single(tmp_path):
    # Step 1: V = {0,1,2,3}, scores are the row; B = 2 keeps 0 and 2; 1 and 3 go.
    # Step 2: V = {0,2,4}, visible mass 0.5, scores .25 .25 .5: 0 and 2 tie, the lower position goes.
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1)
    result = kvsim.replay(trace, "single", budget=2)
    assert result.evicted_at.tolist() == [[2, 1, -1, 1, -1]]
    steps = result.steps
    assert steps["kept_mass"].to_list() == [1.0, 0.5]
    # Raw top-2 at step 1 is {0, 2}; at step 2 three positions have .25 and the newest two, 3 and 4, win.
    assert steps["raw_agreement"].to_list() == [1.0, pytest.approx(1 / 3)]
    assert steps["raw_top_evicted"].to_list() == [0.0, 0.5]
    assert steps["churn"].to_list() == [None, pytest.approx(1 - 1 / 3)]
    assert steps["raw_churn"].to_list() == [None, 1.0]
    assert steps["ties"].to_list() == [0.0, 2.0]
    assert steps["retained"].to_list() == [2.0, 2.0]


def test_by_hand_cumulative(tmp_path):
    # Step 1: m = .5 .125 .25 .125; 0 and 2 stay. Step 2: m = .75 .5 .5 over {0, 2, 4}: the tie takes 2.
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1)
    assert kvsim.replay(trace, "cumulative", budget=2).evicted_at.tolist() == [[-1, 1, 2, 1, -1]]


def test_by_hand_unscored_step_gives_the_newcomer_the_mean(tmp_path):
    # Scored at step 1 only: m = .5, .25 for 0 and 2; position 4 gets (.5 + .25) / 2 and 2 leaves.
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1)
    assert kvsim.replay(trace, "single/refresh=first", budget=2).evicted_at.tolist() == [[-1, 1, 2, 1, -1]]


def test_by_hand_protection(tmp_path):
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1)
    result = kvsim.replay(trace, "single/protect=sink:2", budget=2)
    assert result.evicted_at.tolist() == [[-1, -1, 1, 1, 2]]
    assert result.steps["ties"].to_list() == [0.0, 0.0]


def test_by_hand_shadow(tmp_path):
    # R_1 = {0, 2}; R_2 = the newest two of the three at .25. Kept mass at step 2 is that of {0, 2} and 4.
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1)
    result = kvsim.replay(trace, "single", budget=2, shadow=True)
    assert result.retained(1).tolist() == [0, 2]
    assert result.retained(2).tolist() == [3, 4]
    assert result.steps["kept_mass"].to_list() == [1.0, 0.5]
    with pytest.raises(kvsim.KvsimError, match="no evicted_at"):
        _ = result.evicted_at


def test_by_hand_output_error(tmp_path):
    trace = write_trace(tmp_path / "t", attention=two_steps(), prompt=3, kv_heads=1, head_dim=2)
    v = trace.values(0)[0].astype(np.float64)
    full = two_steps()[1, 0, 0].astype(np.float64) @ v
    # Step 2 of `single` sees {0, 2, 4} with weights .25, .25, .5.
    seen = 0.25 * v[0] + 0.25 * v[2] + 0.5 * v[4]
    error = kvsim.replay(trace, "single", budget=2).steps["output_error"]
    assert error[0] == pytest.approx(0, abs=1e-12)
    assert error[1] == pytest.approx(np.linalg.norm(full - seen) / np.linalg.norm(full), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.8, 0.95])
def test_layer_weights_of_appendix_e(tmp_path, alpha):
    """Two layers without eviction: m_1 = (1-A) A^(K-l) s_l summed, and the previous step weighs A^K."""
    depth, prompt = 2, 3
    rows = random_attention(np.random.default_rng(5), 2, depth, 1, prompt)
    trace = write_trace(tmp_path / "t", attention=rows, prompt=prompt, kv_heads=1)
    plan = kvsim.parse(f"ema:{alpha}").plan(trace)
    states = []
    m = np.zeros(prompt + 2)
    for t in range(2):
        s = trace.attention_rows(t + 1)[:, 0].astype(np.float64)
        for layer in range(depth):
            m[: s.shape[1]] = plan.a[t, layer] * m[: s.shape[1]] + plan.b[t, layer] * s[layer]
        states.append(m.copy())
    s1, s2 = (trace.attention_rows(t)[:, 0].astype(np.float64) for t in (1, 2))
    weights = [(1 - alpha) * alpha ** (depth - layer) for layer in range(1, depth + 1)]
    first = np.append(weights @ s1, 0)
    np.testing.assert_allclose(states[0], first, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(states[1], weights @ s2 + alpha**depth * first, rtol=1e-12, atol=1e-15)
    # The engine must rank by exactly this state: shadow sets are its top-B, newest first among equals.
    shadow = kvsim.replay(trace, f"ema:{alpha}", budget=2, shadow=True)
    for t, state in enumerate(states, start=1):
        ranked = np.argsort(state[: prompt + t].astype(np.float32), kind="stable")[-2:]
        assert shadow.retained(t).tolist() == sorted(ranked.tolist())


def test_over_step_is_an_ema_of_the_layer_mean(tmp_path):
    trace = write_trace(tmp_path / "t", steps=6, prompt=20)
    shadow = kvsim.replay(trace, "ema:0.7,over=step", budget=5, shadow=True)
    m = np.zeros(26)
    for t in range(1, 7):
        mean = trace.attention_rows(t).astype(np.float64).mean(axis=(0, 1))
        m[: 20 + t] = 0.7 * m[: 20 + t] + 0.3 * mean
        ranked = np.argsort(m[: 20 + t].astype(np.float32), kind="stable")[-5:]
        assert shadow.retained(t).tolist() == sorted(ranked.tolist())


def test_sliding_layers_are_left_alone(tmp_path):
    both = random_attention(np.random.default_rng(2), 6, 2, 2, 20)
    mixed = write_trace(tmp_path / "mixed", attention=both, prompt=20, kv_heads=1, eligible=[1])
    alone = write_trace(tmp_path / "alone", attention=both[:, 1:], prompt=20, kv_heads=1)
    for policy in ("ema:0.8", "tova", "cumulative/group=head"):
        got, want = (kvsim.replay(t, policy, budget=5) for t in (mixed, alone))
        assert got.evicted_at.tolist() == want.evicted_at.tolist()
        assert got.summary()["kept_mass"] == want.summary()["kept_mass"]


def test_two_traces_in_one_process_give_what_each_gives_alone(tmp_path):
    first = write_trace(tmp_path / "a", seed=1)
    second = write_trace(tmp_path / "b", seed=2, steps=9, prompt=25)
    alone = [kvsim.replay(t, "ema:0.8/group=head").evicted_at.copy() for t in (first, second)]
    for _ in range(2):
        for trace, expected in zip((first, second), alone, strict=True):
            assert np.array_equal(kvsim.replay(trace, "ema:0.8/group=head").evicted_at, expected)


def test_scores_capture_agrees_with_heads_in_shadow_mode_and_says_when_it_is_approximate(tmp_path):
    rows = random_attention(np.random.default_rng(4), 8, 3, 2, 30)
    heads = write_trace(tmp_path / "h", attention=rows, prompt=30, kv_heads=2)
    scores = write_trace(tmp_path / "s", attention=rows, prompt=30, kv_heads=2, capture="scores")
    got, want = (kvsim.replay(t, "ema:0.8", budget=8, shadow=True) for t in (scores, heads))
    assert all(got.retained(t).tolist() == want.retained(t).tolist() for t in range(1, 9))
    assert not got.approximate
    assert kvsim.replay(scores, "ema:0.8", budget=8).approximate
    assert not kvsim.replay(heads, "ema:0.8", budget=8).approximate
    with pytest.raises(kvsim.PolicyError, match="group=head needs attention of single heads"):
        kvsim.replay(scores, "ema:0.8/group=head")


def test_qk_capture_serves_what_heads_does(tmp_path):
    """Rows recomputed from queries and keys drive the same evictions as the same rows recorded."""
    qk = write_trace(tmp_path / "qk", capture="qk", seed=8, steps=8, prompt=30)
    rows = np.zeros((8, 3, 4, 38), dtype=np.float32)
    for t in range(8):
        rows[t, ..., : 31 + t] = qk.attention_rows(t + 1)
    heads = write_trace(tmp_path / "heads", attention=rows, prompt=30)
    for policy in ("ema:0.8", "tova", "cumulative/group=head"):
        assert np.array_equal(
            kvsim.replay(qk, policy, budget=8).evicted_at, kvsim.replay(heads, policy, budget=8).evicted_at
        )


def test_stored_rows_change_nothing(tmp_path):
    trace = write_trace(tmp_path / "qk", capture="qk", seed=8, steps=8, prompt=30)
    before = kvsim.replay(trace, "ema:0.8/group=head", budget=8)
    trace.store_rows()
    again = kvsim.open_trace(trace.path)
    after = kvsim.replay(again, "ema:0.8/group=head", budget=8)
    assert np.array_equal(before.evicted_at, after.evicted_at)
    assert before.summary() == after.summary()
