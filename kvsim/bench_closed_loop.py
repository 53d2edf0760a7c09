"""Closed-loop replay beside live decoding: the same sets, in how many passes and how much of the time."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from kvsim_traces import Trace

from kvsim.bench import machine
from kvsim.budget import Budget
from kvsim.errors import KvsimError
from kvsim.live.closed_loop import BATCH, ClosedLoop, closed_loop
from kvsim.live.decode import LiveRun, decode
from kvsim.live.prefix import Prefix, prefill, recorded_tokens
from kvsim.policy import Policy, parse

__all__ = ["GROUPS", "RATIOS", "RULES", "bench_closed_loop"]

RULES = ("ema:0.8", "single", "cumulative", "ema:0.9,over=step", "ema:0.8/refresh=4", "ema:0.8/refresh=first")
GROUPS = ("shared", "layer", "head")
RATIOS = ("0.5", "0.75", "0.9", "0.95")

SWAPS = 1e-3
"""The largest share of evictions in which rounding may make the two differ."""


def bench_closed_loop(
    model: Any,
    traces: Sequence[Trace],
    *,
    policies: Sequence[str] | None = None,
    ratios: Sequence[str] = RATIOS,
    alone: bool = False,
    batch: int = BATCH,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run policies in closed loop and live on the tokens of recordings; compare their sets and their time.

    Both start after the prefill and end with all metrics, on the same threads.

    Parameters
    ----------
    model : PreTrainedModel
        The recorded model, in float32.
    traces : sequence of Trace
        The recordings.
    policies : sequence of str, optional
        `RULES` in each of `GROUPS` by default.
    ratios : sequence of str
        Compression ratios.
    alone : bool
        Also time each policy by itself, both ways.
    batch : int
        Policies that run together.
    progress : callable, optional
        Called with (cases done, cases in all).

    Returns
    -------
    dict
        ``rows``: for each case ``trace``, ``policy``, ``passes``, ``evictions``, ``near_ties``, ``swaps`` (positions
        that closed loop and live do not evict at the same step) and, if timed alone, ``closed_s``, ``live_s`` and
        ``time_ratio``. ``batches``: the same times of each batch. Then medians and sums over all cases, the machine and
        the versions.

    Raises
    ------
    KvsimError
        If a closed loop did not settle, or sets differ in more than one of 1,000 evictions: no number comes from a
        failing install.
    """
    asked = [
        parse(text).with_budget(Budget.from_compression_ratio(ratio))
        for ratio in ratios
        for text in policies or [f"{rule}/group={group}" for group in GROUPS for rule in RULES]
    ]
    rows: list[dict[str, Any]] = []
    batches: list[dict[str, Any]] = []
    warm = False
    for trace in traces:
        tokens = recorded_tokens(trace)
        prompt, forced = tokens[: trace.prompt_length], tokens[trace.prompt_length :]
        if not warm:
            # Kernels are compiled before anything is timed.
            _closed(model, prefill(model, prompt, eligible=trace.eligible_layers), forced[:2], asked[:1], 1)
            warm = True
        prefix = prefill(model, prompt, eligible=trace.eligible_layers, trace=trace)
        for start in range(0, len(asked), batch):
            together = asked[start : start + batch]
            loops, closed_s = _closed(model, prefix, forced, together, batch)
            runs, live_s = _live(model, prefix, forced, together)
            batches.append(
                {"trace": trace.path.name, "policies": len(together), "closed_s": closed_s, "live_s": live_s}
            )
            for policy, loop, run in zip(together, loops, runs, strict=True):
                rows.append(_row(trace, loop, run))
                if alone:
                    (one,), closed_s = _closed(model, prefix, forced, [policy], 1)
                    (other,), live_s = _live(model, prefix, forced, [policy])
                    rows[-1] = _row(trace, one, other) | {
                        "closed_s": closed_s,
                        "live_s": live_s,
                        "time_ratio": closed_s / live_s,
                    }
                if progress is not None:
                    progress(len(rows), len(asked) * len(traces))
    _check(rows)
    passes = [row["passes"] for row in rows]
    return {
        "rows": rows,
        "batches": batches,
        "cases": len(rows),
        "passes_median": statistics.median(passes),
        "passes_max": max(passes),
        **{name: sum(row[name] for row in rows) for name in ("evictions", "near_ties", "swaps")},
        "time_ratio_median": statistics.median(row["time_ratio"] for row in rows) if alone else None,
        "batch_time_ratio_median": statistics.median(one["closed_s"] / one["live_s"] for one in batches),
        "threads": torch.get_num_threads(),
        **machine(),
    }


def _closed(
    model: Any, prefix: Prefix, forced: list[int], policies: list[Policy], batch: int
) -> tuple[list[ClosedLoop], float]:
    start = time.perf_counter()
    loops = closed_loop(model, prefix, forced, policies, batch=batch)
    return loops, time.perf_counter() - start


def _live(model: Any, prefix: Prefix, forced: list[int], policies: list[Policy]) -> tuple[list[LiveRun], float]:
    start = time.perf_counter()
    runs = decode(model, [prefix] * len(policies), policies, steps=len(forced), force=forced)
    for run in runs:
        run.result()
    return runs, time.perf_counter() - start


def _row(trace: Trace, loop: ClosedLoop, run: LiveRun) -> dict[str, Any]:
    return {
        "trace": trace.path.name,
        "policy": loop.policy,
        "exact": loop.exact,
        "passes": len(loop.passes),
        "evictions": run.evictions,
        "near_ties": run.near_ties,
        "swaps": int(np.count_nonzero(loop.result.evicted_at != run.evicted_at)),
    }


def _check(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if not row["exact"]:
            raise KvsimError(f"{row['trace']}, {row['policy']}: the closed loop did not settle")
    swaps, evictions = (sum(row[name] for row in rows) for name in ("swaps", "evictions"))
    if swaps > SWAPS * evictions:
        worst = max(rows, key=lambda row: row["swaps"])
        raise KvsimError(
            f"closed loop and live decoding differ in {swaps} of {evictions} evictions, most on {worst['trace']}, "
            f"{worst['policy']}: {worst['swaps']} of {worst['evictions']}"
        )
