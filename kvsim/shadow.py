"""Linear rules in shadow mode, where nothing is evicted: their scores are those of the full cache."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from kvsim_traces import Trace

from kvsim.budget import Budget
from kvsim.errors import KvsimError, PolicyError
from kvsim.head import Coefficients
from kvsim.plan import FloatArray, Groups, Plan, ScoreSource
from kvsim.policy import Policy, parse
from kvsim.scoring import attention_scores, head_mean_scores, independent_scores

__all__ = ["LinearPlan", "bundles", "check_boundary", "full_scores", "layer_means", "linear_plans"]


class LinearPlan(NamedTuple):
    """A policy that is one linear recurrence with the same weights at every step, spelled out on a trace."""

    policy: Policy
    plan: Plan
    rule: Coefficients


def linear_plans(trace: Trace, policies: Sequence[Policy | str], budget: Budget) -> list[LinearPlan]:
    """Spell linear rules out on a trace.

    Parameters
    ----------
    trace : Trace
        The recording.
    policies : sequence of Policy or str
        `single`, `cumulative`, `ema`, and presets that stand for them; their own budgets beat `budget`.
    budget : Budget
        Tokens kept.

    Raises
    ------
    KvsimError
        If there are none.
    PolicyError
        If one is not a linear rule.
    """
    if not policies:
        raise KvsimError("name at least one policy")
    found = []
    for given in policies:
        policy = (parse(given) if isinstance(given, str) else given).with_budget(budget)
        plan = policy.plan(trace)
        found.append(LinearPlan(policy, plan, _rule(policy, plan)))
    return found


def bundles(plans: Sequence[LinearPlan]) -> list[list[int]]:
    """Give the places of those plans that share scores and groups, together."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, one in enumerate(plans):
        found.setdefault((str(one.policy.expand().score), one.plan.groups.kind), []).append(index)
    return list(found.values())


def _rule(policy: Policy, plan: Plan) -> Coefficients:
    why = None
    if plan.window or plan.pool != 1 or plan.score.redundancy is not None or plan.rescue is not None:
        why = "ranks by more than one linear recurrence over scores"
    elif plan.evicts[0] or not plan.evicts[1:].all() or plan.batch:
        why = "does not evict after every step"
    elif plan.control is not None or not ((plan.a == plan.a[0]).all() and (plan.b == plan.b[0]).all()):
        why = "changes its weights from step to step"
    if why is not None:
        raise PolicyError(f"{policy}: {why}; this is measured for a linear rule (single, cumulative, ema)")
    return Coefficients(plan.a[0], plan.b[0], plan.reset)


def check_boundary(trace: Trace, one: LinearPlan) -> None:
    """Refuse a rule that has no boundary among the prompt positions of a trace, or does not start at 0.

    Raises
    ------
    KvsimError
        If so.
    """
    if one.plan.m0.any():
        raise KvsimError(f"{one.policy}: starts from the prompt's mass, and Proposition 1 from a state of 0")
    most = int(one.plan.budgets.max())
    if most >= trace.prompt_length:
        raise KvsimError(
            f"{one.policy}: a budget of {most} tokens leaves out none of the {trace.prompt_length} prompt positions of "
            f"{trace.path}, so there is no boundary; lower the budget"
        )


def full_scores(trace: Trace, groups: Groups, source: ScoreSource, step: int) -> FloatArray:
    """Score all positions of a step as the full cache does: nothing is evicted, and nothing renormalised.

    Parameters
    ----------
    trace : Trace
        The recording.
    groups : Groups
        The retention groups, G of K layers each.
    source : ScoreSource
        Where the scores come from.
    step : int
        Step t, from 1.

    Returns
    -------
    array
        [G, K, L0 + t].
    """
    layers = list(groups.layers)
    everything = np.arange(trace.prompt_length + step)
    if source.kind != "attention":
        return np.stack([independent_scores(source, groups, g, everything, step) for g in range(groups.count)])
    heads_known = trace.capture != "scores"
    rows = (trace.attention_rows(step, layers) if heads_known else trace.score_rows(step, layers)).astype(float)
    found = []
    for g in range(groups.count):
        members, heads, _ = groups.members(g)
        if not heads_known:
            found.append(head_mean_scores(source, rows, groups, g, everything))
        elif _is_plain(source):
            found.append(rows[members, heads].mean(axis=1))
        else:
            found.append(attention_scores(source, rows, groups, g, everything, renormalise=False))
    return np.stack(found)


def layer_means(trace: Trace, plans: Sequence[LinearPlan]) -> Iterator[FloatArray]:
    """Give the prompt's full-cache scores, averaged over layers with each rule's weights, step after step.

    Parameters
    ----------
    trace : Trace
        The recording.
    plans : sequence of LinearPlan
        P rules that share scores and groups; see `bundles`.

    Yields
    ------
    array
        [P, G, L0]: x = sum of w[l] s[l] over the sum of w, w being `Coefficients.layer_weights`. Up to a factor, a rule
        whose step decay is A ranks by ``mu <- A mu + (1 - A) x``, or by the running mean of x if A = 1.
    """
    from kvsim.engines.cpu.losses import weigh

    weights = np.stack([one.rule.layer_weights for one in plans])
    weights, which = np.unique(weights / weights.sum(axis=1, keepdims=True), axis=0, return_inverse=True)
    plan, prompt = plans[0].plan, trace.prompt_length
    for step in range(1, trace.num_steps + 1):
        scores = np.ascontiguousarray(full_scores(trace, plan.groups, plan.score, step)[..., :prompt])
        means = np.empty((len(weights), plan.groups.count, prompt))
        for g, own in enumerate(scores):
            # One sum after the other, the same for every position, so that equal scores stay equal.
            weigh(weights, own, means[:, g])
        yield means[which]


def _is_plain(source: ScoreSource) -> bool:
    return source.heads == "mean" and source.weight is None and not (source.entropy or source.pivotal or source.signed)
