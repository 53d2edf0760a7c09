"""The offline optimum as a policy."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Rule, register
from kvsim.oracle import optimum
from kvsim.plan import Plan, ScoreSource
from kvsim.protect import Protect
from kvsim.scorers.attention import Attention
from kvsim.when import When


@register
@dataclass(frozen=True)
class Oracle(Rule):
    """What could have been kept by someone who knows the whole recording: the most kept mass at this budget.

    The schedule is worked out beforehand and replayed as a fixed score of each position: the last step that keeps it.

    Attributes
    ----------
    method : {"future", "exact", "bound"}
        ``future``: greedy, keep those with the largest remaining mass. ``exact``: the optimum, by linear programming;
        for small recordings. ``bound``: a schedule made of prices per step, close to the optimum, and an upper bound
        that no schedule can exceed. Every result states such a bound.
    """

    name: ClassVar[str] = "oracle"
    needs_future: ClassVar[bool] = True
    method: Literal["future", "exact", "bound"] = "bound"

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        fixed = {"score": Attention(), "refresh": 1, "protect": Protect(), "when": When(), "admit": None}
        for axis, value in fixed.items():
            if (given := getattr(context, axis)) != value:
                reads = f"{axis}={given.name if axis in ('score', 'admit') else given}"
                raise PolicyError(
                    f"{context.policy}: 'oracle' maximises the kept mass over all steps; it does not take {reads} "
                    "(only group= and budget=)"
                )
        plan = context.linear(a=0, b=1)
        groups = plan.groups
        best = optimum(context.trace, groups, plan.budgets, self.method)
        shape = len(groups.layers), groups.num_kv_heads, context.trace.num_positions
        per_group = best.last.astype(np.float64)
        if groups.kind == "head":
            values = per_group.reshape(shape)
        else:
            values = np.broadcast_to(per_group.reshape(-1, 1, shape[2]), shape)
        return replace(plan, score=ScoreSource("static", values=values), bound=best.bound)
