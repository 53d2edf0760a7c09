"""How far back a linear rule remembers: its effective horizon in steps and in layers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import KvsimError, PolicyError
from kvsim.head import LinearRule
from kvsim.plan import FloatArray
from kvsim.policy import Policy, parse

__all__ = ["Memory", "memory"]

MOST_LAYERS, MOST_STEPS = 2**16, 2**24


@dataclass(frozen=True)
class Memory:
    """Where the weight of a linear rule's state comes from, right after a scored step.

    A horizon is the sum of the weights over the largest of them: how many steps, or layer updates, of full weight the
    state is worth. All is in scored steps; ``refresh=r`` makes each of them r decode steps long.

    Attributes
    ----------
    policy : str
        Canonical policy.
    layers : int
        Layers K that update the state in a step (1 for ``group=layer`` and ``group=head``).
    step_decay : float
        Weight of the previous step's state: A^K for the layer-sequential EMA, A for ``over=step``.
    horizon_steps : float or None
        ``1 / (1 - step_decay)``; None if nothing is ever forgotten.
    horizon_layers : float or None
        The same in layer updates: ``1 / (1 - A)`` for the layer-sequential EMA, ``K / (1 - A)`` for ``over=step``.
    earlier_share : float
        Share of the weight that comes from earlier steps, in the limit of many steps.
    last_layer_share : float
        Share that the last layer has of one step's weight.
    steps : int or None
        Decode steps T of a recording, None without one.
    earlier_share_last, earlier_share_mean : float or None
        The share at its last scored step, and its mean over scored steps.
    """

    policy: str
    layers: int
    step_decay: float
    horizon_steps: float | None
    horizon_layers: float | None
    earlier_share: float
    last_layer_share: float
    steps: int | None = None
    earlier_share_last: float | None = None
    earlier_share_mean: float | None = None

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        return dict(vars(self))


def memory(policy: Policy | str, layers: int, *, steps: int | None = None) -> Memory:
    """Say how far back a linear rule remembers.

    Parameters
    ----------
    policy : Policy or str
        `single`, `cumulative`, `ema`, or a preset that stands for one of them.
    layers : int
        Eligible layers of the model.
    steps : int, optional
        Decode steps of a recording.

    Raises
    ------
    KvsimError
        If the policy is not a linear rule, or a number is out of range.

    Examples
    --------
    >>> round(memory("ema:0.8", 32).step_decay, 4)
    0.0008
    """
    for name, value, most in (("layers", layers, MOST_LAYERS), ("steps", steps, MOST_STEPS)):
        if value is not None and not 1 <= value <= most:
            raise KvsimError(f"{name} must be from 1 to {most}, got {value}")
    policy = parse(policy) if isinstance(policy, str) else policy
    expanded = policy.expand()
    if not isinstance(expanded.head, LinearRule):
        raise PolicyError(f"{policy}: is not a linear rule (single, cumulative, ema), so its memory has no weights")
    depth = layers if policy.group_kind == "shared" else 1
    rule = expanded.head.coefficients(depth)
    weights, decay = rule.layer_weights, rule.step_decay
    horizon = 1 / (1 - decay) if decay < 1 else None
    last = mean = None
    if steps is not None:
        refresh = expanded.refresh or 1
        scored = 1 if refresh == "first" else math.ceil(steps / refresh)
        shares = _earlier_shares(decay, scored)
        last, mean = float(shares[-1]), float(shares.mean())
    return Memory(
        policy=str(policy),
        layers=depth,
        step_decay=decay,
        horizon_steps=horizon,
        horizon_layers=None if horizon is None else float(weights.sum() / weights.max()) * horizon,
        earlier_share=decay,
        last_layer_share=float(weights[-1] / weights.sum()),
        steps=steps,
        earlier_share_last=last,
        earlier_share_mean=mean,
    )


def _earlier_shares(decay: float, scored: int) -> FloatArray:
    """Share of earlier steps in the weight after 1, 2, … scored steps: 1 - 1 / (1 + decay + … )."""
    totals = np.cumsum(decay ** np.arange(scored, dtype=np.float64))
    shares: FloatArray = 1 - 1 / totals
    return shares
