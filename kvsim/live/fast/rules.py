"""What of a policy the fast form runs: its plan, cut down to what the kernels do, or a refusal by name."""

import dataclasses
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvsim.errors import PolicyError
from kvsim.live.prefix import Prefix
from kvsim.live.sequence import Sequence
from kvsim.plan import FloatArray, GroupKind, Plan
from kvsim.policy import Policy
from kvsim.scorers.keydiff import KeyDiffScore
from kvsim.scorers.knorm import KNormScore
from kvsim.scorers.vnorm import VNorm

__all__ = ["FastRule", "draw_up"]


@dataclass(frozen=True)
class FastRule:
    """What every step does, the same for all rows of a batch.

    Attributes
    ----------
    kind : {"shared", "layer", "head"}
        Who shares a retained set.
    evicts : bool
        Whether positions leave after steps. Where they do not, nothing is scored and the cache grows.
    scored : array of bool
        [T]
    a, b : array
        [T, K] coefficients.
    reset : bool
        State 0 at the start of a scored step.
    heads : {"mean", "max"}
        How the heads of a group are combined.
    entropy, vnorm : bool
        Weights of the attention.
    static : array or None
        [positions] scores that are the same in all layers and need no attention.
    keys : {"cosine", "norm", "minus norm"} or None
        Scores of the cached keys, which need no attention either.
    signed : bool
        Scores may be negative, and are shifted by their minimum over what is visible. Not where a state remembers
        nothing: the same shift for all changes no rank, and would hide how close two of them are.
    window : int
        If not 0, the state is the sum of the scores of so many scored steps.
    pool : int
        Ranks are maxima of the state over so many neighbouring positions.
    batch : float
        If not 0, eviction waits for the budget to be exceeded, and then takes this share.
    """

    kind: GroupKind
    evicts: bool
    scored: npt.NDArray[np.bool_]
    a: FloatArray
    b: FloatArray
    reset: bool
    heads: Literal["mean", "max"]
    entropy: bool
    vnorm: bool
    static: FloatArray | None
    keys: Literal["cosine", "norm", "minus norm"] | None = None
    signed: bool = False
    window: int = 0
    pool: int = 1
    batch: float = 0.0

    @property
    def reads_attention(self) -> bool:
        """Whether scored steps need the attention's logits."""
        return self.evicts and self.static is None and self.keys is None


def draw_up(policies: Items[Policy], prefixes: Items[Prefix], steps: int) -> tuple[FastRule, list[Sequence]]:
    """Plan a batch: one rule, and for each row the sequence with its plan and its sets before the first step.

    Parameters
    ----------
    policies : sequence of Policy
        With their budgets, one for each row; they may differ in the budget only.
    prefixes : sequence of Prefix
        The prompts; they may differ in length.
    steps : int
        The most steps there will be.

    Raises
    ------
    PolicyError
        If a policy does more than the fast form can, or the rows' policies differ.
    """
    bare = {str(dataclasses.replace(policy, budget=None)) for policy in policies}
    if len(bare) > 1:
        raise PolicyError(
            f"the fast form runs one policy for all rows of a batch, and got {', '.join(sorted(bare))}; "
            "run them one after the other, or with the plain engine"
        )
    expanded = policies[0].expand()
    if expanded.admit is not None:
        return _admitting(policies, prefixes, steps)
    if expanded.select is not None:
        raise _refusal(policies[0], "select=")
    # Keys, and norms of values, are read where they lie, so the plan need not read them.
    vnorm = isinstance(expanded.score, VNorm)
    keys = _of_keys(expanded)
    sequences = []
    for policy, prefix in zip(policies, prefixes, strict=True):
        planned = dataclasses.replace(policy.expand(), score=None) if vnorm or keys else policy
        sequence = Sequence(planned, prefix, steps, full_rows=False)
        sequence.policy = policy
        sequences.append(sequence)
    plans = [sequence.plan for sequence in sequences]
    grows = all(_grows(plan, prefix.length + steps) for plan, prefix in zip(plans, prefixes, strict=True))
    longest = max(plans, key=lambda plan: plan.m0.shape[1])
    if not grows:
        for policy, plan in zip(policies, plans, strict=True):
            _refuse(policy, plan)
    plan, score = longest, longest.score
    return (
        FastRule(
            kind=plan.groups.kind,
            evicts=not grows,
            scored=plan.scored,
            a=plan.a,
            b=plan.b,
            reset=plan.reset,
            heads=score.heads,
            entropy=score.entropy,
            vnorm=vnorm and not grows,
            keys=None if grows else keys,
            signed=keys is not None and keys != "norm" and _remembers(plan),
            window=plan.window,
            pool=plan.pool,
            batch=plan.batch,
            static=score.values[0, 0] if not grows and score.values is not None else None,
        ),
        sequences,
    )


def _admitting(policies: Items[Policy], prefixes: Items[Prefix], steps: int) -> tuple[FastRule, list[Sequence]]:
    """Plan a batch under admission, which the dual cache decides about as tokens come."""
    expanded = policies[0].expand()
    for what, has in (("evict", expanded.head.name != "full"), ("select", expanded.select is not None)):
        if has:
            raise PolicyError(
                f"{policies[0]}: the dual cache on the device does not {what}; the plain engine can (engine 'plain')"
            )
    sequences = [
        Sequence(policy, prefix, steps, full_rows=False) for policy, prefix in zip(policies, prefixes, strict=True)
    ]
    plan = sequences[0].plan
    never = np.zeros(steps, dtype=np.bool_)
    return (
        FastRule(
            kind="head",
            evicts=False,
            scored=never,
            a=plan.a,
            b=plan.b,
            reset=False,
            heads="mean",
            entropy=False,
            vnorm=False,
            keys=None,
            signed=False,
            window=0,
            pool=1,
            batch=0.0,
            static=None,
        ),
        sequences,
    )


def _of_keys(policy: Policy) -> Literal["cosine", "norm", "minus norm"] | None:
    """Say which scores of keys a policy evicts by, step by step; before the first step the plan has them."""
    score = policy.score
    if policy.when is not None and policy.when.name == "prefill":
        return None
    if isinstance(score, KeyDiffScore):
        return "cosine"
    if isinstance(score, KNormScore):
        return "norm" if score.sign == "plus" else "minus norm"
    return None


def _remembers(plan: Plan) -> bool:
    """Whether a state holds scores of earlier steps."""
    return plan.window > 0 or (not plan.reset and bool(plan.a.prod(axis=1).any()))


def _grows(plan: Plan, positions: int) -> bool:
    """Whether nothing leaves after the first step."""
    return not plan.evicts[1:].any() or bool((plan.budgets >= positions).all())


def _refuse(policy: Policy, plan: Plan) -> None:
    score = plan.score
    same = score.values is not None and score.values.strides[:2] == (0, 0)
    found = {
        "coefficients that are chosen on the way": plan.control is not None,
        "a rescue": plan.rescue is not None,
        "redundancy": score.redundancy is not None,
        "eviction on some steps only": bool(plan.evicts[0]) or not plan.evicts[1:].all(),
        "pivotal scores": score.pivotal,
        "scores of keys other than keydiff and knorm": score.kind in ("cosine", "bilinear"),
        "scores that differ between layers": score.kind == "static" and not same,
        "weights of the attention other than score=vnorm": score.weight is not None,
        "budgets that differ between groups": bool((plan.budgets != plan.budgets[0]).any()),
    }
    for what, has in found.items():
        if has:
            raise _refusal(policy, what)


def _refusal(policy: Policy, what: str) -> PolicyError:
    return PolicyError(f"{policy}: the fast form does not run {what}; the plain engine can (engine 'plain')")
