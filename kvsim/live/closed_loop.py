"""Closed-loop replay: a fixed point over masked passes, with a certificate.

A replay holds the recorded queries fixed; a model whose cache was cut would have asked differently. Here the model runs
over all recorded tokens in parallel, under a mask in which step t sees exactly V_t; the policy is replayed on the
queries and keys of that pass; and so on until no mask changes. Step t's set depends on earlier steps only, so the steps
before the first that changed are final, each pass makes at least one more step so, and a pass that changes nothing
proves that the sets are those of token-by-token decoding of these tokens. Steps that are final are not run again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import CaptureError

from kvsim.engines import get_engine
from kvsim.errors import KvsimError, PolicyError
from kvsim.live.decode import check_forced
from kvsim.live.masked_pass import NEVER, Lane, masked_pass
from kvsim.live.prefix import Prefix
from kvsim.live.run_trace import RunTrace
from kvsim.live.sequence import Sequence, live_policy, per_head
from kvsim.plan import Plan
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget, replay_many
from kvsim.result import Result

__all__ = ["ClosedLoop", "Pass", "closed_loop"]

BATCH = 8
"""Policies in one pass, by default; a pass holds their rows of all steps."""

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pass:
    """One masked pass and the replay after it.

    Attributes
    ----------
    changed : int
        Steps whose visible sets are not those the pass ran under.
    exact_steps : int
        Steps before the first of them: these are final.
    jaccard : float
        Of the visible sets with those the pass ran under, averaged over steps and groups.
    """

    changed: int
    exact_steps: int
    jaccard: float


@dataclass(frozen=True)
class ClosedLoop:
    """A policy in closed loop.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget.
    passes : list of Pass
        In order.
    exact : bool
        Whether the last pass changed nothing: the sets are those of token-by-token decoding, up to `near_ties`.
    evictions : int
        Positions evicted, over all groups.
    near_ties : int
        Cuts whose two sides are closer than rounding differs between a batched pass and a single token's.
    result : Result
        The final sets and metrics, measured on this run's own attention.
    trace : RunTrace
        That attention.
    """

    policy: str
    passes: list[Pass]
    exact: bool
    evictions: int
    near_ties: int
    result: Result
    trace: RunTrace

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        return {
            **self.result.summary(),
            "exact": self.exact,
            "passes": len(self.passes),
            "changed": [one.changed for one in self.passes],
            "exact_steps": [one.exact_steps for one in self.passes],
            "jaccard_with_last": [one.jaccard for one in self.passes],
            "evictions": self.evictions,
            "near_ties": self.near_ties,
        }


def closed_loop(
    model: Any,
    prefix: Prefix,
    tokens: Items[int],
    policies: Items[Policy | str],
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    max_passes: int | None = None,
    batch: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
) -> list[ClosedLoop]:
    """Replay policies in closed loop on one run of tokens.

    Parameters
    ----------
    model : PreTrainedModel
        In float32, unless differences of rounding are wanted.
    prefix : Prefix
        The prompt, from `kvsim.live.prefill` or `prefix_of_trace`. If it knows its recording, the first pass runs under
        the open-loop sets instead of a full cache's.
    tokens : sequence of int
        The T tokens decoded after it.
    policies : sequence of Policy or str
        They share the prefix and run as one batch.
    compression_ratio, budget
        As for `kvsim.replay`.
    max_passes : int, optional
        Stop after so many passes; by default after T, which are enough to be exact and to prove it.
    batch : int
        The most policies in one pass.
    progress : callable, optional
        Called with (policies done, policies in all).

    Returns
    -------
    list of ClosedLoop
        In the order of `policies`.

    Raises
    ------
    KvsimError
        On a policy that needs the future, a token outside the vocabulary, or a number below 1.
    """
    forced = check_forced(tokens, model)
    for name, number in (("max_passes", max_passes), ("batch", batch)):
        if number is not None and number < 1:
            raise KvsimError(f"{name} must be at least 1, got {number}")
    most = len(forced) if max_passes is None else max_passes
    chosen = choose_budget(compression_ratio, budget)
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in policies]
    runs = [_Run(live_policy(policy), prefix, forced) for policy in parsed]
    waiting, active = list(runs), list[_Run]()
    while waiting or active:
        # A policy that is done makes room for the next one, so that passes stay full.
        while waiting and len(active) < batch:
            active.append(waiting.pop(0))
        masked_pass(model, [run.lane for run in active])
        for run in active:
            run.replay()
        active = [run for run in active if not run.exact and len(run.passes) < most]
        if progress is not None:
            progress(len(runs) - len(waiting) - len(active), len(runs))
    return [run.finished() for run in runs]


class _Run:
    """A policy on its way to the fixed point."""

    def __init__(self, policy: Policy, prefix: Prefix, forced: list[int]) -> None:
        self.policy, self.prefix, self.forced = policy, prefix, forced
        self.lane = Lane(prefix, forced)
        self.passes: list[Pass] = []
        self.exact = False
        self._sequence: Sequence | None = None
        self._engine = get_engine("cpu")
        # What goes before the first step is known: the first step is exact from the start.
        first = Sequence(policy, prefix, len(forced))
        open_loop = _open_loop(prefix, policy, forced)
        start = first.evicted_at if open_loop is None else open_loop
        start = np.where(first.evicted_at == 0, 0, np.where(start == 0, -1, start))
        self._under(first.plan, start)

    def _under(self, plan: Plan, evicted_at: IntArray) -> None:
        """Set what the next pass runs under."""
        self.evicted_at = evicted_at
        self.lane.gone = per_head(plan, _gone(evicted_at))

    def replay(self) -> None:
        """Replay the policy on what a pass saw."""
        trace = self.lane.trace()
        plan = self.policy.plan(trace)
        (outcome,) = self._engine(trace, [plan], raw=False)
        assert outcome.evicted_at is not None
        now = outcome.evicted_at
        changed = _changed_steps(self.evicted_at, now, len(self.forced))
        if not changed.any():
            # The certificate is live decoding's own code, whose plan knows no more than each step did.
            self._sequence = self._decode()
            now = self._sequence.evicted_at
            changed = _changed_steps(self.evicted_at, now, len(self.forced))
        overlap = _jaccard(self.evicted_at, now, self.prefix.length)
        self.lane.final = int(changed.argmax()) if changed.any() else len(self.forced)
        self.exact = not changed.any()
        self.passes.append(Pass(int(changed.sum()), self.lane.final, overlap))
        self._under(plan, now)

    def _decode(self) -> Sequence:
        """Run the policy as live decoding does, on what the last pass saw."""
        sequence = Sequence(self.policy, self.prefix, len(self.forced))
        for step in self.lane.steps():
            sequence.advance(*step)
        return sequence

    def finished(self) -> ClosedLoop:
        """Give the outcome."""
        sequence = self._sequence or self._decode()
        return ClosedLoop(
            policy=str(self.policy),
            passes=self.passes,
            exact=self.exact,
            evictions=sequence.evictions,
            near_ties=sequence.near_ties,
            result=sequence.result("closed"),
            trace=sequence.trace,
        )


def _open_loop(prefix: Prefix, policy: Policy, forced: list[int]) -> IntArray | None:
    """Replay a policy on the recording of these tokens, if there is one that holds what the policy reads."""
    source = prefix.recording_of([*prefix.tokens, *forced])
    if source is None or source.capture == "scores":
        return None
    try:
        (result,) = replay_many(source, [policy], shadow_churn=False, raw=False)
    except (PolicyError, CaptureError):
        return None
    return result.evicted_at


def _gone(evicted_at: IntArray) -> IntArray:
    """Give the last step that sees each position, `NEVER` for one that is never evicted."""
    return np.where(evicted_at < 0, NEVER, evicted_at)


def _changed_steps(before: IntArray, now: IntArray, steps: int) -> npt.NDArray[np.bool_]:
    """Mark the steps whose visible sets differ, [T]: those after the earlier and up to the later end of a position."""
    differ = before != now
    ends = np.minimum(np.stack([_gone(before)[differ], _gone(now)[differ]]), steps)
    marks = np.zeros(steps + 1, np.int64)
    np.add.at(marks, ends.min(axis=0), 1)
    np.add.at(marks, ends.max(axis=0), -1)
    changed: npt.NDArray[np.bool_] = marks.cumsum()[:steps] > 0
    return changed


def _jaccard(before: IntArray, now: IntArray, prompt: int) -> float:
    """Average the Jaccard of the visible sets over steps and groups."""
    one, other = _gone(before), _gone(now)
    shares = []
    for t in range(1, one.shape[1] - prompt + 1):
        a, b = (gone[:, : prompt + t] >= t for gone in (one, other))
        shares.append((a & b).sum(axis=1) / (a | b).sum(axis=1))
    return float(np.mean(shares))
