"""Pyramidal budgets, and rounding shares to whole tokens."""

import itertools
from fractions import Fraction

import pytest
from cases import write_trace
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.policies.pyramidkv import pyramid
from kvsim.shares import whole_tokens


@pytest.mark.parametrize(
    ("arguments", "budgets"),
    [
        # 60 beyond the window: from 117 to 3, on top of 8 for everyone.
        ((68, 3, 8, 1000, 20), [125, 68, 11]),
        ((68, 1, 8, 1000, 20), [68]),
        ((8, 3, 8, 1000, 20), [8, 8, 8]),
        ((3, 3, 8, 1000, 20), [3, 3, 3]),
        ((68, 3, 8, 100, 20), [100, 68, 36]),
        ((100, 3, 8, 100, 20), [100, 100, 100]),
        ((200, 3, 8, 100, 20), [200, 200, 200]),
        ((10, 3, 8, 1000, 1), [10, 10, 10]),
        ((9, 4, 8, 1000, 20), [10, 9, 9, 8]),
    ],
)
def test_pyramid(arguments, budgets):
    assert pyramid(*arguments) == budgets


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 80), st.integers(1, 400), st.integers(1, 50))
def test_pyramids_fall_and_keep_the_mean(budget, layers, window, prompt, beta):
    budgets = pyramid(budget, layers, window, prompt, beta)
    assert sum(budgets) == budget * layers
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] >= 1
    assert budgets[0] <= max(prompt, budget)
    steps = [a - b for a, b in itertools.pairwise(budgets)]
    assert not steps or max(steps) - min(steps) <= 2, "linear but for rounding"


@given(st.lists(st.fractions(0, 50, max_denominator=60), min_size=1, max_size=12))
def test_whole_tokens(shares):
    shares.append(-sum(shares) % 1 + max(0, len(shares) + 1 - int(sum(shares))))
    tokens = whole_tokens(shares)
    assert sum(tokens) == sum(shares)
    assert min(tokens) >= 1
    if min(shares) >= 1:
        assert all(abs(token - share) < 1 for token, share in zip(tokens, shares, strict=True))


def test_leftover_tokens_go_to_the_largest_remainders_then_to_the_first():
    assert whole_tokens([Fraction(5, 3), Fraction(4, 3), Fraction(3)]) == [2, 1, 3]
    assert whole_tokens([Fraction(3, 2), Fraction(3, 2)]) == [2, 1]
    assert whole_tokens([Fraction(0), Fraction(4), Fraction(0)]) == [1, 2, 1]


def test_budgets_by_layer_and_what_each_keeps(tmp_path):
    trace = write_trace(tmp_path / "t", prompt=60, layers=3, kv_heads=2)
    result = kvsim.replay(trace, "pyramidkv:6", budget=20)
    assert result.plan.budgets.tolist() == [33, 33, 20, 20, 7, 7]
    for group, budget in enumerate(result.plan.budgets.tolist()):
        kept = result.retained(0, group)
        assert len(kept) == budget
        assert kept[-6:].tolist() == list(range(54, 60)), "the window stays"
    same = kvsim.replay(trace, "snapkv:6", budget=20)
    assert result.retained(0, 2).tolist() == same.retained(0, 2).tolist(), "the middle layer has SnapKV's budget"
    assert kvsim.replay(trace, "pyramidkv:6/group=layer", budget=20).plan.budgets.tolist() == [33, 20, 7]


def test_refusals(tmp_path):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(kvsim.PolicyError, match="needs group=layer or head"):
        kvsim.replay(trace, "pyramidkv:6/group=shared")
    with pytest.raises(kvsim.PolicyError, match="beta of 'pyramid' must be at least 1"):
        kvsim.parse("pyramid:6,beta=0")
    with pytest.raises(kvsim.PolicyError, match="protects 9 tokens, more than the budget of 7"):
        kvsim.replay(trace, "pyramidkv:6/protect=sink:9", budget=20)
