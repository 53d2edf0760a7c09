"""First-eviction rescue: a token that a single layer needs survives."""

import numpy as np
import pytest
from cases import write_trace

import kvsim

PROMPT, STEPS, LAYERS = 20, 6, 4


@pytest.fixture
def trace(tmp_path):
    """Position 7 matters to the first of four layers at step 1 and to none afterwards."""
    rng = np.random.default_rng(0)
    attention = np.zeros((STEPS, LAYERS, 1, PROMPT + STEPS), np.float32)
    for t in range(STEPS):
        row = 1 + rng.random((LAYERS, 1, PROMPT + t + 1))
        row[1:, :, 7] = row[:, :, 7].min() * 0.1
        row[0, :, 7] = 40 if t == 0 else 0.1
        attention[t, ..., : PROMPT + t + 1] = row / row.sum(axis=-1, keepdims=True)
    return write_trace(tmp_path / "t", attention=attention, prompt=PROMPT, kv_heads=1)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("shadow", [False, True])
def test_a_token_of_one_layer_survives(trace, engine, shadow):
    def retained(policy):
        result = kvsim.replay(trace, policy, budget=10, engine=engine, shadow=shadow, shadow_churn=False)
        return [result.retained(t).tolist() for t in range(1, STEPS + 1)]

    plain, rescued = retained("ema:0.2"), retained("rescue:0.2,10")
    assert all(7 not in step for step in plain)
    assert all(7 in step for step in rescued)
    assert all(len(step) == 10 for step in rescued)
    assert retained("rescue:0.2,0") == plain


@pytest.mark.parametrize("engine", ["reference", "cpu"])
def test_what_is_rescued_at_the_first_eviction_stays_for_good(trace, engine):
    result = kvsim.replay(trace, "rescue:0.2,30/protect=sink:2+recent:2", budget=10, engine=engine)
    peak = trace.attention_rows(1).max(axis=(0, 1))
    free = np.arange(2, PROMPT - 1)
    best = free[np.argsort(peak[free])[-3:]]
    assert (result.evicted_at[0, best] == -1).all()
    assert (result.evicted_at[0, :2] == -1).all()
    assert len(result.retained(STEPS)) == 10


def test_every_protected_and_rescued_position_must_fit(trace):
    with pytest.raises(kvsim.PolicyError, match="rescues and protects 11 tokens, more than the budget of 10 tokens"):
        kvsim.replay(trace, "rescue:0.8,50/protect=sink:4+recent:2", budget=10)
    with pytest.raises(kvsim.PolicyError, match="does not take when=prefill"):
        kvsim.replay(trace, "rescue/when=prefill", budget=10)
    for bad in (-1, 101):
        with pytest.raises(kvsim.PolicyError, match=r"percent of 'rescue' must be in 0\.\.100"):
            kvsim.parse(f"rescue:0.8,{bad}")
    with pytest.raises(kvsim.PolicyError, match="alpha of 'ema'"):
        kvsim.parse("rescue:1")


def test_the_auxiliary_variant_says_what_it_is():
    assert str(kvsim.parse("inertiakv-aux").expand()) == "rescue:0.8,10/protect=sink:4+recent:10%"


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("percent", [70, 100])
def test_what_is_rescued_outlasts_a_batch_that_would_take_more(trace, engine, percent):
    result = kvsim.replay(trace, f"rescue:0.2,40/protect=recent:1/when=overflow:{percent}%", budget=20, engine=engine)
    first = result.retained(1)
    assert len(first) == 9, "8 rescued and the newest, where the batch alone would leave fewer"
    assert set(first[:-1]) <= set(result.retained(STEPS))
