"""Single-step scores: only the newest query counts."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.head import Rule, register
from kvsim.plan import Plan


@register
@dataclass(frozen=True)
class Single(Rule):
    """The last score alone, ``m = s`` (InertiaKV Eq. 2).

    Updated layer after layer, so that in a group of several layers only the last one survives: the alpha = 0 end
    of the paper's sweep.
    """

    name: ClassVar[str] = "single"

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`: a = 0, b = 1."""
        return context.linear(a=0, b=1)
