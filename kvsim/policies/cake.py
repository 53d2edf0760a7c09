"""CAKE."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import ClassVar

import numpy as np

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Preset, Rule, register
from kvsim.plan import FloatArray, Plan
from kvsim.policies.window import protect_recent
from kvsim.policy import Policy
from kvsim.scorers.attention import Attention
from kvsim.shares import whole_tokens
from kvsim.when import When

KERNEL = 5  # positions that the average-pooling spans, as in the authors' code


@register
@dataclass(frozen=True)
class Preference(Rule):
    """Layer budgets in proportion to how widely and how changeably a layer attends; the prompt is ranked once.

    From the attention A of the prompt's last queries to what precedes them, all heads of a layer: its preference is
    ``H ** (1 / tau1) * V ** (1 / tau2)``, H the entropy summed over queries and V the variance over queries summed over
    positions. A position ranks by the mean of A over queries plus `gamma` times its variance, averaged over five
    neighbours and over the group's heads; the queries' own positions stay.

    Attributes
    ----------
    size : int
        Queries that are looked at, at least 2.
    gamma : float
        Weight of the variance in the ranking.
    tau1, tau2 : float
        Temperatures of entropy and variance.
    """

    name: ClassVar[str] = "preference"
    size: int = 32
    gamma: float = field(default=200.0, kw_only=True)
    tau1: float = field(default=1.0, kw_only=True)
    tau2: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        if self.size < 2:
            raise PolicyError(f"size of 'preference' must be at least 2, got {self.size}")
        if not 0 <= self.gamma <= 1e6:
            raise PolicyError(f"gamma of 'preference' must be in [0, 1e6], got {self.gamma}")
        for name in ("tau1", "tau2"):
            if getattr(self, name) <= 0:
                raise PolicyError(f"{name} of 'preference' must be above 0, got {getattr(self, name)}")

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        groups, prompt = context.groups, context.prompt_length
        if groups.kind == "shared":
            raise PolicyError(f"{context.policy}: 'preference' gives each layer its budget; use group=layer or head")
        if context.when.name != "prefill" or not isinstance(context.score, Attention):
            raise PolicyError(f"{context.policy}: 'preference' ranks the prompt once, by attention; use when=prefill")
        earlier = max(0, prompt - self.size)
        logs, m0 = [], np.zeros((groups.count, prompt))
        for layer in range(len(groups.layers)) if earlier else ():
            attention = context.prompt_attention(layer, self.size)[:, :, :earlier]
            variance = attention.var(axis=1, ddof=1)
            entropy = -(attention * np.log(attention + 1e-10)).sum()
            with np.errstate(divide="ignore"):
                logs.append(float(np.log(entropy) / self.tau1 + np.log(variance.sum()) / self.tau2))
            scores = _averaged(attention.mean(axis=1) + self.gamma * variance)
            for group in sorted(set(groups.of_layer(layer))):
                _, heads, _ = groups.members(group)
                m0[group, :earlier] = scores[heads].mean(axis=0)
        plan = context.linear(a=0, b=1, m0=m0)
        per_layer, budget = groups.count // len(groups.layers), int(plan.budgets[0])
        # Only ratios count: from the logarithms, so that no temperature overflows.
        highest = max(logs, default=-np.inf)
        preferences = [float(np.exp(log - highest)) if np.isfinite(highest) else 1.0 for log in logs]
        budgets = layer_budgets(preferences or [1.0] * len(groups.layers), budget, self.size, prompt)
        return protect_recent(context.allot(plan, np.repeat(np.array(budgets, np.int64), per_layer)), self.size)


@register
@dataclass(frozen=True)
class Cake(Preset):
    """Layer budgets by preference, ranked by mean and variance of attention, once after prefill (Qin et al., 2025).

    As in the authors' code after prefill; what it does while decoding, one window a layer, is `window`.

    Attributes
    ----------
    window_size : int
        Queries that are looked at, whose positions stay.
    gamma, tau1, tau2
        As for `preference`; the authors tune the temperatures for each model and budget.
    """

    name: ClassVar[str] = "cake"
    window_size: int = 32
    gamma: float = field(default=200.0, kw_only=True)
    tau1: float = field(default=1.0, kw_only=True)
    tau2: float = field(default=1.0, kw_only=True)

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        rule = Preference(self.window_size, gamma=self.gamma, tau1=self.tau1, tau2=self.tau2)
        return Policy(rule, group="head", when=When("prefill"))


def layer_budgets(preferences: Sequence[float], budget: int, window: int, prompt: int) -> list[int]:
    """Divide ``budget - window`` tokens a layer in proportion to preferences, none above the prompt.

    What a layer cannot use goes to the others, in proportion again. All are equal where nothing is left beyond the
    window, or the whole prompt fits.

    Parameters
    ----------
    preferences : sequence of float
        Of each layer, 0 or more.
    budget : int
        Tokens of a layer on average, the window included.
    window : int
        Recent positions that every layer keeps.
    prompt : int
        Length of the prompt.
    """
    layers = len(preferences)
    if budget <= window or budget >= prompt:
        return [budget] * layers
    weights = [Fraction(preference) for preference in preferences]
    shares: dict[int, Fraction] = {}
    left, most = Fraction(layers * (budget - window)), Fraction(prompt - window)
    while len(shares) < layers:
        others = [layer for layer in range(layers) if layer not in shares]
        total = sum(weights[layer] for layer in others)
        asked = {layer: left * weights[layer] / total if total else left / len(others) for layer in others}
        full = {layer: most for layer, share in asked.items() if share > most}
        shares |= full or asked
        left -= sum((full or asked).values())
    return whole_tokens([window + shares[layer] for layer in range(layers)])


def _averaged(scores: FloatArray) -> FloatArray:
    """Average over `KERNEL` neighbours, zeros beyond the ends."""
    half = KERNEL // 2
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(half, half)])
    means: FloatArray = np.lib.stride_tricks.sliding_window_view(padded, KERNEL, axis=-1).mean(axis=-1)
    return means
