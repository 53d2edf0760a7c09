"""AdaKV."""

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.head import Preset, Rule, register
from kvsim.plan import FloatArray, Plan
from kvsim.policies.single import Single
from kvsim.policies.window import Window, protect_recent, rank
from kvsim.policy import Policy
from kvsim.scorers.expected import Expected
from kvsim.scoring import independent_scores
from kvsim.shares import whole_tokens
from kvsim.when import When

Safeguard = Literal["mix", "minimum"]


@register
@dataclass(frozen=True)
class AdaHead(Rule):
    """Head budgets by where a layer's highest prompt scores lie; a head then keeps its own highest.

    Attributes
    ----------
    size : int
        Queries of the prompt's last window, whose attention is the score and which itself stays (`window`); 0 for a
        ``score=`` that needs no attention.
    pool : int
        As for `window`.
    floor : float
        Share of the budget that every head keeps, in [0, 1].
    safeguard : {"mix", "minimum"}
        ``mix``: a head gets `floor` of the even share and the rest of the adaptive one. ``minimum``: every head's own
        highest scores up to `floor` are taken first, and the pool divides the rest.
    """

    name: ClassVar[str] = "adahead"
    size: int = 0
    pool: int = field(default=1, kw_only=True)
    floor: float = field(default=0.2, kw_only=True)
    safeguard: Safeguard = field(default="mix", kw_only=True)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise PolicyError(f"size of 'adahead' must be 0 or more, got {self.size}")
        if self.size:
            Window(self.size, pool=self.pool)
        elif self.pool != 1:
            raise PolicyError("pool of 'adahead' needs a window, as in adahead:64,pool=5")
        if not 0 <= self.floor <= 1:
            raise PolicyError(f"floor of 'adahead' must be in [0, 1], got {self.floor}")

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        if context.groups.kind != "head":
            raise PolicyError(f"{context.policy}: 'adahead' divides a layer's budget among its heads; use group=head")
        if self.size:
            plan = Window(self.size, pool=self.pool, start="prompt").plan(context)
            scores = rank(plan)
        else:
            plan = Single().plan(context)
            if plan.score.needs_query:
                raise PolicyError(f"{context.policy}: ranking by attention needs a window, as in adahead:64")
            # Heads are compared with each other: a shift of each head by its own minimum must not count.
            source, prompt = replace(plan.score, signed=False), np.arange(context.prompt_length)
            scores = np.stack([independent_scores(source, plan.groups, g, prompt)[0] for g in range(plan.groups.count)])
        budgets = plan.budgets.copy()
        heads, prompt_length = context.groups.num_kv_heads, context.prompt_length
        for first in range(0, plan.groups.count, heads):
            sink, recent = int(plan.n_sink[first]), int(plan.n_recent[first])
            free = scores[first : first + heads, sink : max(sink, prompt_length - recent)]
            beyond = int(budgets[first]) - sink - recent
            own = head_budgets(free, beyond, self.floor, self.safeguard, protected=sink + recent)
            budgets[first : first + heads] = own
        return protect_recent(context.allot(plan, budgets), self.size)


@register
@dataclass(frozen=True)
class AdaKV(Preset):
    """SnapKV or Expected Attention with budgets that adapt to a layer's heads, once after prefill (Feng et al., 2025).

    Attributes
    ----------
    base : {"snapkv", "expected"}
        Whose scores are pooled.
    window_size, kernel : int
        As for `snapkv`, which alone has them.
    floor, safeguard
        As for `adahead`; ``mix`` is what public copies of the authors' code do, ``minimum`` what kvpress does.
    """

    name: ClassVar[str] = "adakv"
    base: Literal["snapkv", "expected"] = "snapkv"
    window_size: int = field(default=64, kw_only=True)
    kernel: int = field(default=5, kw_only=True)
    floor: float = field(default=0.2, kw_only=True)
    safeguard: Safeguard = field(default="mix", kw_only=True)

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise PolicyError(f"window_size of 'adakv' must be at least 1, got {self.window_size}")
        if self.base == "expected" and (self.window_size, self.kernel) != (64, 5):
            raise PolicyError("window_size and kernel belong to adakv:snapkv; adakv:expected has none")

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        if self.base == "snapkv":
            rule = AdaHead(self.window_size, pool=self.kernel, floor=self.floor, safeguard=self.safeguard)
            return Policy(rule, group="head", when=When("prefill"))
        rule = AdaHead(floor=self.floor, safeguard=self.safeguard)
        return Policy(rule, score=Expected(), group="head", when=When("prefill"))


def head_budgets(
    scores: FloatArray, budget: int, floor: float, safeguard: Safeguard, *, protected: int = 0
) -> list[int]:
    """Divide a layer's budget among its heads: ``budget + protected`` each on average, at least 1 each.

    Parameters
    ----------
    scores : array
        [Hk, n] scores of the positions that compete.
    budget : int
        Tokens of a head that are competed for, on average.
    floor : float
        Share of `budget` that every head keeps.
    safeguard : {"mix", "minimum"}
        How `floor` acts; see `AdaHead`.
    protected : int
        Tokens that every head keeps beside those.
    """
    heads, positions = scores.shape
    if budget <= 0 or budget >= positions:
        return [budget + protected] * heads
    share = Fraction(str(floor))
    if safeguard == "mix":
        taken = _highest(scores, budget * heads).sum(axis=1)
        return whole_tokens([protected + share * budget + (1 - share) * own for own in taken.tolist()])
    least = max(1, math.floor(share * budget)) if share else 0
    first = np.concatenate([_highest(row[None], least) for row in scores])
    taken = _highest(np.where(first, np.inf, scores), budget * heads).sum(axis=1)
    return whole_tokens([Fraction(protected + own) for own in taken.tolist()])


def _highest(scores: FloatArray, count: int) -> npt.NDArray[np.bool_]:
    """Mark the `count` highest of [Hk, n] by float32 value; the lowest position, then the lowest head, goes first."""
    order = np.argsort(scores.astype(np.float32).T, axis=None, kind="stable")
    mask = np.zeros(scores.size, dtype=np.bool_)
    mask[order[scores.size - count :]] = True
    return mask.reshape(scores.T.shape).T
