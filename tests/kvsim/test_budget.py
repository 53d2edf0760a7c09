"""Budgets in exact decimal arithmetic."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsim.budget import Budget


@pytest.mark.parametrize(
    ("ratio", "prompt", "kept"),
    [(0.9, 1000, 100), (0.7, 10, 3), (0.9, 9, 1), (0.9, 1, 1), (0, 512, 512), (0.95, 512, 25), ("0.75", 512, 128)],
)
def test_compression_ratio_is_the_fraction_removed(ratio, prompt, kept):
    assert Budget.from_compression_ratio(ratio).resolve(prompt) == kept


@given(st.integers(0, 9999), st.integers(1, 10**6))
def test_no_float_product_decides(ten_thousandths, prompt):
    ratio = ten_thousandths / 10000
    exact = math.floor((1 - Fraction(ten_thousandths, 10000)) * prompt)
    assert Budget.from_compression_ratio(ratio).resolve(prompt) == max(1, exact)


def test_a_float_product_would_have_lost_a_token():
    assert int((1 - 0.9) * 1000) == 99
    assert Budget.from_compression_ratio(0.9).resolve(1000) == 100


def test_ratios_with_many_digits_are_exact():
    assert Budget.from_compression_ratio("0.00000000000000000000000000001").resolve(1000) == 999
    assert Budget.from_compression_ratio("0.99999999999999999999999999999").resolve(1000) == 1


def test_percentages():
    assert Budget.parse("10%").resolve(512) == 51
    assert Budget.parse("12.5%").resolve(64) == 8
    assert str(Budget.parse("12.50%")) == "12.5%"
    assert str(Budget.parse("100%")) == "100%"
    assert str(Budget.from_compression_ratio(0.9)) == "10%"
