"""What a policy sees when it draws up its `Plan`: the trace, the groups, the axes of the policy string."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.budget import Budget
from kvsim.errors import PolicyError
from kvsim.plan import FloatArray, Groups, Plan, ScoreSource
from kvsim.protect import Protect
from kvsim.scoring import independent_scores
from kvsim.when import When

if TYPE_CHECKING:
    from kvsim.admissions import Admit
    from kvsim.scorers import Scorer

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """A policy about to run on a trace.

    Attributes
    ----------
    policy : str
        The canonical policy string.
    trace : Trace
        The recording.
    groups : Groups
        Its retention groups on this trace.
    score : Scorer
        What a token is worth to one step.
    refresh : int or "first"
        Steps between two scorings, or only the first step.
    budget : Budget or None
        Tokens kept, None for all.
    protect : Protect
        Positions that are not evicted while others remain.
    when : When
        Evict after every step, once before the first, or in batches on overflow.
    admit : Admit or None
        Which positions stay when they leave the local window, None for all; `kvsim.policy` adds it to the plan.
    """

    policy: str
    trace: Trace
    groups: Groups
    score: "Scorer"
    refresh: int | Literal["first"]
    budget: Budget | None
    protect: Protect
    when: When
    admit: "Admit | None" = None

    @property
    def num_steps(self) -> int:
        """Number of decode steps T."""
        return self.trace.num_steps

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens L0."""
        return self.trace.prompt_length

    @cached_property
    def keys(self) -> FloatArray:
        """Post-RoPE keys of the eligible layers, [K, Hk, L0+T, d]; needs a qk or qkv capture."""
        return self._stack(self.trace.keys)

    @cached_property
    def values(self) -> FloatArray:
        """Values of the eligible layers, [K, Hk, L0+T, d]; needs a qkv capture."""
        return self._stack(self.trace.values)

    def _stack(self, read: Callable[[int], npt.NDArray[np.float32]]) -> FloatArray:
        return np.stack([read(layer) for layer in self.groups.layers]).astype(np.float64)

    @cached_property
    def prompt_mass(self) -> FloatArray:
        """Attention each prompt position received during prefill, averaged over a group's heads, [G, K, L0]."""
        mass = self.trace.prompt_mass()[list(self.groups.layers)].astype(np.float64)
        groups = self.groups
        return np.stack(
            [mass[layers, heads].mean(axis=1) for layers, heads, _ in map(groups.members, range(groups.count))]
        )

    def prompt_attention(self, layer: int, window: int) -> FloatArray:
        """Compute the attention of the prompt's last queries over the prompt, [H, window, L0].

        Parameters
        ----------
        layer : int
            Index among the eligible layers.
        window : int
            How many of the last queries; the trace must have kept as many.

        Raises
        ------
        CaptureError
            If the trace has no keys or no prompt queries.
        PolicyError
            If the trace keeps fewer prompt queries.
        """
        recorded = self.groups.layers[layer]
        queries = self.trace.prompt_queries()[recorded].astype(np.float64)
        if queries.shape[1] < window:
            raise PolicyError(
                f"{self.policy}: needs the prompt's last {window} queries, but {self.trace.path} keeps "
                f"{queries.shape[1]}; use a smaller window or record with --prompt-queries {window}"
            )
        info = self.trace.manifest.layers[recorded]
        prompt = self.prompt_length
        keys = np.repeat(self.keys[layer, :, :prompt], self.groups.num_heads // self.groups.num_kv_heads, axis=0)
        scaling = keys.shape[-1] ** -0.5 if info.scaling is None else info.scaling
        logits = queries[:, -window:] @ keys.transpose(0, 2, 1) * scaling
        if info.softcap is not None:
            logits = info.softcap * np.tanh(logits / info.softcap)
        future = np.arange(prompt) > np.arange(prompt - window, prompt)[:, None]
        logits[:, future] = -np.inf
        weights: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return weights

    def linear(self, a: npt.ArrayLike, b: npt.ArrayLike, *, reset: bool = False, m0: FloatArray | None = None) -> Plan:
        """Complete a linear rule into a plan; the axes of the policy string fill in the rest.

        Parameters
        ----------
        a, b : array_like
            Coefficients of the recurrence, broadcast to [T, K].
        reset : bool
            Whether m starts every scored step at 0.
        m0 : array, optional
            [G, L0] state before step 1, zero by default.

        Raises
        ------
        PolicyError
            If ``when=prefill`` finds nothing to rank the prompt by, or more positions are protected than fit.
        """
        groups, steps = self.groups, self.num_steps
        score = self.score.source(self)
        shape = (steps, groups.depth)
        a, b = (np.broadcast_to(np.asarray(c, dtype=np.float64), shape) for c in (a, b))
        state = np.zeros((groups.count, self.prompt_length)) if m0 is None else m0
        evicts = np.ones(steps + 1, dtype=np.bool_)
        evicts[0] = False
        scored = self._scored_steps()
        if self.when.name == "prefill":
            evicts, scored = ~evicts, np.zeros(steps, dtype=np.bool_)
            if not score.needs_query:
                state = self._prompt_state(score, a[0], b[0], state)
            elif m0 is None:
                raise PolicyError(
                    f"{self.policy}: when=prefill needs scores before the first step; use cumulative:start=prompt "
                    "or a score that needs no query (score=keydiff, knorm, recency, random)"
                )
        plan = Plan(
            policy=self.policy,
            groups=groups,
            m0=state,
            a=a,
            b=b,
            reset=reset,
            scored=scored,
            evicts=evicts,
            score=score,
            budgets=np.zeros(groups.count, dtype=np.int64),
            n_sink=np.zeros(groups.count, dtype=np.int64),
            n_recent=np.zeros(groups.count, dtype=np.int64),
            batch=self.when.percent / 100 if self.when.name == "overflow" else 0.0,
        )
        return self.allot(plan, self._budgets())

    def allot(self, plan: Plan, budgets: npt.NDArray[np.int64]) -> Plan:
        """Give every group its own budget, [G], and its protected positions with it."""
        protect = [self.protect.resolve(budget) for budget in budgets.tolist()]
        sink, recent = (np.array(column, dtype=np.int64) for column in zip(*protect, strict=True))
        return replace(plan, budgets=budgets, n_sink=sink, n_recent=recent)

    def _budgets(self) -> npt.NDArray[np.int64]:
        tokens = self.trace.num_positions if self.budget is None else self.budget.resolve(self.prompt_length)
        return np.full(self.groups.count, tokens, dtype=np.int64)

    def _scored_steps(self) -> npt.NDArray[np.bool_]:
        steps = np.arange(self.num_steps)
        scored: npt.NDArray[np.bool_] = steps == 0 if self.refresh == "first" else steps % self.refresh == 0
        return scored

    def _prompt_state(self, score: ScoreSource, a: FloatArray, b: FloatArray, m0: FloatArray) -> FloatArray:
        prompt = np.arange(self.prompt_length)
        state = m0.copy()
        for group in range(self.groups.count):
            for layer, s in enumerate(independent_scores(score, self.groups, group, prompt)):
                state[group] = a[layer] * state[group] + b[layer] * s
        return state
