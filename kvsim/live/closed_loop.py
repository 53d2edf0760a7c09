"""Closed-loop replay: a fixed point over masked passes, with a certificate.

A replay holds the recorded queries fixed; a model whose cache was cut would have asked differently. Here the model runs
once over all recorded tokens in parallel, under a mask in which step t sees exactly V_t; the policy is replayed on the
queries and keys of that pass; and so on until no mask changes. Step t's set depends on earlier steps only, so each pass
makes at least one more step exact, and a pass that changes nothing proves that the sets are those of token-by-token
decoding of these tokens.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_traces import CaptureError, Trace
from transformers.cache_utils import Cache, CacheLayerMixin

from kvsim.errors import KvsimError, PolicyError
from kvsim.live.attention import Call, masked_attention, watched
from kvsim.live.decode import check_forced
from kvsim.live.prefix import Prefix, PrefixLayer, cache_argument, recorded_tokens
from kvsim.live.run_trace import RunTrace, to_numpy
from kvsim.live.sequence import Sequence, per_head
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget, replay
from kvsim.result import Result

__all__ = ["ClosedLoop", "Pass", "closed_loop"]

BATCH = 8
"""Policies in one pass, by default; a pass holds their rows of all steps."""

BoolArray = npt.NDArray[np.bool_]


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
        Of the retained sets with those of the pass before, averaged over steps and groups.
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
        Stop after so many passes, T + 1 by default: T are enough to be exact, and one more to prove it.
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
        On a policy that needs the future, a token outside the vocabulary, or a number of passes below 1.
    """
    forced = check_forced(tokens, model)
    if max_passes is not None and max_passes < 1:
        raise KvsimError(f"max_passes must be at least 1, got {max_passes}")
    most = len(forced) + 1 if max_passes is None else max_passes
    chosen = choose_budget(compression_ratio, budget)
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in policies]
    runs = [_Run(policy, prefix, forced, _open_loop(prefix.trace, policy, forced)) for policy in parsed]
    waiting = list(runs)
    active: list[_Run] = []
    while waiting or active:
        # A policy that is done makes room for the next one, so that passes stay full.
        while waiting and len(active) < max(1, batch):
            active.append(waiting.pop(0))
        _pass(model, prefix, forced, active)
        active = [run for run in active if not run.exact and len(run.passes) < most]
        if progress is not None:
            progress(len(runs) - len(waiting) - len(active), len(runs))
    return [run.finished() for run in runs]


def _open_loop(source: Trace | None, policy: Policy, forced: list[int]) -> Result | None:
    """Replay a policy on the recording of these tokens, if there is one that holds what the policy reads."""
    if source is None or recorded_tokens(source)[source.prompt_length :] != forced:
        return None
    try:
        return replay(source, policy, shadow_churn=False)
    except (PolicyError, CaptureError):
        return None


class _Run:
    """A policy on its way to the fixed point."""

    def __init__(self, policy: Policy, prefix: Prefix, forced: list[int], start: Result | None) -> None:
        self.policy, self.prefix, self.forced = policy, prefix, forced
        self.sequence = Sequence(policy, prefix, len(forced))
        self.passes: list[Pass] = []
        self.exact = False
        length = prefix.length + len(forced)
        causal = np.arange(length) <= prefix.length + np.arange(len(forced))[:, None]
        groups = self.sequence.plan.groups
        shape = len(groups.layers), groups.num_kv_heads
        self.masks: BoolArray = np.broadcast_to(causal[:, None, None], (len(forced), *shape, length))
        self.retained: BoolArray = np.broadcast_to(causal[:, None], (len(forced), groups.count, length))
        if start is not None:
            self._start(start.evicted_at)

    def _start(self, evicted_at: npt.NDArray[np.int32]) -> None:
        steps = np.arange(1, len(self.forced) + 1)[:, None, None]
        gone = (evicted_at >= 0) & (evicted_at < steps)
        visible = self.retained & ~gone
        self.retained = self.retained & ~((evicted_at >= 0) & (evicted_at <= steps))
        plan = self.sequence.plan
        self.masks = np.stack([per_head(plan, one) for one in visible])

    def replay(self, rows: list[Any], queries: list[Any], keys: list[Any], values: list[Any]) -> None:
        """Replay the policy on what a pass saw: one array for each layer, [H, T, n], [H, T, d], [Hk, T, d]."""
        prompt, steps = self.prefix.length, len(self.forced)
        sequence = Sequence(self.policy, self.prefix, steps)
        masks, retained = [], []
        for t in range(1, steps + 1):
            own = np.zeros_like(self.masks[0])
            own[..., : prompt + t] = sequence.visible()
            masks.append(own)
            sequence.advance(
                self.forced[t - 1],
                np.stack([layer[:, t - 1, : prompt + t] for layer in rows]),
                np.stack([layer[:, t - 1] for layer in queries]),
                np.stack([layer[:, t - 1] for layer in keys]),
                np.stack([layer[:, t - 1] for layer in values]),
            )
            retained.append(sequence.retained.copy())
        now, sets = np.stack(masks), np.stack(retained)
        same = (now == self.masks).reshape(steps, -1).all(axis=1)
        overlap = (sets & self.retained).sum(axis=-1) / (sets | self.retained).sum(axis=-1)
        changed = int((~same).sum())
        self.passes.append(Pass(changed, steps if not changed else int(same.argmin()), float(overlap.mean())))
        self.sequence, self.masks, self.retained, self.exact = sequence, now, sets, changed == 0

    def finished(self) -> ClosedLoop:
        """Give the outcome."""
        sequence = self.sequence
        return ClosedLoop(
            policy=str(self.policy),
            passes=self.passes,
            exact=self.exact,
            evictions=sequence.evictions,
            near_ties=sequence.near_ties,
            result=sequence.result("closed"),
            trace=sequence.trace,
        )


def _pass(model: Any, prefix: Prefix, forced: list[int], runs: list[_Run]) -> None:
    """Run the model once over all tokens for every run, each under its own masks, and replay."""
    device = model.get_input_embeddings().weight.device
    watcher = _PassWatcher(prefix, np.stack([run.masks for run in runs]), device)
    positions = torch.arange(prefix.length, prefix.length + len(forced), device=device)
    with torch.inference_mode(), watched(model, watcher):
        model(
            input_ids=torch.tensor([forced], device=device).expand(len(runs), -1),
            position_ids=positions.expand(len(runs), -1),
            use_cache=True,
            **{cache_argument(model): _PassCache(prefix)},
        )
    for row, run in enumerate(runs):
        run.replay(*([part[row] for part in column] for column in watcher.seen()))


class _PassWatcher:
    """Answers the attention calls of one pass, and keeps what they were."""

    def __init__(self, prefix: Prefix, masks: BoolArray, device: torch.device) -> None:
        # [runs, T, K, Hk, n] to [K, runs, Hk, T, n]
        self._masks = torch.from_numpy(np.ascontiguousarray(masks.transpose(2, 0, 3, 1, 4))).to(device)
        self._prefix, self._place = prefix, {layer: place for place, layer in enumerate(prefix.eligible)}
        self._columns: tuple[list[Any], ...] = ([], [], [], [])

    def attend(self, call: Call) -> torch.Tensor:
        """See `kvsim.live.attention.Watcher`."""
        ordinal = len(self._columns[0])
        layer = self._prefix.layers[ordinal]
        seen = _causal(layer, self._prefix.length, call)
        visible = seen
        if ordinal in self._place:
            visible = seen & self._masks[self._place[ordinal]]
        output, rows = masked_attention(call, visible, seen, rows=True)
        assert rows is not None
        prompt = self._prefix.length
        for column, part in zip(
            self._columns, (rows, call.query, call.key[:, :, prompt:], call.value[:, :, prompt:]), strict=True
        ):
            column.append(to_numpy(part))
        return output

    def seen(self) -> tuple[list[Any], ...]:
        """Give rows [runs, H, T, n], queries [runs, H, T, d], new keys and values [runs, Hk, T, d] of each layer."""
        return self._columns


def _causal(layer: PrefixLayer, prompt: int, call: Call) -> torch.Tensor:
    """Mark what each query of a pass could see in a full cache, [1, 1, T, n]."""
    length, total = call.query.shape[2], call.key.shape[2]
    columns = torch.arange(total, device=call.key.device)
    own = torch.arange(prompt, prompt + length, device=call.key.device)[:, None]
    seen = columns <= own
    window = layer.info.sliding_window
    if window is not None and layer.info.type == "chunked_attention":
        seen = seen & (columns // window == own // window)
    elif window is not None:
        seen = seen & (columns > own - window)
    return seen[None, None]


class _PassLayer(CacheLayerMixin):  # type: ignore[misc]
    """The prompt's keys and values in front of a pass's own, which nobody keeps."""

    is_sliding = False

    def __init__(self, layer: PrefixLayer) -> None:
        super().__init__()
        self.keys, self.values = layer.keys, layer.values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `CacheLayerMixin`; the keys are there from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Give the prompt's with the new ones behind them."""
        batch = key_states.shape[0]
        keys, values = (part.expand(batch, -1, -1, -1) for part in (self.keys, self.values))
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See `CacheLayerMixin`."""
        return self.keys.shape[1] + query_length, 0

    def get_seq_length(self) -> int:
        """L0."""
        return int(self.keys.shape[1])

    def get_max_length(self) -> int:
        """See `CacheLayerMixin`; there is none."""
        return -1

    get_max_cache_shape = get_max_length


class _PassCache(Cache):  # type: ignore[misc]
    def __init__(self, prefix: Prefix) -> None:
        by_index = {layer.index: layer for layer in prefix.layers}
        # A model layer without attention is never asked.
        spare = prefix.layers[0]
        super().__init__(layers=[_PassLayer(by_index.get(i, spare)) for i in range(max(by_index) + 1)])
