"""Dividing one budget among retention groups, in whole tokens."""

import math
from collections.abc import Sequence
from fractions import Fraction

__all__ = ["share_of", "whole_tokens"]


def whole_tokens(shares: Sequence[Fraction]) -> list[int]:
    """Round shares to whole tokens, at least 1 each, without changing their sum.

    Every share is floored; the tokens left over go to the largest remainders, among equal ones to the first. A group
    that would get none takes one from the largest.

    Parameters
    ----------
    shares : sequence of Fraction
        Tokens of each group, 0 or more; their sum is a whole number, and at least one for each group.

    Returns
    -------
    list of int
    """
    tokens = [math.floor(share) for share in shares]
    left = int(sum(shares)) - sum(tokens)
    by_remainder = sorted(range(len(shares)), key=lambda index: tokens[index] - shares[index])
    for index in by_remainder[:left]:
        tokens[index] += 1
    while 0 in tokens:
        tokens[tokens.index(max(tokens))] -= 1
        tokens[tokens.index(0)] += 1
    return tokens


def share_of(share: float, count: int) -> int:
    """Give ``floor(share * count)`` in exact decimal arithmetic: 0.3 of 10 is 3."""
    return math.floor(Fraction(str(share)) * count)
