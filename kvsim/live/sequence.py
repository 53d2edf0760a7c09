"""One sequence under one policy: the plan, the stepper, and what has been seen so far."""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from kvsim_traces.manifest import LayerInfo

from kvsim.admission import Admission
from kvsim.admissions import Admit
from kvsim.admitting import pooled_targets
from kvsim.context import Context
from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.engines.stepper import Step, Stepper
from kvsim.errors import KvsimError, PolicyError
from kvsim.live.prefix import Floats, Prefix
from kvsim.live.run_trace import RunTrace
from kvsim.plan import Plan
from kvsim.policy import AXES, Policy
from kvsim.result import Result

__all__ = ["Sequence", "admission_name", "live_policy", "per_head"]

BoolArray = npt.NDArray[np.bool_]
Entry = TypeVar("Entry", bound=np.generic)


class Sequence:
    """A policy that decides, step by step, what a sequence still sees.

    Parameters
    ----------
    policy : Policy
        With its budget.
    prefix : Prefix
        The prompt.
    steps : int
        The most steps there will be.
    full_rows : bool
        Whether rows will cover the full cache.
    """

    def __init__(self, policy: Policy, prefix: Prefix, steps: int, *, full_rows: bool = True) -> None:
        self.policy, self.prefix = live_policy(policy), prefix
        self._check_admission()
        self.trace = RunTrace(prefix, steps, full_rows=full_rows)
        self._admission = self._begun(steps)
        self.plan = self._planned()
        self.steps = steps
        self.done = 0
        self.last: Step | None = None
        self.near_ties = 0
        self._stepper = Stepper(self.plan, prefix.length, prefix.length + steps)
        self.evictions = int((self.evicted_at == 0).sum())

    def __repr__(self) -> str:
        return f"Sequence({str(self.policy)!r}, prompt_length={self.prefix.length}, steps={self.done} of {self.steps})"

    @property
    def retained(self) -> BoolArray:
        """R_t, [G, L0 + T]."""
        return self._stepper.retained

    @property
    def evicted_at(self) -> npt.NDArray[np.int32]:
        """[G, L0 + T]; see `kvsim.Result.evicted_at`."""
        return self._stepper.evicted_at

    def visible(self) -> BoolArray:
        """Mark what the next step's query sees, [eligible layers, Hk, L0 + t]."""
        return per_head(self.plan, self.visible_groups())

    def visible_groups(self) -> BoolArray:
        """Mark what the next step's query sees, [G, L0 + t]."""
        t = self.done + 1
        if t > self.steps:
            raise KvsimError(f"{self.policy}: was planned for {self.steps} steps; give a larger number of steps")
        return self._stepper.visible(t)[:, : self.prefix.length + t]

    def copy(self) -> "Sequence":
        """Give a sequence that goes its own way from here."""
        other = copy(self)
        other.trace, other._stepper = self.trace.copy(), self._stepper.copy()
        if self._admission is not None:
            own = self._admission
            scores = None if own.scores is None else own.scores.copy()
            other._admission = replace(own, admitted=own.admitted.copy(), scores=scores)
            other.plan = other._stepper.plan = replace(self.plan, admission=other._admission)
        return other

    def retained_per_head(self) -> BoolArray:
        """Give R_t, [eligible layers, Hk, L0 + T]."""
        return per_head(self.plan, self._stepper.retained)

    def advance(self, token: int, rows: Floats, queries: Floats, keys: Floats, values: Floats) -> Step:
        """Take in one step's rows [K, H, L0 + t] and vectors (see `RunTrace.append`), and evict."""
        self.done += 1
        self.trace.append(token, rows, queries, keys, values)
        self._decide(keys)
        if reads_vectors(self.plan, self.done):
            # Scores of keys exist once the keys do: the plan for as far as the run has come.
            self.plan = self._stepper.plan = self._planned()
        elif self.plan.targets is not None:
            # How many stay depends on what every head has admitted so far.
            self.plan = self._stepper.plan = replace(self.plan, targets=pooled_targets(self.plan))
        layers = list(self.plan.groups.layers)
        self.last = self._stepper.step(self.done, rows[layers].astype(np.float64))
        self.evictions += int((self.evicted_at == self.done).sum())
        self.near_ties += int((self.last.margins < NEAR).sum())
        return self.last

    def _check_admission(self) -> None:
        wanted, found = admission_name(self.policy), None if self.prefix.admitted is None else self.prefix.admitted.name
        if wanted != found:
            asked = "everything" if wanted is None else wanted
            raise KvsimError(
                f"{self.policy}: admits {asked}, but its prompt was read with admission of {found or 'everything'}; "
                "read the prompt under the policy: kvsim.live.prefill_under(model, tokens, [policy])"
            )

    def _begun(self, steps: int) -> Admission | None:
        """Give the admission of the prompt; later positions follow as they come."""
        known = self.prefix.admitted
        if known is None:
            return None
        pad = ((0, 0), (0, steps))
        scores = None if known.scores is None else np.pad(known.scores.astype(np.float64), pad)
        return Admission(known.window, np.pad(known.admitted, pad), scores)

    def _planned(self) -> Plan:
        """Plan for what the trace holds now, under what was decided here, by the model's own numbers."""
        if self._admission is None:
            return self.policy.plan(self.trace)
        own, positions = self._admission, self.trace.num_positions
        if own.admitted.shape[1] > positions:
            scores = None if own.scores is None else own.scores[:, :positions]
            own = replace(own, admitted=own.admitted[:, :positions], scores=scores)
        return replace(self.policy.expand(), admit=_decided(admission_name(self.policy) or "", own)).plan(self.trace)

    def _decide(self, keys: Floats) -> None:
        """Decide about a step's keys [K, Hk, d]."""
        keeper, admission, position = self.prefix.keeper, self._admission, self.prefix.length + self.done - 1
        if keeper is None or admission is None:
            return
        for ordinal, (place, layer) in enumerate(zip(self.prefix.eligible, keeper.layers, strict=True)):
            marks, scores = keeper.decide(layer, torch.from_numpy(keys[place]).unsqueeze(1), position)
            own = slice(ordinal * keys.shape[1], (ordinal + 1) * keys.shape[1])
            admission.admitted[own, position] = marks[:, 0].numpy()
            if scores is not None and admission.scores is not None:
                admission.scores[own, position] = scores[:, 0].numpy()

    def adopt(self, done: int, evicted_at: npt.NDArray[np.int32] | None = None, *, near_ties: int = 0) -> None:
        """Take over what was decided elsewhere: `done` steps, and [G, positions] when each position went.

        Positions that went before the first step are known here already. Rows and vectors stay unknown, so a sequence
        that took over cannot be measured.
        """
        self.done, self.near_ties = done, near_ties
        if evicted_at is not None:
            own = self.evicted_at[:, : evicted_at.shape[1]]
            given = evicted_at[:, : own.shape[1]]
            own[:] = np.where((given > 0) & (given <= done), given, own)
        self.retained[:] = self.evicted_at < 0
        self.retained[:, self.prefix.length + done :] = False
        self.evictions = int((self.evicted_at >= 0).sum())

    def adopt_gates(self, gates: Floats, marks: BoolArray, *, near_ties: int = 0) -> None:
        """Take over what was decided elsewhere of the steps' own tokens, under admission without eviction.

        Parameters
        ----------
        gates : array of float32
            [G, steps].
        marks : array of bool
            [G, steps] what was admitted.
        near_ties : int
            Gates that close to the threshold.
        """
        admission, prompt, done = self._admission, self.prefix.length, gates.shape[1]
        assert admission is not None
        own = slice(prompt, prompt + done)
        admission.admitted[:, own] = marks
        if admission.scores is not None:
            admission.scores[:, own] = gates
        leaves = np.arange(prompt + done) + admission.window - prompt
        gone = np.where(~admission.admitted[:, : prompt + done] & (leaves <= done), np.maximum(leaves, 0), -1)
        self.adopt(done, gone.astype(np.int32), near_ties=near_ties)

    def held_bytes(self, element: int) -> int:
        """Bytes of the keys and values retained, `element` bytes a number; windowed layers hold what is still seen."""
        return self._bytes(int(self.retained_per_head().sum()), element)

    def full_bytes(self, element: int) -> int:
        """Bytes of a full cache at this point."""
        groups = self.plan.groups
        return self._bytes(len(groups.layers) * groups.num_kv_heads * (self.prefix.length + self.done), element)

    def _bytes(self, slots: int, element: int) -> int:
        first, position = self.prefix.layers[0], self.prefix.length + self.done
        held = sum(_seen_again(layer.info, position) for layer in self.prefix.layers if not layer.info.eligible)
        slots += held * first.keys.shape[0]
        return int(slots * (first.keys.shape[-1] + first.values.shape[-1]) * element)

    def result(self, loop: str) -> Result:
        """Measure the run as a replay is measured; its rows must cover the full cache.

        Raises
        ------
        KvsimError
            If they do not, or nothing has been decoded.
        """
        if not self.trace.full_rows or not self.done:
            raise KvsimError("kept mass and churn need the full cache's rows; decode without removing keys")
        self.trace.end()
        plan = replace(self._planned(), control=None, a=self._stepper.a, b=self._stepper.b)
        plan = replace(plan, a=plan.a[: self.done], b=plan.b[: self.done])
        engine = DEFAULT_ENGINE
        (outcome,) = get_engine(engine)(self.trace, [plan])
        assert outcome.evicted_at is not None
        if not np.array_equal(outcome.evicted_at, self.evicted_at[:, : self.trace.num_positions]):
            engine = "reference"
            (outcome,) = get_engine(engine)(self.trace, [plan])
        recorded = self.prefix.recording_of(self.trace.tokens.tolist())
        source = self.trace if recorded is None else recorded
        return Result(
            policy=plan.policy,
            trace_name=source.path.name,
            trace_hash=source.hash,
            prompt_length=self.prefix.length,
            num_steps=self.done,
            head_dim=self.trace.head_dim,
            plan=plan,
            outcome=outcome,
            engine=engine,
            approximate=False,
            loop=loop,
        )


NEAR = 1e-5
"""States on either side of a cut that differ by less than this share of their size may swap when sums are rounded
differently: a batched pass and a single token's do."""


def _decided(name: str, admission: Admission) -> Admit:
    """Give an admission whose outcome is known; policies with it read as those with the one of that name."""

    def known(self: Admit, context: Context) -> Admission:
        return admission

    kind: Any = dataclass(frozen=True)(type("Decided", (Admit,), {"name": name, "admission": known}))
    decided: Admit = kind()
    return decided


def admission_name(policy: Policy) -> str | None:
    """Give a policy's ``admit`` axis as text, None if it admits everything."""
    admit = policy.expand().admit
    return None if admit is None else AXES["admit"].write(admit)


def live_policy(policy: Policy) -> Policy:
    """Give the policy back if it can decide without the future.

    Raises
    ------
    PolicyError
        If it cannot.
    """
    if policy.needs_future:
        raise PolicyError(f"{policy}: reads what later queries attend to; it can be replayed, not run live")
    return policy


def reads_vectors(plan: Plan, step: int) -> bool:
    """Whether what a plan does at a step depends on its keys, values or queries."""
    score = plan.score
    if score.redundancy is not None:
        return bool(plan.evicts[step])
    return bool(plan.scored[step - 1]) and (score.kind != "attention" or score.weight is not None)


def _seen_again(info: LayerInfo, position: int) -> int:
    """Count the positions before `position` that the query there can see in a full cache."""
    if info.sliding_window is None:
        return position
    return (
        position % info.sliding_window if info.type == "chunked_attention" else min(info.sliding_window - 1, position)
    )


def per_head(plan: Plan, of_groups: npt.NDArray[Entry]) -> npt.NDArray[Entry]:
    """Spread what groups have for each position, [G, n], over eligible layers and KV heads, [K, Hk, n]."""
    groups = plan.groups
    shape = len(groups.layers), groups.num_kv_heads, of_groups.shape[-1]
    if groups.kind == "head":
        return of_groups.reshape(shape)
    return np.broadcast_to(of_groups[:, None], shape)
