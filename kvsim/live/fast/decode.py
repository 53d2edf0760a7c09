"""Token-by-token decoding in the fast form, with the face of `kvsim.live.decode`."""

import importlib.util
import os
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import torch
from kvsim_traces.decoding import choose

from kvsim.errors import KvsimError
from kvsim.live.prefix import Prefix
from kvsim.policy import Policy

if TYPE_CHECKING:
    from kvsim.live.decode import LiveRun
    from kvsim.live.fast.session import Session

__all__ = ["check_machine", "decode_fast"]


def decode_fast(
    model: Any,
    prefixes: Items[Prefix],
    policies: Items[Policy],
    *,
    steps: int,
    forced: Items[int] | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    stop: Items[int] = (),
    keep_logits: bool = False,
    progress: Callable[[int, int], None] | None = None,
    fused: bool | None = None,
    graphs: bool | None = None,
    pool_pages: int | None = None,
    attention: str = "triton",
) -> "list[LiveRun]":
    """Decode a batch of prompts under one policy, evicted keys removed; see `kvsim.live.decode`.

    A policy that admits runs in the dual cache, `kvsim.live.dual`.

    Greedy and forced steps do not wait for the GPU: tokens are read back at the end, or, where there are tokens to stop
    at, after some steps (`Session.read_back`), and what a row wrote after its last token is dropped. Sampling takes
    each token from the host's generator, as the plain form does, and waits for it.

    Parameters
    ----------
    model, prefixes, steps, temperature, seed, stop, keep_logits, progress
        As for `kvsim.live.decode`.
    policies : sequence of Policy
        With their budgets, one for each row; they may differ in the budget only.
    forced : sequence of int, optional
        Tokens to feed to every row.
    fused, graphs : bool, optional
        See `kvsim.live.fast.session.Session`.
    pool_pages : int, optional
        Pages of the dual cache's pool; by default as many as these steps can need.
    attention : {"triton", "sdpa", "flash_attn"}
        Who computes the output; see `kvsim.live.fast.backends.attention_backend`.

    Raises
    ------
    KvsimError
        If there is no GPU, the policy or the model is not one that the fast form runs, memory runs out, or logits are
        not numbers.
    """
    check_machine(next(model.parameters()).device)
    from kvsim.live.fast.session import Session

    failure = None
    try:
        session: Session
        if any(policy.expand().admit is not None for policy in policies):
            from kvsim.live.dual.session import DualSession

            if attention != "triton":
                raise KvsimError(f"attention {attention!r} does not read the dual cache's pages; use 'triton'")
            session = DualSession(
                model, prefixes, policies, steps=steps, forced=forced, fused=fused, graphs=graphs, pool_pages=pool_pages
            )
        else:
            session = Session(
                model, prefixes, policies, steps=steps, forced=forced, fused=fused, graphs=graphs, attention=attention
            )
        with session.attached():
            return _run(
                session, [prefix.logits for prefix in prefixes],
                generates=forced is None, temperature=temperature, seed=seed, stop=stop, keep_logits=keep_logits,
                progress=progress,
            )  # fmt: skip
    except torch.OutOfMemoryError as error:
        failure = str(error).splitlines()[0]
    # Raised out here, so that no traceback holds the cache.
    raise KvsimError(f"out of memory while decoding: {failure}; take fewer rows or a smaller budget")


def check_machine(place: torch.device) -> None:
    """Raise KvsimError unless the fast form can run on a device of this machine."""
    if importlib.util.find_spec("triton") is None:
        raise KvsimError("engine 'triton' needs triton: pip install 'kvsim[live]'; or use engine 'plain'")
    if place.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise KvsimError(
            f"engine 'triton' needs a CUDA GPU, and this would run on {place}; use engine 'plain' "
            "(TRITON_INTERPRET=1 runs the kernels on a CPU, very slowly)"
        )


def _run(
    session: "Session",
    first: list[torch.Tensor | None],
    *,
    generates: bool,
    temperature: float,
    seed: int,
    stop: Items[int],
    keep_logits: bool,
    progress: Callable[[int, int], None] | None,
) -> "list[LiveRun]":
    count, steps = len(session.sequences), session.sequences[0].steps
    generators = [torch.Generator().manual_seed(seed) for _ in range(count)]
    if generates:
        session.tokens.copy_(_chosen(first, temperature, generators))
    kept: list[torch.Tensor] = []
    before = session.allocated_bytes
    after = before
    for t in range(1, steps + 1):
        session.step()
        if t == 1:
            after = session.allocated_bytes
        if keep_logits:
            kept.append(session.logits.float().clone())
        if generates and temperature > 0:
            _check_numbers(session)
            session.tokens.copy_(_chosen(list(session.logits.float()), temperature, generators))
        if progress is not None:
            progress(t, steps)
        if t % session.read_back == 0:
            session.check()
        if generates and stop and t % session.read_back == 0:
            _check_numbers(session)
            if all(end is not None for end in _ends(session, stop)):
                break
    session.check()
    _check_numbers(session)
    ends = [session.done if end is None else end for end in _ends(session, stop if generates else ())]
    return [_finished(session, row, end, kept, (before, after)) for row, end in enumerate(ends)]


def _chosen(logits: list[torch.Tensor | None], temperature: float, generators: list[torch.Generator]) -> torch.Tensor:
    from kvsim.live.decode import known_logits

    picked = [
        choose(known_logits(own), temperature, generator, []) for own, generator in zip(logits, generators, strict=True)
    ]
    return torch.tensor(picked, dtype=torch.int64)


def _check_numbers(session: "Session") -> None:
    bad = torch.isnan(session.tops[1 : session.done + 1]).any(dim=1)
    if bool(bad.any()):
        step = int(bad.int().argmax()) + 1
        raise KvsimError(f"step {step}: the model's logits are not numbers (NaN); its weights or its type are at fault")


def _ends(session: "Session", stop: Items[int]) -> list[int | None]:
    """Give the step at which each row fed its first token to stop at, None where it did not."""
    fed = session.history[1 : session.done + 1].cpu()
    is_stop = torch.isin(fed, torch.tensor(list(stop), dtype=torch.int64))
    return [int(column.int().argmax()) + 1 if bool(column.any()) else None for column in is_stop.unbind(dim=1)]


def _finished(
    session: "Session", row: int, end: int, kept: list[torch.Tensor], allocated: tuple[int, int]
) -> "LiveRun":
    from kvsim.live.decode import LiveRun, element_size

    sequence = session.sequences[row]
    session.adopt(row, end)
    positions = sequence.prefix.length + end
    element = element_size(sequence.prefix)
    return LiveRun(
        policy=str(sequence.policy),
        tokens=session.history[1 : end + 1, row].tolist(),
        evicted_at=sequence.evicted_at[:, :positions],
        logits=[logits[row] for logits in kept[:end]],
        logical_bytes=sequence.held_bytes(element),
        physical_bytes=session.cache_bytes // len(session.sequences),
        full_bytes=sequence.full_bytes(element),
        evictions=sequence.evictions,
        near_ties=sequence.near_ties,
        sequence=sequence,
        engine="triton",
        attention=session.attention,
        allocated_bytes=allocated,
    )
