"""Token-by-token decoding of a model under policies: the reference for everything faster."""

import math
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_traces.decoding import choose

from kvsim.errors import KvsimError, unknown_name
from kvsim.live.cache import KVSimCache
from kvsim.live.prefix import Prefix, cache_argument, check_numbers, check_prefix
from kvsim.live.sequence import Sequence
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget
from kvsim.result import Result

__all__ = ["ENGINES", "LiveRun", "decode"]

ENGINES = ("plain", "triton")
"""Ways of decoding: the plain form is the reference."""


@dataclass(frozen=True)
class LiveRun:
    """One sequence, decoded under one policy.

    Attributes
    ----------
    policy : str
        Canonical policy string with its budget.
    tokens : list of int
        The tokens fed, one a step: generated or forced.
    evicted_at : array of int32
        [G, L0 + T]; see `kvsim.Result.evicted_at`.
    logits : list of Tensor [vocabulary]
        After each step, if asked for.
    logical_bytes : int
        Bytes of the keys and values that the policy still holds at the end, in the model's number type.
    physical_bytes : int
        Bytes that they take: the row's share of what the whole batch holds.
    full_bytes : int
        Bytes of a full cache at that point.
    evictions, near_ties : int
        Positions evicted, and cuts closer than rounding differs between ways of summing.
    sequence : Sequence
        The policy's own view of the run.
    engine : str
        What decoded it.
    allocated_bytes : (int, int) or None
        Of the engine ``triton``: bytes that PyTorch had allocated on the GPU before the first step and after it, model
        and prompts included; on a CPU those of the cache alone.
    attention : str or None
        Of the engine ``triton``: who computed the attention's output.
    """

    policy: str
    tokens: list[int]
    evicted_at: npt.NDArray[np.int32]
    logits: list[torch.Tensor]
    logical_bytes: int
    physical_bytes: int
    full_bytes: int
    evictions: int
    near_ties: int
    sequence: Sequence
    engine: str = "plain"
    allocated_bytes: tuple[int, int] | None = None
    attention: str | None = None

    def result(self) -> Result:
        """Measure the run as a replay is measured (kept mass, churn, …); not after physical removal."""
        return self.sequence.result("live")


def decode(
    model: Any,
    prefixes: Items[Prefix],
    policies: Items[Policy | str] | Policy | str,
    *,
    steps: int,
    force: Items[int] | None = None,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    physical: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Items[int] = (),
    keep_logits: bool = False,
    on_logits: Callable[[int, int, torch.Tensor], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    engine: str = "plain",
    attention: str | None = None,
) -> list[LiveRun]:
    """Decode a batch of prompts, each under its own policy, one token at a time.

    Parameters
    ----------
    model : PreTrainedModel
        The model that ran the prefills.
    prefixes : sequence of Prefix
        The prompts, from `kvsim.live.prefill`, or from `prefill_under` where policies admit; they may differ in
        length, and one may stand for several rows.
    policies : sequence of Policy or str, or one of them
        One for each prompt, or one for all.
    steps : int
        The most tokens to decode.
    force : sequence of int, optional
        Feed these tokens to every row instead of generating.
    compression_ratio, budget
        As for `kvsim.replay`.
    physical : bool
        Remove evicted keys and values from memory instead of masking them.
    temperature : float
        0 is greedy; otherwise tokens are sampled with `seed`, each row from a generator of its own.
    seed : int
    stop : sequence of int
        Tokens after which a row ends (they are fed, as the recorder does).
    keep_logits : bool
        Whether to keep every step's logits.
    on_logits : callable, optional
        Called with (row, step from 1, logits [vocabulary]) after each step; of the plain engine.
    progress : callable, optional
        Called with (steps done, steps in all).
    engine : {"plain", "triton"}
        ``triton`` runs one policy for all rows (they may differ in budget) in kernels on a CUDA GPU, a CUDA graph a
        step, and always removes what is evicted; see `kvsim.live.fast`, and `kvsim.live.dual` for policies that admit.
        It refuses policies that it does not know.
    attention : {"triton", "sdpa", "flash_attn"}, optional
        Who computes a step's output with engine ``triton``: its own kernel by default, PyTorch's SDPA, or flash-attn-4.
        The latter two give no scores: scored steps read the keys a second time, in a kernel of our own.

    Returns
    -------
    list of LiveRun
        One for each row.

    Raises
    ------
    KvsimError
        On a policy that needs the future, forced tokens outside the vocabulary, lists of unequal length, a number
        out of range, an engine that cannot run here, or a model that gives NaN.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    if attention is not None and engine != "triton":
        raise KvsimError(f"attention {attention!r} is a choice of engine 'triton'; engine {engine!r} has one attention")
    if isinstance(policies, Policy | str):
        policies = [policies] * len(prefixes)
    for prefix in prefixes:
        check_prefix(prefix)
    if len(prefixes) != len(policies) or not prefixes:
        raise KvsimError(f"{len(prefixes)} prompts for {len(policies)} policies; give one policy for each prompt")
    if not 0 <= temperature < math.inf:
        raise KvsimError(f"temperature must be finite and at least 0, got {temperature}")
    forced = None if force is None else check_forced(force, model)
    steps = steps if forced is None else min(steps, len(forced))
    if engine == "triton":
        if on_logits is not None:
            raise KvsimError("on_logits needs engine 'plain'")
        from kvsim.live.fast import decode_fast

        if steps < 1:
            raise KvsimError(f"steps must be at least 1, got {steps}")
        chosen = choose_budget(compression_ratio, budget)
        given = [(parse(one) if isinstance(one, str) else one).with_budget(chosen) for one in policies]
        return decode_fast(
            model, prefixes, given, steps=steps, forced=forced, temperature=temperature, seed=seed, stop=stop,
            keep_logits=keep_logits, progress=progress, attention=attention or "triton",
        )  # fmt: skip
    cache = KVSimCache(
        list(policies), steps=steps, compression_ratio=compression_ratio, budget=budget, physical=physical
    )
    with torch.inference_mode():
        cache.begin(prefixes)
    device = model.get_input_embeddings().weight.device
    count = len(prefixes)
    logits = [prefix.logits for prefix in prefixes]
    generators = [torch.Generator().manual_seed(seed) for _ in prefixes]
    fed: list[list[int]] = [[] for _ in prefixes]
    kept: list[list[torch.Tensor]] = [[] for _ in prefixes]
    tokens = [0] * count
    cache_name = cache_argument(model)
    with torch.inference_mode(), cache.attached(model):
        for t in range(1, steps + 1):
            for row in range(count):
                if forced is not None:
                    tokens[row] = forced[t - 1]
                elif not cache.over[row]:
                    tokens[row] = choose(known_logits(logits[row]), temperature, generators[row], [])
            for row in range(count):
                if not cache.over[row]:
                    fed[row].append(tokens[row])
            cache.next_tokens = tokens
            outputs = model(
                input_ids=torch.tensor(tokens, device=device).view(-1, 1),
                position_ids=torch.tensor([[prefix.length + t - 1] for prefix in prefixes], device=device),
                use_cache=True,
                **{cache_name: cache},
            )
            for row in range(count):
                if not cache.over[row]:
                    logits[row] = outputs.logits[row, -1].float()
                    check_numbers(known_logits(logits[row]), f"step {t}")
                    if on_logits is not None:
                        on_logits(row, t, known_logits(logits[row]))
                    if keep_logits:
                        kept[row].append(known_logits(logits[row]))
                    cache.over[row] = forced is None and tokens[row] in stop
            if progress is not None:
                progress(t, steps)
            if all(cache.over):
                break
    return [
        LiveRun(
            policy=str(one.policy),
            tokens=fed[row],
            evicted_at=one.evicted_at[:, : prefixes[row].length + one.done],
            logits=kept[row],
            logical_bytes=one.held_bytes(element_size(prefixes[row])),
            physical_bytes=cache.physical_bytes // count,
            full_bytes=one.full_bytes(element_size(prefixes[row])),
            evictions=one.evictions,
            near_ties=one.near_ties,
            sequence=one,
        )
        for row, one in enumerate(cache.sequences)
    ]


def check_forced(force: Items[int], model: Any) -> list[int]:
    """Give forced tokens back as a list.

    Raises
    ------
    KvsimError
        If there are none, or one is outside the vocabulary.
    """
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = [int(token) for token in force]
    if not tokens:
        raise KvsimError("force: is empty; at least one token is needed")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise KvsimError(f"force: token {token} is outside the vocabulary of {vocabulary}")
    return tokens


def element_size(prefix: Prefix) -> int:
    """Bytes of one number in a prompt's cache."""
    return int(prefix.layers[0].keys.element_size())


def known_logits(logits: torch.Tensor | None) -> torch.Tensor:
    """Give logits back.

    Raises
    ------
    KvsimError
        If there are none.
    """
    if logits is None:
        raise KvsimError("this prompt comes from a recording and has no logits; force its tokens, or run the prefill")
    return logits
