"""Memory and cost of a replay, step by step: pages, bytes, attended pairs, eviction triggers, floors of time.

>>> import kvsim
>>> from kvsim.footprint import footprint
>>> trace = kvsim.open_trace("traces/samples/smollm2-needle-512")  # doctest: +SKIP
>>> footprint(kvsim.replay(trace, "h2o"), page_size=16).summary()["fragmentation"]  # doctest: +SKIP
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.costs import Cost, Hardware, Shape, causal_pairs, decode_cost, prefill_cost
from kvsim.errors import KvsimError
from kvsim.paging import PAGE_SIZE, Layout, paginate
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["ENTRY_BYTES", "Costs", "Footprint", "costs_of", "footprint"]

ENTRY_BYTES = 4
"""Bytes of a page's number in a table, and of a table's length."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Footprint:
    """What a replay holds and reads, summed over the eligible layers and KV heads.

    Tokens are counted per layer and KV head: one token of a model of 30 layers and 3 KV heads is 90 of them. Arrays run
    over t = 0..T, where 0 is the prompt.

    Attributes
    ----------
    policy, trace_name, trace_hash, loop : str
        What was run, and in which loop.
    prompt_length, num_steps : int
        L0 and T.
    heads : int
        Layers times KV heads.
    head_dim : int
        Elements of a key, and of a value.
    dtype_bytes : float
        Bytes of one of them.
    page_size, window, layout
        As in `kvsim.paging.Paging`.
    tokens, pages : array of int
        [T+1] held after step t's eviction.
    visible, written : array of int
        [T+1] tokens and pages while step t's query attends; at 0 at the end of the prefill.
    padded : array of int
        [T+1] slots of one tensor a layer that is as long as the layer's longest head: what raggedness costs without
        pages (WG-KV Fig. 4).
    attended : array of int
        [T+1] query-key pairs of step t per KV head: ``|V_t|``, or ``|S_t|`` under a selection; 0 at 0.
    read : array
        [T+1] tokens that attention must load in step t: all slots of the pages, since holes and free slots lie among
        the tokens. Under a selection its tokens alone; `topk` must load every visible key, too, to choose them.
    bounds : array of int
        [T+1] pages of visible tokens that `quest` keeps the least and the largest key of; 0 without it.
    evicted, moved : array of int
        [T+1] tokens evicted after step t, without those that admission let go, and moved by compaction.
    triggered : array of int
        [T+1] heads in which step t evicted anything.
    head_triggers : array of int
        [K, Hk] steps at which each head evicted anything.
    prefill_pairs : float
        Query-key pairs of the prefill per query head, mean over layers and heads; dense without admission.
    """

    policy: str
    trace_name: str
    trace_hash: str
    loop: str
    prompt_length: int
    num_steps: int
    heads: int
    head_dim: int
    dtype_bytes: float
    page_size: int
    window: int
    layout: Layout
    tokens: IntArray = field(repr=False)
    pages: IntArray = field(repr=False)
    visible: IntArray = field(repr=False)
    written: IntArray = field(repr=False)
    padded: IntArray = field(repr=False)
    attended: IntArray = field(repr=False)
    read: FloatArray = field(repr=False)
    bounds: IntArray = field(repr=False)
    evicted: IntArray = field(repr=False)
    moved: IntArray = field(repr=False)
    triggered: IntArray = field(repr=False)
    head_triggers: IntArray = field(repr=False)
    prefill_pairs: float

    @property
    def token_bytes(self) -> float:
        """Bytes of one token's key and value in one head."""
        return 2 * self.head_dim * self.dtype_bytes

    @property
    def full(self) -> IntArray:
        """[T+1] tokens of the cache that keeps everything, after step t; also its attended pairs from step 1 on."""
        return self.heads * (self.prompt_length + np.arange(self.num_steps + 1, dtype=np.int64))

    @property
    def fragmentation(self) -> FloatArray:
        """[T+1] share of the held slots without a token: ``1 - logical / physical``; 0 where nothing is held."""
        slots = self.pages * self.page_size
        return 1 - np.divide(self.tokens, slots, out=np.ones(slots.shape), where=slots > 0)

    @property
    def peak_pages(self) -> int:
        """Most pages held at any moment, the end of the prefill included.

        There every layer has all of its prompt that is ever written; a prefill that evicts layer by layer holds less.
        """
        return int(max(self.pages.max(), self.written.max()))

    @property
    def table_bytes(self) -> FloatArray:
        """[T+1] bytes of one page table a layer and KV head, at the pages that are there while step t attends.

        An entry a page and a length; with ``append``, where anything is ever evicted, also one bit a slot, which says
        whether its token is still there; and the two keys of each page that `quest` ranks by.
        """
        bits = -(-self.page_size // 8) if self.layout == "append" and self.evicted.any() else 0
        sizes: FloatArray = (
            self.written * (ENTRY_BYTES + bits) + self.heads * ENTRY_BYTES + self.bounds * self.token_bytes
        )
        return sizes

    @property
    def triggers(self) -> int:
        """Moments at which any head evicted anything."""
        return int((self.triggered > 0).sum())

    @property
    def cache_size(self) -> float:
        """``|V_t| / (L0 + t)``, averaged over steps: 1 for the full cache, as `Result.cache_size`."""
        first = 1 if self.num_steps else 0
        return float(np.mean(self.visible[first:] / self.full[first:]))

    @property
    def attended_share(self) -> float:
        """Attended pairs of all steps over those of the full cache (WG-KV Fig. 2b); 1 without a step."""
        return float(self.attended[1:].sum() / self.full[1:].sum()) if self.num_steps else 1.0

    def rows(self) -> list[dict[str, Any]]:
        """Give one row a step, 0 to T."""
        page_bytes = self.page_size * self.token_bytes
        columns: dict[str, npt.NDArray[Any]] = {
            "step": np.arange(self.num_steps + 1),
            "tokens": self.tokens,
            "logical_bytes": self.tokens * self.token_bytes,
            "pages": self.pages,
            "physical_bytes": self.pages * page_bytes,
            "fragmentation": self.fragmentation,
            "highest_physical_bytes": np.maximum(self.pages, self.written) * page_bytes,
            "padded_bytes": self.padded * self.token_bytes,
            "table_bytes": self.table_bytes,
            "attended_pairs": self.attended,
            "full_attended_pairs": np.where(np.arange(self.num_steps + 1) > 0, self.full, 0),
            "read_tokens": self.read,
            "evicted_tokens": self.evicted,
            "moved_tokens": self.moved,
            "triggered_heads": self.triggered,
        }
        labels = {"trace": self.trace_name, "trace_hash": self.trace_hash, "policy": self.policy}
        lists = {name: column.tolist() for name, column in columns.items()}
        return [labels | dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]

    def summary(self) -> dict[str, Any]:
        """Give the numbers of the whole run, ready for JSON; bytes and tokens are those after the last step."""
        page_bytes = self.page_size * self.token_bytes
        return {
            "policy": self.policy,
            "trace": self.trace_name,
            "trace_hash": self.trace_hash,
            "loop": self.loop,
            "prompt_length": self.prompt_length,
            "steps": self.num_steps,
            "page_size": self.page_size,
            "layout": self.layout,
            "window": self.window,
            "tokens": int(self.tokens[-1]),
            "cache_size": self.cache_size,
            "tokens_of_a_head": float(self.tokens.mean() / self.heads),
            "peak_tokens_of_a_head": float(max(self.tokens.max(), self.visible.max()) / self.heads),
            "logical_bytes": float(self.tokens[-1] * self.token_bytes),
            "physical_bytes": float(self.pages[-1] * page_bytes),
            "fragmentation": float(self.fragmentation[-1]),
            "peak_bytes": float(self.peak_pages * page_bytes),
            "full_bytes": float(self.full[-1] * self.token_bytes),
            "padded_bytes": float(self.padded[-1] * self.token_bytes),
            "table_bytes": float(self.table_bytes[-1]),
            "attended_pairs": int(self.attended.sum()),
            "attended_share": self.attended_share,
            "moved_tokens": int(self.moved.sum()),
            "triggers": self.triggers,
            "trigger_steps": np.flatnonzero(self.triggered).tolist(),
            "triggers_of_a_head": float(self.head_triggers.mean()),
            "triggers_by_head": self.head_triggers.tolist(),
        }


def footprint(
    result: Result, *, page_size: int = PAGE_SIZE, dtype_bytes: float = 2, layout: Layout = "append"
) -> Footprint:
    """Lay a replay out in memory.

    Parameters
    ----------
    result : Result
        Irreversible; any groups. Heads that share a retained set have pages and a table each.
    page_size : int
        Tokens of a page.
    dtype_bytes : float
        Bytes of one number of a key or value.
    layout : {"append", "compact"}
        See `kvsim.paging.LAYOUTS`.

    Raises
    ------
    KvsimError
        In shadow mode, whose sets can return; if the recording does not know its head dimension; or a size is out of
        range.
    """
    if result.mode == "shadow":
        raise KvsimError(f"{result.policy}: a shadow run evicts nothing, so its memory is the full cache's")
    if result.head_dim is None:
        raise KvsimError(f"{result.trace_name}: the recording does not know its head dimension, so it has no bytes")
    if not 0 < dtype_bytes <= 16:
        raise KvsimError(f"bytes of a number must be above 0 and at most 16, got {dtype_bytes:g}")
    plan, admission, prompt = result.plan, result.plan.admission, result.prompt_length
    window = 0 if admission is None else admission.window
    paging = paginate(
        result.evicted_at,
        prompt,
        page_size=page_size,
        window=window,
        admitted=None if admission is None else admission.admitted,
        layout=layout,
    )
    groups = plan.groups
    places = np.array([groups.of_layer(k) for k in range(len(groups.layers))])
    weights = np.bincount(places.ravel(), minlength=groups.count)
    total = {name: weights @ getattr(paging, name) for name in ("tokens", "pages", "visible", "written", "moved")}
    seen, chosen = total["visible"], result.outcome.selected
    attended, read, bounds = seen.copy(), total["written"] * float(page_size), np.zeros_like(seen)
    if chosen is not None and plan.selection is not None:
        attended[1:] = np.rint(chosen * places.size)
        read[1:] = attended[1:]
        if plan.selection.kind == "topk":
            read[1:] = (attended[1:] + seen[1:]) / 2
        else:
            near = np.minimum(window, prompt + np.arange(result.num_steps + 1))
            near[0] = min(max(0, window - 1), prompt)
            bounds = weights @ -(-(paging.visible - near) // plan.selection.page)
    attended[0], read[0] = 0, 0.0
    mask = None if admission is None else admission.admitted[:, :prompt]
    return Footprint(
        policy=result.policy,
        trace_name=result.trace_name,
        trace_hash=result.trace_hash,
        loop=result.loop,
        prompt_length=prompt,
        num_steps=result.num_steps,
        heads=places.size,
        head_dim=result.head_dim,
        dtype_bytes=dtype_bytes,
        page_size=page_size,
        window=window,
        layout=layout,
        **total,
        padded=groups.num_kv_heads * paging.tokens[places].max(axis=1).sum(axis=0),
        attended=attended,
        read=read,
        bounds=bounds,
        evicted=weights @ paging.evicted,
        triggered=weights @ (paging.evicted > 0),
        head_triggers=(paging.evicted > 0).sum(axis=1)[places],
        prefill_pairs=causal_pairs(prompt, window or None, mask),
    )


@dataclass(frozen=True)
class Costs:
    """Floors of a replay beside those of the full cache, on one device and model.

    Attributes
    ----------
    decode, full_decode : tuple of Cost
        Of each step, 1 to T.
    prefill, full_prefill : Cost
        Of the prompt.
    """

    decode: tuple[Cost, ...]
    full_decode: tuple[Cost, ...]
    prefill: Cost
    full_prefill: Cost

    def summary(self) -> dict[str, float | None]:
        """Give means over steps in ms, and ratios: how many times as long the full cache takes; None without a step."""
        own, full = (sum(cost.seconds for cost in costs) for costs in (self.decode, self.full_decode))
        steps = len(self.decode)
        return {
            "decode_ms": 1e3 * own / steps if steps else None,
            "full_decode_ms": 1e3 * full / steps if steps else None,
            "decode_ratio": full / own if steps else None,
            "prefill_ms": 1e3 * self.prefill.seconds,
            "full_prefill_ms": 1e3 * self.full_prefill.seconds,
            "prefill_ratio": self.full_prefill.seconds / self.prefill.seconds,
        }


def costs_of(
    found: Footprint,
    hardware: Hardware,
    shape: Shape | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> Costs:
    """Give the floors of each decode step and of the prefill; see `kvsim.costs` for what they leave out.

    Parameters
    ----------
    found : Footprint
        What is read.
    hardware : Hardware
        The device.
    shape : Shape, optional
        A model, of which every layer and KV head reads what the recording's read on average.
    config : mapping, optional
        Without a shape, the recorded model's configuration; what its eligible layers read is taken as it is.

    Raises
    ------
    KvsimError
        If neither a shape nor a usable configuration is given.
    """
    scale = 1.0
    if shape is None:
        if config is None:
            raise KvsimError(f"{found.trace_name}: the recording does not know its model; name a shape")
        shape = Shape.of_config(config, found.trace_name)
    else:
        scale = shape.cached(1) / found.heads
    size, length = found.page_size, found.prompt_length
    tables = found.table_bytes
    full = -(-(found.full[1:] // found.heads) // size) * found.heads
    full_tables = full * ENTRY_BYTES + found.heads * ENTRY_BYTES

    def decode(tokens: float, table: float) -> Cost:
        return decode_cost(shape, hardware, scale * tokens, dtype_bytes=found.dtype_bytes, extra_bytes=scale * table)

    return Costs(
        decode=tuple(decode(found.read[t], tables[t]) for t in range(1, found.num_steps + 1)),
        full_decode=tuple(decode(pages * size, table) for pages, table in zip(full, full_tables, strict=True)),
        prefill=prefill_cost(shape, hardware, length, found.prefill_pairs),
        full_prefill=prefill_cost(shape, hardware, length),
    )
