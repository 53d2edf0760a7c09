"""KVzip: budgets that differ from head to head, by the pooled ranking of all of them."""

import numpy as np
import pytest
from cases import write_trace

import kvsim


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "t", layers=3, heads=4, kv_heads=2, prompt=40, seed=5)


def test_the_highest_scores_of_all_heads_stay(trace):
    result = kvsim.replay(trace, "kvzip/protect=sink:0", budget=10)
    scores = trace.kvzip_scores().reshape(6, 40)
    kept = np.zeros(scores.shape, bool)
    for group in range(6):
        kept[group, result.retained(0, group)] = True
    cut = np.sort(scores, axis=None)[-60]
    assert np.array_equal(kept, scores >= cut)
    assert result.plan.budgets.tolist() == kept.sum(axis=1).tolist()
    assert result.plan.budgets.mean() == result.budget == 10
    assert len(set(result.plan.budgets.tolist())) > 1


def test_sinks_stay_and_count(trace):
    result = kvsim.replay(trace, "kvzip", budget=10)
    assert result.plan.budgets.sum() == 60
    assert result.plan.budgets.min() >= 4
    for group in range(6):
        assert {0, 1, 2, 3} <= set(result.retained(0, group).tolist())
        assert len(result.retained(0, group)) == result.plan.budgets[group]
    with pytest.raises(kvsim.PolicyError, match="protects 4 tokens, more than the budget of 3"):
        kvsim.replay(trace, "kvzip", budget=3)


@pytest.mark.parametrize("budget", [1, 2, 39, 40, 50])
def test_every_head_keeps_at_least_one_token_and_the_mean_is_the_budget(trace, budget):
    result = kvsim.replay(trace, "kvzip/protect=sink:0", budget=budget)
    assert result.plan.budgets.min() >= 1
    assert result.plan.budgets.mean() == budget
    if budget >= 40:
        assert (result.evicted_at == -1).all()


def test_generated_tokens_are_not_evicted_while_prompt_tokens_remain(trace):
    prefill = kvsim.replay(trace, "kvzip", budget=10)
    assert (prefill.evicted_at[:, 40:] == -1).all()
    assert set(np.unique(prefill.evicted_at)) == {-1, 0}
    every = kvsim.replay(trace, "kvzip/when=every/protect=sink:0", budget=20)
    for group, budget in enumerate(every.plan.budgets):
        gone = every.evicted_at[group, 40:] >= 0
        assert gone.sum() == max(0, trace.num_steps - budget)


def test_it_needs_the_scores(tmp_path):
    trace = write_trace(tmp_path / "s", capture="scores")
    with pytest.raises(kvsim.PolicyError, match="lacks; record with --kvzip"):
        kvsim.replay(trace, "cumulative/score=kvzip")
    with pytest.raises(kvsim.PolicyError, match="'nonuniform' allots budgets before the first step"):
        kvsim.replay(trace, "nonuniform")


def test_groups_are_compared_by_scores_that_are_not_shifted(trace):
    """A score that may be negative is shifted by its minimum within a group, which must not move budgets."""
    result = kvsim.replay(trace, "nonuniform/score=knorm/group=head/when=prefill", budget=10)
    norms = np.stack([np.linalg.norm(trace.keys(layer), axis=-1)[:, :40] for layer in range(3)]).reshape(6, 40)
    assert result.plan.budgets.tolist() == (norms <= np.sort(norms, axis=None)[59]).sum(axis=1).tolist()
