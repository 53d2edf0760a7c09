"""Giving a plan its admission: the window is protected, and a trigger on overflow is pooled over all heads."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvsim.admission import Admission
from kvsim.errors import PolicyError
from kvsim.plan import Plan

__all__ = ["admit_into", "pooled_targets"]


def admit_into(plan: Plan, admission: Admission) -> Plan:
    """Complete a plan with groups of kind ``head`` by what leaves the local window.

    Raises
    ------
    PolicyError
        If a head's budget does not hold its window and the sink that is protected beside it.
    """
    window, positions = admission.window, admission.admitted.shape[1]
    recent = np.maximum(plan.n_recent, window)
    short = (plan.budgets < positions) & (plan.budgets < plan.n_sink + recent)
    if short.any():
        worst = int(np.flatnonzero(short)[np.argmin(plan.budgets[short])])
        sink, most = int(plan.n_sink[worst]), int(recent[worst])
        beside = f" and {sink} protected at the start" if sink else ""
        raise PolicyError(
            f"{plan.policy}: a budget of {plan.budgets[worst]} tokens ({plan.groups.label(worst)}) does not hold "
            f"{most} recent ones{beside}; the local window of {window} counts within the budget and is never evicted, "
            f"so raise the budget to {min(sink + most, positions)} or make the window smaller"
        )
    plan = replace(plan, admission=admission, n_recent=recent)
    if plan.rescue is not None:
        plan = replace(plan, rescue=np.maximum(0, np.minimum(plan.rescue, plan.budgets - plan.n_sink - recent)))
    return replace(plan, targets=pooled_targets(plan)) if plan.batch else plan


def pooled_targets(plan: Plan) -> npt.NDArray[np.int64]:
    """Draw up how many positions of each head stay after each step, [G, T + 1] (WG-KV K.1).

    Whenever all heads together hold more than their budgets add up to, each drops `Plan.batch` of what it sees, at
    least one position and protected ones excepted, again and again until the sum holds. How many go does not depend on
    which: what leaves the window is always there, for the window is never evicted.
    """
    admission, prompt = plan.admission, plan.m0.shape[1]
    assert admission is not None
    outside = max(0, prompt - admission.window)
    # Resolved during prefill: all before the window of the prompt's last query.
    held = admission.admitted[:, :outside].sum(axis=1) + (prompt - outside)
    rescue = np.zeros_like(plan.budgets) if plan.rescue is None else plan.rescue
    guarded, began = rescue, np.zeros(rescue.shape, dtype=np.bool_)
    targets = np.empty((plan.groups.count, plan.evicts.size), dtype=np.int64)
    total = int(plan.budgets.sum())
    for t, evicts in enumerate(plan.evicts):
        held = held + (t > 0)
        if evicts and held.sum() > total:
            kept, before = _protected(plan, admission, prompt + t), held
            # A head rescues at its first eviction, what is there by then.
            guarded = np.where(began, guarded, np.minimum(rescue, held - kept))
            while held.sum() > total:
                drop = np.maximum(1, (plan.batch * held + 1e-9).astype(np.int64))
                held = np.maximum(np.minimum(held, kept + guarded), held - drop)
            began |= held < before
        targets[:, t] = held
        place = admission.leaving(prompt, t)
        if place >= 0:
            held = held - ~admission.admitted[:, place]
    return targets


def _protected(plan: Plan, admission: Admission, count: int) -> npt.NDArray[np.int64]:
    """Count the protected positions that each head still has of the first `count`, [G]: they are never evicted."""
    sink, recent = min(count, int(plan.n_sink.max())), max(0, count - int(plan.n_recent.max()))
    place = np.append(np.arange(min(sink, recent)), np.arange(recent, count))
    marks = (place < plan.n_sink[:, None]) | (place >= count - plan.n_recent[:, None])
    marks &= admission.admitted[:, place] | (place >= count - admission.window)
    found: npt.NDArray[np.int64] = marks.sum(axis=1)
    return found
