"""One model at one length: its two runs, a layer's attention by everyone, and what follows from them."""

import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from kvsim_kernels.gather_admitted.kernel import gather_admitted
from kvsim_kernels.vertical_slash.kernel import vertical_slash

from kvsim.bench_admission.decode import decode_times
from kvsim.bench_admission.dense import dense_attention, dense_names
from kvsim.bench_admission.goals import OURS
from kvsim.bench_admission.models import Setting, drawn_masks, gatekeeper
from kvsim.bench_admission.prefill import PARTS, Clock, DualCache, FullCache, prefill
from kvsim.costs import HARDWARE, Shape, decode_cost
from kvsim.live.gatekeeper import GateKeeper

__all__ = ["free", "measure", "tried"]

CACHES = ("full", "dual")


def measure(
    row: dict[str, Any], model: Any, parts: Sequence[str], is_whole: bool, setting: Setting, shape: Shape
) -> None:
    """Fill in the row of a model and a length."""
    length, base = row["length"], dense_names(on_gpu=setting.on_gpu)[0]
    attention: dict[str, float | str] = {}
    if "run" in parts:
        keeper = gatekeeper(model, setting)
        row["runs"] = {cache: tried(_run, model, length, cache, keeper, is_whole, setting) for cache in CACHES}
        if is_whole:
            for cache, name in zip(CACHES, (base, OURS), strict=True):
                if "error" not in row["runs"][cache]:
                    attention[name] = statistics.median(row["runs"][cache]["attention_ms"])
    if "attention" in parts:
        attention |= _attention(length, shape, setting, skip=attention)
    row["attention"] = attention
    ours = attention.get(OURS)
    if isinstance(ours, float):
        row["attention_ratio"] = {
            name: ms / ours for name, ms in attention.items() if isinstance(ms, float) and name != OURS
        }
    if "run" in parts:
        measured = (base, OURS) if is_whole else ()
        _compose(row, shape.layers, measured)
        _beside(row, shape, setting)


def _run(model: Any, length: int, kind: str, keeper: GateKeeper, is_whole: bool, setting: Setting) -> dict[str, Any]:
    """Prefill and decode once; a short prefill of the same kind comes first, to compile."""
    config = model.config
    dense = dense_attention(dense_names(on_gpu=setting.on_gpu)[0])

    def filled(tokens: torch.Tensor, clock: Clock) -> FullCache | DualCache:
        cache: FullCache | DualCache
        count, layers, kv_heads = len(tokens), config.num_hidden_layers, config.num_key_value_heads
        masks = drawn_masks(layers, kv_heads, count, setting.kept(count), setting.device) if kind == "dual" else None
        with clock.part("all"):
            with clock.part("allocation"):
                if masks is None:
                    cache = FullCache(model, count, setting, dense)
                else:
                    cache = DualCache(model, count, setting, keeper, masks)
            prefill(model, tokens, cache, clock, chunk=setting.chunk, attended=None if is_whole else 1)
        return cache

    tokens = torch.randint(0, config.vocab_size, (length,), device=setting.device)
    filled(tokens[: setting.chunk], Clock(setting.device))
    free()
    if setting.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(setting.device)
    cache = filled(tokens, clock)
    attention = clock.spans("attention")
    (total,) = clock.spans("all")
    row: dict[str, Any] = {
        "attended_layers": len(attention), "attention_ms": attention, "prefill_ms": total,
        "rest_ms": total - sum(attention),
        "parts_ms": {part: sum(spans) for part in PARTS if (spans := clock.spans(part)) and part != "attention"},
        "cache_bytes": _cache_bytes(cache),
    }  # fmt: skip
    if kind == "dual":
        row["gather_ms"] = clock.spans("gather")
    cache.let_go()
    words = tokens.tolist()
    row["decode"] = tried(decode_times, model, cache, words, setting, keeper)
    if setting.on_gpu:
        row["peak_bytes"] = row["decode"].pop("peak_bytes", torch.cuda.max_memory_allocated())
    return row


def _cache_bytes(cache: FullCache | DualCache) -> int:
    return cache.pool.nbytes if isinstance(cache, DualCache) else sum(own.nbytes for own in cache.layers)


def _attention(length: int, shape: Shape, setting: Setting, skip: dict[str, Any]) -> dict[str, float | str]:
    """Time one layer's attention by everyone who is not known yet."""
    place = {"device": setting.device, "dtype": setting.dtype}
    found: dict[str, float | str] = {}
    size = length, shape.heads, shape.head_dim
    names = [OURS, *dense_names(on_gpu=setting.on_gpu)]
    for name in (name for name in names if name not in skip):

        def timed(name: str = name) -> dict[str, Any]:
            query = torch.randn(size, **place).transpose(0, 1)
            key, value = torch.randn(2, shape.kv_heads, length, shape.head_dim, **place)
            if name == "flash-attn-4":
                key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (key, value))
            if name == OURS:
                (mask,) = drawn_masks(1, shape.kv_heads, length, setting.kept(length), setting.device)
                query = query.contiguous()

                def ours() -> torch.Tensor:
                    admitted = gather_admitted(key, value, mask)
                    found = vertical_slash(
                        query, key, value, admitted, window=setting.window, tiling=setting.tiling
                    )  # fmt: skip
                    assert isinstance(found, torch.Tensor)
                    return found

                return {"ms": _median(ours, setting)}
            attend = dense_attention(name)
            few = min(length, 4096)
            attend(query[:, :few], key[:, :few], value[:, :few])
            return {"ms": _median(lambda: attend(query, key, value), setting)}

        own = tried(timed)
        found[name] = own["error"] if "error" in own else own["ms"]
    return found


def _median(action: Callable[[], object], setting: Setting) -> float:
    clock = Clock(setting.device)
    for _ in range(setting.repeats):
        with clock.part("one"):
            action()
    return statistics.median(clock.spans("one"))


def _compose(row: dict[str, Any], layers: int, measured: Sequence[str]) -> None:
    """Put prefills together; those `measured` are whole already."""
    row["prefill"] = {}
    for name, ms in row["attention"].items():
        run = row["runs"]["dual" if name == OURS else "full"]
        if "error" in run or not isinstance(ms, float):
            continue
        attention = sum(run["attention_ms"]) if name in measured else layers * ms
        parts = {"attention": attention, **run["parts_ms"]}
        if name == OURS:
            parts["gather (in attention)"] = layers * statistics.median(run["gather_ms"])
        row["prefill"][name] = {
            "ms": run["rest_ms"] + attention, "composed": name not in measured,
            "parts": parts,
        }  # fmt: skip
    ours = row["prefill"].get(OURS)
    if ours is not None:
        row["prefill_ratio"] = {name: own["ms"] / ours["ms"] for name, own in row["prefill"].items() if name != OURS}


def _beside(row: dict[str, Any], shape: Shape, setting: Setting) -> None:
    """Put the two runs beside each other."""
    full, dual = (row["runs"][cache] for cache in CACHES)
    if "error" in full or "error" in dual:
        return
    if "error" not in full["decode"] and "error" not in dual["decode"]:
        length = row["length"]
        # Which hardware does not matter to bytes.
        every, kept = (
            decode_cost(shape, HARDWARE["h200"], shape.cached(share * length)).bytes for share in (1, setting.admitted)
        )
        ratio = full["decode"]["ms"] / dual["decode"]["ms"]
        row["decode"] = {"ratio": ratio, "allowed": every / kept, "of_allowed": ratio * kept / every}
    if "peak_bytes" in full and "peak_bytes" in dual:
        row["memory_saved"] = 1 - dual["peak_bytes"] / full["peak_bytes"]


def tried(action: Callable[..., dict[str, Any]], *given: Any, **more: Any) -> dict[str, Any]:
    """Give what an action gives, or the error it ended with."""
    try:
        return action(*given, **more)
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        free()


def free() -> None:
    """Give memory back."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
