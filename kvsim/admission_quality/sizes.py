"""Policies of one family that hold equally many tokens: the parameter whose mean cache size is a given one."""

from collections.abc import Callable
from dataclasses import dataclass

from kvsim.errors import KvsimError
from kvsim.policy import Policy

__all__ = ["TOLERANCE", "Match", "match_size"]

TOLERANCE = 0.01
"""How far a matched size may be from its target, relatively; two of one target differ by twice that at most."""

_EXACT = 0.2
"""The search ends at this share of the tolerance."""


@dataclass(frozen=True)
class Match:
    """A policy of about the size that was asked for.

    Attributes
    ----------
    policy : Policy
    size, target : float
        Its mean cache size, and the one asked for.
    evaluations : int
        Sizes that were measured to find it.
    """

    policy: Policy
    size: float
    target: float
    evaluations: int


def match_size(
    policy_of: Callable[[float], Policy],
    size_of: Callable[[Policy], float],
    low: float,
    high: float,
    target: float,
    *,
    whole: bool = False,
    tolerance: float = TOLERANCE,
    evaluations: int = 40,
) -> Match:
    """Find the parameter of a family by bisection.

    Parameters
    ----------
    policy_of : callable
        The family: gives the policy of a parameter.
    size_of : callable
        Its mean cache size, which rises with the parameter.
    low, high : float
        Where to look.
    target : float
        The size.
    whole : bool
        Whether the parameter is a whole number.
    tolerance : float
        The largest relative distance from the target.
    evaluations : int
        The most sizes to measure.

    Raises
    ------
    KvsimError
        If no parameter comes that close, with the nearest sizes.
    """
    found: dict[Policy, float] = {}

    def distance(value: float) -> float:
        policy = policy_of(value)
        if policy not in found:
            found[policy] = size_of(policy)
        return found[policy] / target - 1

    below, above = distance(low), distance(high)
    if below <= 0 <= above:
        while min(map(abs, (below, above))) > _EXACT * tolerance and len(found) < evaluations:
            middle = (low + high) // 2 if whole else (low + high) / 2
            if middle in (low, high):
                break
            off = distance(middle)
            if off <= 0:
                low, below = middle, off
            else:
                high, above = middle, off
    best = min(found, key=lambda policy: abs(found[policy] / target - 1))
    if abs(found[best] / target - 1) > tolerance:
        sizes = sorted(found.values())
        under = max((size for size in sizes if size <= target), default=None)
        over = min((size for size in sizes if size > target), default=None)
        nearest = " and ".join(f"{size:.4f}" for size in (under, over) if size is not None)
        raise KvsimError(f"no parameter gives a cache size within {tolerance:.1%} of {target:g}; nearest: {nearest}")
    return Match(best, found[best], target, len(found))
