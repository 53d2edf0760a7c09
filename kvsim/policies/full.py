"""The full cache, which every compressed one is measured against."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Rule, register
from kvsim.plan import Plan


@register
@dataclass(frozen=True)
class Full(Rule):
    """Never evict; takes no budget, and the command line's does not apply to it."""

    name: ClassVar[str] = "full"

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`: the budget is the whole sequence."""
        if context.budget is not None:
            raise PolicyError(f"{context.policy}: 'full' never evicts and takes no budget")
        return context.linear(a=0, b=1)
