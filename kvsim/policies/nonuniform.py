"""Budgets that differ from group to group: the highest scores of the whole model stay, wherever they are."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Rule, register
from kvsim.plan import Plan
from kvsim.policies.adakv import head_budgets
from kvsim.scoring import independent_scores


@register
@dataclass(frozen=True)
class NonUniform(Rule):
    """The last score alone, with budgets by the pooled ranking of all layers and heads (Kim et al., 2025).

    The G groups share G times the budget: beyond its protected positions a group gets as many tokens as it has prompt
    positions among the highest scores of all groups, at least one in all. It then keeps its own highest.
    """

    name: ClassVar[str] = "nonuniform"

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`: a = 0, b = 1, and budgets of mean B."""
        plan = context.linear(a=0, b=1)
        if plan.score.kind not in ("static", "cosine"):
            raise PolicyError(
                f"{context.policy}: 'nonuniform' allots budgets before the first step; it needs a score that is known "
                "by then (score=kvzip, keydiff, knorm, …)"
            )
        # Groups are compared with each other: a shift of each group by its own minimum must not count.
        score, prompt = replace(plan.score, signed=False), np.arange(context.prompt_length)
        scores = np.stack([independent_scores(score, plan.groups, g, prompt)[-1] for g in range(plan.groups.count)])
        budget, sink, recent = int(plan.budgets[0]), int(plan.n_sink[0]), int(plan.n_recent[0])
        free = scores[:, sink : max(sink, context.prompt_length - recent)]
        budgets = head_budgets(free, budget - sink - recent, 0.0, "minimum", protected=sink + recent)
        return context.allot(plan, np.array(budgets, np.int64))
