"""Cumulative scores: every query counts alike, for ever."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvsim.context import Context
from kvsim.head import Rule, register
from kvsim.plan import Plan


@register
@dataclass(frozen=True)
class Cumulative(Rule):
    """The running sum of scores, ``m = m + s`` (InertiaKV Eq. 3, H2O's accumulator).

    Attributes
    ----------
    start : {"zero", "prompt"}
        ``prompt`` starts from the attention mass that each position received during prefill, as H2O does.
    """

    name: ClassVar[str] = "cumulative"
    start: Literal["zero", "prompt"] = field(default="zero", kw_only=True)

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`: a = b = 1."""
        m0 = context.prompt_mass.sum(axis=1) if self.start == "prompt" else None
        return context.linear(a=1, b=1, m0=m0)
