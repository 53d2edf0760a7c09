"""Budgets that adapt to a layer's heads."""

import numpy as np
import pytest
from cases import write_trace
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvsim
from kvsim.policies.adakv import head_budgets

PEAKED = np.array([[9.0, 8, 7, 6, 5, 4], [3.0, 2, 1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("budget", "floor", "safeguard", "budgets"),
    [
        (3, 0.0, "mix", [5, 1]),
        (3, 0.0, "minimum", [5, 1]),
        (3, 1.0, "mix", [3, 3]),
        (3, 1.0, "minimum", [3, 3]),
        (3, 0.5, "mix", [5, 1]),
        (4, 0.5, "mix", [5, 3]),
        (4, 0.5, "minimum", [6, 2]),
        (6, 0.2, "mix", [6, 6]),
        (9, 0.2, "mix", [9, 9]),
        (0, 0.2, "mix", [0, 0]),
    ],
)
def test_head_budgets(budget, floor, safeguard, budgets):
    assert head_budgets(PEAKED, budget, floor, safeguard) == budgets


def test_among_equal_scores_the_lowest_position_goes_first():
    """Six of eight equal scores stay: the two heads lose position 0 each, and nobody is preferred."""
    assert head_budgets(np.zeros((2, 4)), 3, 0.0, "mix") == [3, 3]
    assert head_budgets(np.zeros((3, 5)), 3, 0.0, "mix") == [3, 3, 3]


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.integers(0, 9)),
    st.integers(0, 25),
    st.sampled_from([0.0, 0.2, 0.29, 0.5, 1.0]),
    st.sampled_from(["mix", "minimum"]),
    st.integers(1, 3),
)
def test_the_mean_and_the_floor_hold(scores, budget, floor, safeguard, protected):
    budgets = head_budgets(scores, budget, floor, safeguard, protected=protected)
    assert sum(budgets) == (budget + protected) * len(scores)
    assert min(budgets) >= int(floor * budget) + protected - (floor == 0.29)
    assert max(budgets) <= max(budget, scores.shape[1]) + protected


@pytest.mark.parametrize("text", ["adakv:snapkv,window_size=6", "adakv:expected"])
def test_a_layer_keeps_its_budget_and_each_head_its_own_highest(tmp_path, text):
    trace = write_trace(tmp_path / "t", prompt=60, layers=3, kv_heads=2, seed=5)
    result = kvsim.replay(trace, text, budget=15)
    budgets = result.plan.budgets.reshape(3, 2)
    assert (budgets.sum(axis=1) == 30).all()
    assert (budgets[:, 0] != budgets[:, 1]).any(), "a case where all are equal shows nothing"
    even = kvsim.replay(trace, "snapkv:6" if "snapkv" in text else "expected", budget=15)
    for group, budget in enumerate(result.plan.budgets.tolist()):
        kept, same = set(result.retained(0, group)), set(even.retained(0, group))
        assert len(kept) == budget
        assert kept <= same or same <= kept


def test_the_whole_pool_without_a_floor(tmp_path):
    """Without a floor a layer keeps exactly its highest Hk * B scores, wherever they are."""
    trace = write_trace(tmp_path / "t", prompt=60, layers=2, kv_heads=2, seed=6)
    plan = kvsim.parse("adahead:0,floor=0/score=expected/group=head/when=prefill/budget=15").plan(trace)
    result = kvsim.replay(trace, "adahead:0,floor=0/score=expected/group=head/when=prefill", budget=15)
    for layer in range(2):
        pool = plan.score.values[layer, :, :60]
        kept = np.zeros(pool.shape, bool)
        for head in range(2):
            kept[head, result.retained(0, 2 * layer + head)] = True
        assert pool[kept].min() >= pool[~kept].max()


def test_heads_are_compared_by_what_they_score_not_by_their_own_minimum(tmp_path):
    """Key norms are negative and shifted head by head for the recurrence; the pool must see them as they are."""
    trace = write_trace(tmp_path / "t", prompt=60, layers=1, kv_heads=2, seed=7)
    result = kvsim.replay(trace, "adahead:0,floor=0/score=knorm/group=head/when=prefill", budget=15)
    norms = np.linalg.norm(trace.keys(0)[:, :60], axis=-1)
    cut = np.sort(norms.ravel())[30]
    assert result.plan.budgets.tolist() == (norms < cut).sum(axis=1).tolist()


def test_refusals(tmp_path):
    trace = write_trace(tmp_path / "t")
    for text, message in [
        ("adahead:-1", "size of 'adahead'"),
        ("adahead:4,pool=2", "odd"),
        ("adahead:0,pool=3", "needs a window"),
        ("adahead:4,floor=1.5", r"floor of 'adahead' must be in \[0, 1\]"),
        ("adakv:snapkv,window_size=0", "window_size of 'adakv'"),
        ("adakv:snapkv,floor=-0.1", "floor"),
        ("adakv:expected,kernel=7", "belong to adakv:snapkv"),
        ("adakv:h2o", "unknown base of 'adakv' 'h2o'"),
        ("adakv:snapkv,window_size=6/group=layer", "use group=head"),
        ("adahead:0/group=head", "needs a window, as in adahead:64"),
        ("adahead:4/score=knorm/group=head", "does not combine with score="),
    ]:
        with pytest.raises(kvsim.PolicyError, match=message):
            kvsim.replay(trace, text, budget=9)
