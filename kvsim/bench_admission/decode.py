"""Decode steps over caches that a prefill has filled: whole steps as CUDA graphs, and which kernels take their time."""

import statistics
from collections.abc import Sequence as Items
from typing import Any

import torch

from kvsim.bench_admission.dense import find_flash_4
from kvsim.bench_admission.models import PROFILED, Setting, drawn_masks
from kvsim.bench_admission.prefill import DualCache, FullCache
from kvsim.bench_live_models import milliseconds
from kvsim.live.admitted import Admitted
from kvsim.live.dual.doors import Door
from kvsim.live.dual.prefill import PooledPrefix
from kvsim.live.dual.session import DualSession
from kvsim.live.fast.session import Session
from kvsim.live.fast.slots import Slots
from kvsim.live.gatekeeper import Gatekeeper
from kvsim.live.prefix import Prefix, config_of
from kvsim.policy import Policy, parse

__all__ = ["FullSession", "MaskedSession", "decode_times", "dual_session", "full_session"]

PROBED = 5
"""Steps after which a dense attention that is slower than the quickest one is left."""

KERNELS = {
    "gate": ("_gate",),
    "promotion": ("_plan", "_move"),
    "attention": ("_attend", "_combine", "flash", "fmha", "cudnn"),
    "projections and MLP": ("_vector", "_matrix", "_add_up", "gemv", "gemm"),
    "rotary embedding and writing": ("_rope_write",),
}
"""Parts of a decode step, and what the names of their kernels hold; everything else is ``other``."""


class FullSession(Session):
    """Decoding in slots that a prefill has filled, without a copy of them."""

    def __init__(self, model: Any, prefix: Prefix, cache: FullCache, *, steps: int, attention: str = "triton") -> None:
        self._cache = cache
        super().__init__(model, [prefix], [parse("full")], steps=steps, attention=attention)

    def _seat(self, prefixes: Items[Prefix]) -> list[Slots]:
        self._movers = [self._cache.growth]
        return self._cache.layers


class MaskedSession(DualSession):
    """Decoding in the dual cache, where a mask takes the gates' decisions once they have been computed.

    Parameters
    ----------
    masks : Tensor [layers, Hk, steps + 1] bool
        What is admitted of the new tokens.
    """

    def __init__(self, model: Any, prefix: PooledPrefix, policy: Policy, masks: torch.Tensor, *, steps: int) -> None:
        self._masks = masks
        super().__init__(model, [prefix], [policy], steps=steps)
        self.door = _Overridden(self.door, masks.float(), prefix.length)


class _Overridden:
    """The gates of another door, computed and not heeded."""

    def __init__(self, door: Door, gates: torch.Tensor, first: int) -> None:
        self.tau, self._door, self._first = door.tau, door, first
        self._gates = gates.transpose(1, 2).contiguous()

    def gates(self, keys: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Door.gates`."""
        self._door.gates(keys, slots, positions)
        return self._gates.index_select(1, positions - self._first)


def full_session(
    model: Any, cache: FullCache, tokens: list[int], *, steps: int, attention: str = "triton"
) -> FullSession:
    """Begin to decode in a full cache; another one may begin in the same cache later.

    PyTorch's attention takes no lengths from the GPU: ``sdpa`` reads the prompt in every step, and not what follows.
    """
    cache.growth.lengths.fill_(cache.length + 1)
    cache.growth.new_slots.fill_(cache.length)
    for own in cache.layers:
        own.constant = cache.length if attention == "sdpa" else None
    prefix = Prefix(tokens, [own.info for own in cache.layers], None, config_of(model))
    return FullSession(model, prefix, cache, steps=steps, attention=attention)


def dual_session(
    model: Any, cache: DualCache, tokens: list[int], keeper: Gatekeeper, policy: str, masks: torch.Tensor, *, steps: int
) -> MaskedSession:
    """Begin to decode in a pool, which can be done once; `masks` [layers, Hk, steps + 1] are the new tokens'."""
    admitted = Admitted(keeper.name, keeper.window, cache.masks.flatten(0, 1).cpu().numpy())
    layers = cache.prefix_layers(model.config)
    prefix = PooledPrefix(tokens, layers, None, config_of(model), None, keeper, admitted, cache.pool)
    return MaskedSession(model, prefix, parse(policy), masks, steps=steps)


def decode_times(
    model: Any, cache: FullCache | DualCache, tokens: list[int], setting: Setting, keeper: Gatekeeper | None
) -> dict[str, Any]:
    """Time decode steps after a prefill.

    Returns
    -------
    dict
        ``ms`` (median of a step), ``attention`` (whose), ``visible`` (tokens that a KV head reads in the last step, the
        mean), ``tried`` (for a full cache: the median of each attention, or why there is none), ``kernels``
        (milliseconds of a step by part, from a profile of its own; kernels may overlap).
    """
    if isinstance(cache, DualCache):
        assert keeper is not None
        layers, kv_heads, _ = cache.masks.shape
        steps = setting.all_steps
        masks = drawn_masks(layers, kv_heads, steps + 1, setting.kept(steps + 1), setting.device)
        before = cache.pool.counts.sum()
        pool = cache.pool
        found = _timed(dual_session(model, cache, tokens, keeper, setting.policy, masks, steps=steps), setting)
        visible = float(pool.lengths.float().mean())
        promoted = int(pool.counts.sum() - before)
        return {**found, "attention": "triton", "visible": visible, "promoted": promoted, "pool_pages": pool.used()}
    tried: dict[str, Any] = {}
    best: dict[str, Any] = {}
    peaks: list[int] = []
    for attention in ("triton", "sdpa", "flash_attn"):
        try:
            found = _dense(model, cache, tokens, setting, attention, best.get("ms"))
        except Exception as error:
            if attention == "triton":
                raise
            tried[attention] = " ".join(str(error).split())[:200]
            continue
        tried[attention] = found["ms"]
        # What another attention takes besides the cache is not held against the full cache.
        peaks += [found.pop("peak_bytes")] if "peak_bytes" in found else []
        if not best or found["ms"] < best["ms"]:
            best = found | {"attention": attention}
    visible = float(cache.length + setting.all_steps)
    return {**best, "visible": visible, "tried": tried} | ({"peak_bytes": min(peaks)} if peaks else {})


def _dense(
    model: Any, cache: FullCache, tokens: list[int], setting: Setting, attention: str, limit: float | None
) -> dict[str, Any]:
    steps = setting.all_steps
    if attention == "flash_attn":
        find_flash_4()
    session = full_session(model, cache, tokens, steps=steps, attention=attention)
    return _timed(session, setting, limit)


def _timed(session: Session, setting: Setting, limit: float | None = None) -> dict[str, Any]:
    """Time a session's steps; only a few where the first ones take longer than `limit`, in milliseconds."""
    with session.attached():
        session.tokens.fill_(5)
        for _ in range(setting.warm - PROBED if setting.warm > PROBED else setting.warm):
            session.step()
        probed = milliseconds(session.step, max(0, min(PROBED, setting.warm - session.done)), setting.device)
        if limit is not None and probed and statistics.median(probed) > limit:
            return {"ms": statistics.median(probed), "steps": len(probed)}
        times = milliseconds(session.step, setting.steps, setting.device)
        session.check()
        row: dict[str, Any] = {
            "ms": statistics.median(times), "fastest_ms": min(times), "slowest_ms": max(times),
            "steps": setting.steps,
        }  # fmt: skip
        if setting.on_gpu:
            row["peak_bytes"] = torch.cuda.max_memory_allocated()
            try:
                row["kernels"] = _kernels(session)
            except RuntimeError as error:
                row["kernels_error"] = " ".join(str(error).split())[:200]
        return row


def _kernels(session: Session) -> dict[str, float]:
    """Sum up a step's kernels by part, in milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            session.step()
        torch.cuda.synchronize()
    found: dict[str, float] = dict.fromkeys([*KERNELS, "other"], 0.0)
    for event in profile.events() or []:
        if event.device_type == torch.autograd.DeviceType.CPU:
            continue
        own = next((part for part, words in KERNELS.items() if any(word in event.name for word in words)), "other")
        found[own] += event.time_range.elapsed_us() / 1e3 / PROFILED
    return found
