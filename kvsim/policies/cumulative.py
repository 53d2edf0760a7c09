"""Cumulative scores: every query counts alike, for ever."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.head import Coefficients, LinearRule, register
from kvsim.plan import Plan


@register
@dataclass(frozen=True)
class Cumulative(LinearRule):
    """The running sum of scores, ``m = m + s`` (InertiaKV Eq. 3, H2O's accumulator).

    Attributes
    ----------
    start : {"zero", "prompt"}
        ``prompt`` starts from the attention mass that each position received during prefill, as H2O does.
    """

    name: ClassVar[str] = "cumulative"
    start: Literal["zero", "prompt"] = field(default="zero", kw_only=True)

    def coefficients(self, depth: int) -> Coefficients:
        """See `LinearRule.coefficients`: a = b = 1."""
        return Coefficients(np.ones(depth), np.ones(depth), False)

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        m0 = context.prompt_mass.sum(axis=1) if self.start == "prompt" else None
        a, b, _ = self.coefficients(context.groups.depth)
        return context.linear(a=a, b=b, m0=m0)
