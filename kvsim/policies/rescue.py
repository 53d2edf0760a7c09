"""First-eviction rescue: what a single layer needs survives the average over layers."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Rule, register
from kvsim.plan import Plan
from kvsim.policies.ema import Ema


@register
@dataclass(frozen=True)
class Rescue(Rule):
    """`ema`, and at the first eviction a share of the budget for the highest scores of single layers, kept for good.

    InertiaKV App. B names a "first-large-eviction rescue rule" without defining it. This is a reading of it: when the
    cache first exceeds its budget, which drops most of the prompt at once, the unprotected positions are ranked by
    their highest score in any one layer of the group, and the first of them are protected from then on.

    Attributes
    ----------
    alpha : float
        As for `ema`.
    percent : int
        Share of the budget that is rescued, in percent, floored to tokens.
    """

    name: ClassVar[str] = "rescue"
    alpha: float = 0.8
    percent: int = 10

    def __post_init__(self) -> None:
        Ema(self.alpha)
        if not 0 <= self.percent <= 100:
            raise PolicyError(f"percent of 'rescue' must be in 0..100, got {self.percent}")

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        if context.when.name == "prefill":
            raise PolicyError(f"{context.policy}: 'rescue' goes by the scores of a step; it does not take when=prefill")
        plan = Ema(self.alpha).plan(context)
        rescued = plan.budgets * self.percent // 100
        taken = rescued + plan.n_sink + plan.n_recent
        if (taken > plan.budgets).any():
            raise PolicyError(
                f"{context.policy}: rescues and protects {taken.max()} tokens, more than the budget of "
                f"{plan.budgets[taken.argmax()]} tokens"
            )
        return replace(plan, rescue=rescued)
