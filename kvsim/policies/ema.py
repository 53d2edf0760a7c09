"""Exponential moving average of scores: InertiaKV's aggregation and the two effects it couples."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError, unknown_name
from kvsim.head import Coefficients, LinearRule, register
from kvsim.plan import Plan

_OVERS = "both", "step", "layer"


@register
@dataclass(frozen=True)
class Ema(LinearRule):
    """Exponential moving average, ``m = alpha * m + (1 - alpha) * s`` (InertiaKV Eq. 4 and App. E).

    Attributes
    ----------
    alpha : float
        Weight of the old state in one update, in [0, 1).
    over : {"both", "step", "layer"}
        ``both``: one update for each layer, in order, as InertiaKV runs it: layer l of K weighs
        ``(1 - alpha) alpha^(K - l)`` and the previous step ``alpha^K``. ``step``: one update a step, over the mean of
        the layers: time memory alone. ``layer``: the weights of ``both`` from m = 0 at each step's start: no memory.
    """

    name: ClassVar[str] = "ema"
    alpha: float = 0.8
    over: Literal["both", "step", "layer"] = field(default="both", kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise PolicyError(f"alpha of 'ema' must be in [0, 1), got {self.alpha}")
        if self.over not in _OVERS:
            raise unknown_name("over of 'ema'", self.over, _OVERS)
        # Minus zero is zero, and must print like it.
        object.__setattr__(self, "alpha", self.alpha + 0.0)

    def coefficients(self, depth: int) -> Coefficients:
        """See `LinearRule.coefficients`."""
        if self.over != "step":
            return Coefficients(np.full(depth, self.alpha), np.full(depth, 1 - self.alpha), self.over == "layer")
        a = np.ones(depth)
        a[0] = self.alpha
        return Coefficients(a, np.full(depth, (1 - self.alpha) / depth), False)

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        a, b, reset = self.coefficients(context.groups.depth)
        return context.linear(a=a, b=b, reset=reset)
