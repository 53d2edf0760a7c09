"""Closed-loop replay: a fixed point over masked passes, with a certificate.

A replay holds the recorded queries fixed; a model whose cache was cut would have asked differently. Here the model runs
over all recorded tokens in parallel, under a mask in which step t sees exactly V_t; the policy is replayed on the
queries and keys of that pass; and so on until no mask changes. Step t's set depends on earlier steps only, so the steps
before the first that changed are final, and each pass makes at least one more step so. A pass that changes nothing of
the last steps proves that the sets are those of token-by-token decoding of these tokens.

Steps that are final are not run again, and after the first pass only as many later ones as are likely to settle soon:
what the others see is a guess that earlier steps would overthrow. Where each layer decides by its own attention alone
(`Plan.layers_are_apart`), one pass is enough: what a layer's queries look at is known before they attend to anything,
so the policy is replayed there and then, layer by layer, and the pass runs under the right sets.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from kvsim_traces import CaptureError

from kvsim.engines.stepper import Stepper
from kvsim.errors import KvsimError, PolicyError
from kvsim.live.decode import check_forced
from kvsim.live.masked_pass import NEVER, IntArray, Lane, masked_pass
from kvsim.live.prefix import Prefix, check_prefix
from kvsim.live.run_trace import RunTrace
from kvsim.live.sequence import Sequence, live_policy, per_head
from kvsim.plan import FloatArray
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget, replay_many
from kvsim.result import Result

__all__ = ["NARROWEST", "ClosedLoop", "Pass", "check_closed", "closed_loop", "open_loop_guess"]

BATCH = 8
"""Policies in one pass, by default; memory holds their rows of all steps."""

NARROWEST = 24
"""Steps in a pass, where so many are left: a few more cost little beside reading the model's weights."""


@dataclass(frozen=True)
class Pass:
    """One masked pass and the replay after it.

    Attributes
    ----------
    steps : int
        Steps that were not final yet and that it ran.
    changed : int
        Those whose visible sets are not the ones the pass ran under.
    exact_steps : int
        Steps of the whole run before the first that changed or was not run: these are final.
    jaccard : float
        Of the visible sets with those the pass ran under, averaged over the pass's steps and the groups.
    """

    steps: int
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
        Whether every step is final: the sets are those of token-by-token decoding, up to `near_ties`.
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
            "pass_steps": [one.steps for one in self.passes],
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
        On a prompt that has not been read, a policy that needs the future, a token outside the vocabulary, or a number
        below 1.
    """
    check_prefix(prefix)
    forced = check_forced(tokens, model)
    for name, number in (("max_passes", max_passes), ("batch", batch)):
        if number is not None and number < 1:
            raise KvsimError(f"{name} must be at least 1, got {number}")
    most = len(forced) if max_passes is None else max_passes
    chosen = choose_budget(compression_ratio, budget)
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in policies]
    for policy in parsed:
        check_closed(policy)
    runs = [_Run(live_policy(policy), prefix, forced) for policy in parsed]
    waiting, active = list(runs), list[_Run]()
    while waiting or active:
        # A policy that is done makes room for the next one, so that passes stay full.
        while waiting and len(active) < batch:
            active.append(waiting.pop(0))
        # First passes run all steps, and would have the others do so too.
        now = [run for run in active if not run.passes] or active
        width = max(run.width for run in now)
        masked_pass(model, [run.lane for run in now], width)
        for run in now:
            run.replay(width)
        active = [run for run in active if not run.exact and len(run.passes) < most]
        if progress is not None:
            progress(len(runs) - len(waiting) - len(active), len(runs))
    return [run.finished() for run in runs]


def check_closed(policy: Policy) -> None:
    """Refuse what acts on more than the visible sets of decode steps.

    Raises
    ------
    PolicyError
        On ``admit=``, which acts on the prompt too, and ``select=``.
    """
    expanded = policy.expand()
    for axis in ("admit", "select"):
        if getattr(expanded, axis) is not None:
            raise PolicyError(f"{policy}: a closed loop does not run {axis}=; decode live, or kvsim loss, can")


class _Run:
    """A policy on its way to the fixed point."""

    def __init__(self, policy: Policy, prefix: Prefix, forced: list[int]) -> None:
        self.policy, self.steps, self.passes, self.exact = policy, len(forced), list[Pass](), False
        # The policy after the steps that are final; what goes before the first step is known.
        self.sequence = Sequence(policy, prefix, self.steps)
        first = self.sequence.evicted_at
        open_loop = open_loop_guess(prefix, policy, forced)
        guess = first if open_loop is None else np.where(first == 0, 0, np.where(open_loop == 0, -1, open_loop))
        self._gone = _gone(guess)
        self.lane = Lane(prefix, forced, np.array(per_head(self.sequence.plan, self._gone)))
        if self.sequence.plan.layers_are_apart:
            self.lane.decide = self._decide_layer
        self.width = self.steps

    def _decide_layer(self, place: int) -> IntArray:
        """Replay an eligible layer on its rows of all steps; give the last step that sees each position, [Hk, n]."""
        plan, prompt = self.sequence.plan, self.lane.prefix.length
        layer = plan.of_layer(place)
        stepper = Stepper(layer, prompt, prompt + self.steps)
        rows = self.lane.rows[plan.groups.layers[place]]
        for t in range(1, self.steps + 1):
            stepper.step(t, rows[None, :, t - 1, : prompt + t].astype(np.float64))
        gone = _gone(stepper.evicted_at)
        groups = slice(place * len(gone), (place + 1) * len(gone))
        self._gone[groups] = gone
        of_heads: IntArray = per_head(layer, gone)[0]
        return of_heads

    def replay(self, width: int) -> None:
        """Replay the policy on what a pass saw, from the first step that was not final."""
        window, prompt = self.lane.window(width), self.lane.prefix.length
        first, last = self.lane.final, window.stop
        ahead, shares = self.sequence, list[FloatArray]()
        for step in self.lane.steps(first, last):
            t = ahead.done + 1
            sees = ahead.visible_groups()
            ran = self._gone[:, : prompt + t] >= t
            shares.append((sees & ran).sum(axis=1) / (sees | ran).sum(axis=1))
            if ahead is self.sequence and (shares[-1] < 1).any():
                # Up to here the pass ran under the policy's own sets, and what it saw is final.
                self.lane.final = t - 1
                ahead = ahead.copy()
            ahead.advance(*step)
        if ahead is self.sequence:
            self.lane.final = last
        jaccard = np.array(shares)
        self.passes.append(
            Pass(last - first, int((jaccard < 1).any(axis=1).sum()), self.lane.final, float(jaccard.mean()))
        )
        self.exact = self.lane.final == self.steps
        self.ahead = ahead
        # Later steps may as well lose what they lost before.
        now = ahead.evicted_at
        later = np.where(self._gone > ahead.done, self._gone, NEVER)
        self._gone = np.where(now < 0, later, now)
        self.lane.gone = np.array(per_head(ahead.plan, self._gone))
        self.lane.decide = None
        self.width = min(self.steps - self.lane.final, max(NARROWEST, 4 * (self.lane.final - first)))

    def finished(self) -> ClosedLoop:
        """Give the outcome."""
        sequence = self.ahead
        for step in self.lane.steps(sequence.done, self.steps):
            sequence.advance(*step)
        return ClosedLoop(
            policy=str(self.policy),
            passes=self.passes,
            exact=self.exact,
            evictions=sequence.evictions,
            near_ties=sequence.near_ties,
            result=sequence.result("closed"),
            trace=sequence.trace,
        )


def open_loop_guess(prefix: Prefix, policy: Policy, forced: list[int]) -> IntArray | None:
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
    """Give the last step that sees each position, `NEVER` if all do."""
    return np.where(evicted_at < 0, NEVER, evicted_at)
