"""PyramidKV."""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Preset, register
from kvsim.plan import Plan
from kvsim.policies.window import Window, protect_recent
from kvsim.policy import Policy
from kvsim.scorers.attention import Attention
from kvsim.shares import whole_tokens
from kvsim.when import When


@register
@dataclass(frozen=True)
class Pyramid(Window):
    """`window` with budgets that fall linearly with depth, B on average over the layers.

    Attributes
    ----------
    size, pool, start
        As for `window`.
    beta : int
        The last layer keeps 1 / `beta` of the average beyond its `size` recent positions.
    """

    name: ClassVar[str] = "pyramid"
    beta: int = field(default=20, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta < 1:
            raise PolicyError(f"beta of 'pyramid' must be at least 1, got {self.beta}")

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        plan, groups = super().plan(context), context.groups
        if groups.kind == "shared":
            raise PolicyError(f"{context.policy}: 'pyramid' gives each layer its budget; it needs group=layer or head")
        budgets = pyramid(int(plan.budgets[0]), len(groups.layers), self.size, context.prompt_length, self.beta)
        per_layer = groups.count // len(groups.layers)
        return protect_recent(context.allot(plan, np.repeat(np.array(budgets, np.int64), per_layer)), self.size)


@register
@dataclass(frozen=True)
class PyramidKV(Preset):
    """SnapKV with more of the budget in the lower layers than in the upper ones (Cai et al., 2024).

    Attributes
    ----------
    window_size, kernel, heads
        As for `snapkv`.
    beta : int
        Steepness: beyond its observation window, the last layer keeps 1 / `beta` of the average.
    """

    name: ClassVar[str] = "pyramidkv"
    window_size: int = 64
    kernel: int = field(default=5, kw_only=True)
    heads: Literal["mean", "max"] = field(default="mean", kw_only=True)
    beta: int = field(default=20, kw_only=True)

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        rule = Pyramid(self.window_size, pool=self.kernel, start="prompt", beta=self.beta)
        return Policy(rule, score=Attention(heads=self.heads), group="head", when=When("prefill"))


def pyramid(budget: int, layers: int, window: int, prompt: int, beta: int) -> list[int]:
    """Give the budget of each layer, first to last: `budget` on average, none larger than the prompt.

    Every layer keeps its window; what is left falls linearly from ``2 - 1 / beta`` times the average to ``1 / beta`` of
    it, less steeply where the first layer would keep more than there is. With no room beyond the window, or for the
    whole prompt, all are equal.

    Parameters
    ----------
    budget : int
        Tokens of a layer on average.
    layers : int
        Number of layers.
    window : int
        Recent positions that every layer keeps.
    prompt : int
        Length of the prompt.
    beta : int
        Steepness, at least 1.
    """
    beyond = budget - window
    if layers == 1 or beyond <= 0 or budget >= prompt:
        return [budget] * layers
    highest = min(2 * beyond - Fraction(beyond, beta), Fraction(prompt - window))
    drop = 2 * (highest - beyond) / (layers - 1)
    return whole_tokens([window + highest - layer * drop for layer in range(layers)])
