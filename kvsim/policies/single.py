"""Single-step scores: only the newest query counts."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.head import Coefficients, LinearRule, register
from kvsim.plan import Plan


@register
@dataclass(frozen=True)
class Single(LinearRule):
    """The last score alone, ``m = s`` (InertiaKV Eq. 2).

    Updated layer after layer, so that in a group of several layers only the last one survives: the alpha = 0 end
    of the paper's sweep.
    """

    name: ClassVar[str] = "single"

    def coefficients(self, depth: int) -> Coefficients:
        """See `LinearRule.coefficients`: a = 0, b = 1."""
        return Coefficients(np.zeros(depth), np.ones(depth), False)

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        a, b, _ = self.coefficients(context.groups.depth)
        return context.linear(a=a, b=b)
