"""Sliding-window sums of scores: what the last few queries looked at."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Rule, register
from kvsim.plan import FloatArray, Plan
from kvsim.scoring import pooled


@register
@dataclass(frozen=True)
class Window(Rule):
    """The sum of the scores of the last `size` queries; the last `size` positions are never evicted.

    A decode step's scores count as they were when it was scored: renormalised over what was visible then.

    Attributes
    ----------
    size : int
        Queries that count, at least 1.
    pool : int
        Rank by the maximum over this many neighbouring positions (odd).
    start : {"zero", "prompt"}
        ``prompt`` starts from the prompt's last `size` queries (SnapKV).
    """

    name: ClassVar[str] = "window"
    size: int = 32
    pool: int = field(default=1, kw_only=True)
    start: Literal["zero", "prompt"] = field(default="zero", kw_only=True)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise PolicyError(f"size of 'window' must be at least 1, got {self.size}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise PolicyError(f"pool of 'window' must be odd and at least 1, got {self.pool}")

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        ring = self._prompt_ring(context) if self.start == "prompt" else None
        plan = context.linear(a=1, b=1, m0=None if ring is None else ring.sum(axis=1))
        # Longer windows and wider pools than the recording are the same as these.
        window = self.size if ring is not None and context.when.name != "prefill" else min(self.size, context.num_steps)
        pool = min(self.pool, 2 * context.trace.num_positions + 1)
        return protect_recent(replace(plan, window=window, ring=ring, pool=pool), self.size)

    def _prompt_ring(self, context: Context) -> FloatArray:
        """Scores of the prompt's last queries, [G, size or 1, L0]; summed up at once where none is ever replaced."""
        groups, score = context.groups, context.score.source(context)
        if score.kind != "attention" or score.weight is not None or score.entropy or score.pivotal:
            raise PolicyError(f"{context.policy}: start=prompt ranks by attention; it does not combine with score=")
        keep = context.when.name != "prefill"
        context.prompt_attention(0, self.size)
        ring = np.zeros((groups.count, self.size if keep else 1, context.prompt_length))
        for layer in range(len(groups.layers)):
            attention = context.prompt_attention(layer, self.size)
            for group in sorted(set(groups.of_layer(layer))):
                _, heads, _ = groups.members(group)
                own = attention[heads]
                own = own.max(axis=0) if score.heads == "max" else own.mean(axis=0)
                ring[group] += own if keep else own.sum(axis=0)
        if not keep:
            # The window stays whatever it scores; left in, pooling would lift the positions before it.
            ring[..., -self.size :] = 0
        return ring


def protect_recent(plan: Plan, size: int) -> Plan:
    """Protect the last `size` positions of every group, as far as its budget reaches."""
    return replace(plan, n_recent=np.maximum(plan.n_recent, np.minimum(size, plan.budgets - plan.n_sink)))


def rank(plan: Plan) -> FloatArray:
    """Give the prompt's ranking before step 1, [G, L0]: the state, pooled as the plan says."""
    return np.stack([pooled(m, plan.pool) for m in plan.m0])
