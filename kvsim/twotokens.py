"""Two tokens at the boundary, step by step: InertiaKV's Figure 4 from a recording."""

from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, open_trace

from kvsim.errors import KvsimError
from kvsim.plan import FloatArray
from kvsim.policy import Policy
from kvsim.proposition import ema_update
from kvsim.replay import choose_budget
from kvsim.shadow import LinearPlan, check_boundary, layer_means, linear_plans

__all__ = ["TwoTokens", "two_tokens"]


@dataclass(frozen=True)
class TwoTokens:
    """Scores and states of two prompt positions at every step, in shadow mode.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    trace_name, trace_hash : str
        The recording.
    group : str
        The retention group.
    budget : int
        Tokens kept, B.
    step_decay : float
        A, the weight of the previous scored step's state.
    positions : tuple of int
        The two, the one with the larger time mean first.
    scores, states : array
        [T, 2] the rule's layer mean, and the state of one update a scored step from 0.
    scores_threshold, states_threshold : array
        [T] the B-th highest of all prompt positions' scores, and of their states: a position is within the top-B at a
        step if it is not below it (equal ones aside).
    """

    policy: str
    trace_name: str
    trace_hash: str
    group: str
    budget: int
    step_decay: float
    positions: tuple[int, int]
    scores: FloatArray = field(repr=False)
    states: FloatArray = field(repr=False)
    scores_threshold: FloatArray = field(repr=False)
    states_threshold: FloatArray = field(repr=False)

    @property
    def scores_inside(self) -> npt.NDArray[np.bool_]:
        """Whether each is within the top-B of the scores, [T, 2]."""
        return self.scores >= self.scores_threshold[:, None]

    @property
    def states_inside(self) -> npt.NDArray[np.bool_]:
        """Whether each is within the top-B of the states, [T, 2]."""
        return self.states >= self.states_threshold[:, None]

    def flips(self) -> dict[str, int]:
        """Count, for scores and states, the steps at which either crosses the threshold and those in reversed order."""
        found = {}
        for name in ("scores", "states"):
            inside, values = getattr(self, f"{name}_inside"), getattr(self, name)
            found[f"{name}_crossings"] = int((inside[1:] != inside[:-1]).any(axis=1).sum())
            found[f"{name}_reversed"] = int((values[:, 0] < values[:, 1]).sum())
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Give one row for each step and token, for a chart or a table."""
        scores_inside, states_inside = self.scores_inside, self.states_inside
        return [
            {
                "step": t + 1,
                "token": ("above", "below")[which],
                "position": self.positions[which],
                "score": float(self.scores[t, which]),
                "score_threshold": float(self.scores_threshold[t]),
                "score_inside": bool(scores_inside[t, which]),
                "state": float(self.states[t, which]),
                "state_threshold": float(self.states_threshold[t]),
                "state_inside": bool(states_inside[t, which]),
            }
            for t in range(len(self.scores))
            for which in range(2)
        ]

    def summary(self) -> dict[str, Any]:
        """Give everything but the steps, ready for JSON."""
        names = ("policy", "trace_hash", "group", "budget", "step_decay")
        own = {name: getattr(self, name) for name in names}
        return own | {"trace": self.trace_name, "positions": list(self.positions), **self.flips()}


def two_tokens(
    trace: Trace | str | Path,
    policy: Policy | str = "ema:0.8,over=step",
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    positions: tuple[int, int] | None = None,
    group: int = 0,
) -> TwoTokens:
    """Follow the two tokens on either side of the boundary: what a linear rule makes of their scores.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policy : Policy or str
        A linear rule.
    compression_ratio, budget
        As for `kvsim.replay`; a policy's own budget beats them.
    positions : (int, int), optional
        Two other prompt positions. By default those at ranks B and B+1 of the time mean of the rule's layer mean.
    group : int
        Retention group.

    Raises
    ------
    KvsimError
        If the policy is not a linear rule that starts at 0, the group or a position does not exist, or the budget
        leaves no prompt position out.
    """
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    (one,) = linear_plans(trace, [policy], choose_budget(compression_ratio, budget))
    check_boundary(trace, one)
    groups, prompt = one.plan.groups, trace.prompt_length
    if not 0 <= group < groups.count:
        raise KvsimError(f"group must be from 0 to {groups.count - 1}, got {group}")
    kept = int(one.plan.budgets[group])
    total = np.zeros(prompt)
    for means in layer_means(trace, [one]):
        total += means[0, group]
    mean = (total / trace.num_steps).astype(np.float32)
    if positions is None:
        order = np.argsort(mean, kind="stable")[::-1]
        positions = int(order[kept - 1]), int(order[kept])
    elif len(set(positions)) != 2 or not all(0 <= position < prompt for position in positions):
        raise KvsimError(f"positions must be two prompt positions from 0 to {prompt - 1}, got {positions}")
    elif mean[positions[0]] < mean[positions[1]]:
        positions = positions[1], positions[0]
    return _follow(trace, one, group, positions)


def _follow(trace: Trace, one: LinearPlan, group: int, positions: tuple[int, int]) -> TwoTokens:
    kept, steps, decay = int(one.plan.budgets[group]), trace.num_steps, one.rule.step_decay
    scores, states, lines = np.zeros((steps, 2)), np.zeros((steps, 2)), np.zeros((2, steps))
    updates, state = 0, np.zeros(trace.prompt_length)
    for t, means in enumerate(layer_means(trace, [one])):
        x = means[0, group]
        if one.plan.scored[t]:
            updates += 1
            state = ema_update(state, x, decay, updates)
        scores[t], states[t] = x[list(positions)], state[list(positions)]
        lines[:, t] = np.partition(x, -kept)[-kept], np.partition(state, -kept)[-kept]
    return TwoTokens(
        policy=one.plan.policy,
        trace_name=trace.path.name,
        trace_hash=trace.hash,
        group=one.plan.groups.label(group),
        budget=kept,
        step_decay=decay,
        positions=positions,
        scores=scores,
        states=states,
        scores_threshold=lines[0],
        states_threshold=lines[1],
    )
