"""The trade-off over several recordings: means, bootstrap intervals, and the alpha that is best at each part."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kvsim.alphas import at_edge
from kvsim.errors import KvsimError, unknown_name
from kvsim.policies.ema import Ema
from kvsim.policy import Policy, parse
from kvsim.tradeoff import PARTS, TradeOff

__all__ = ["BETTER", "alpha_family", "best_alphas", "best_alphas_by", "over_traces"]

LEVEL = 0.95
RESAMPLES = 2000
BETTER: dict[str, Literal["more", "less"]] = {
    "kept_mass": "more",
    "raw_agreement": "more",
    "raw_top_evicted": "less",
    "newest_wronged": "less",
    "output_error": "less",
}
"""Metrics of which more, or less, is better; of the others neither is."""

TIE = 1e-12
"""Parts that differ by no more are equal: what lies between them is rounding."""


def over_traces(rows: Sequence[TradeOff], *, resamples: int = RESAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Average trade-offs over traces, with percentile bootstrap intervals (95%) from resampling the traces.

    Parameters
    ----------
    rows : sequence of TradeOff
        From `kvsim.tradeoff.decompose`, of any number of traces; the same policies and h for each.
    resamples : int
        Bootstrap samples.
    seed : int
        Their seed; the same traces are drawn for all policies.

    Returns
    -------
    list of dict
        ``policy``, ``h``, ``traces`` (how many), and for each part its mean and ``<part>_low``, ``<part>_high`` (None
        with a single trace, which says nothing about others).

    Raises
    ------
    KvsimError
        If the traces do not have the same policies and h, one is there twice, or `resamples` is below 1.
    """
    if resamples < 1:
        raise KvsimError(f"resamples must be at least 1, got {resamples}")
    found: dict[tuple[str, int | None], list[TradeOff]] = {}
    for row in rows:
        found.setdefault((row.policy, row.h), []).append(row)
    traces = [[row.trace_hash for row in own] for own in found.values()]
    if any(own != traces[0] for own in traces):
        raise KvsimError("every trace must have the same policies and h to be averaged")
    if traces and len(set(traces[0])) < len(traces[0]):
        raise KvsimError("a policy on one recording counts once: some recording or policy is given twice")
    averaged = []
    for (policy, h), own in found.items():
        count = len(own)
        values = np.array([[getattr(row, part) for part in PARTS] for row in own])
        mean: dict[str, Any] = {"policy": policy, "h": h, "traces": count}
        mean |= dict(zip(PARTS, values.mean(axis=0).tolist(), strict=True))
        low: list[float | None] = [None] * len(PARTS)
        high = low
        if count > 1:
            drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
            tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
            low, high = np.quantile(values[drawn].mean(axis=1), tails, axis=0).tolist()
        for part, below, above in zip(PARTS, low, high, strict=True):
            mean |= {f"{part}_low": below, f"{part}_high": above}
        averaged.append(mean)
    return averaged


def alpha_family(policy: Policy) -> tuple[str, float] | None:
    """Split an `ema` policy into its string with ``alpha`` for the number, and its alpha; None for other policies."""
    if not isinstance(policy.head, Ema):
        return None
    family = str(dataclasses.replace(policy, head=dataclasses.replace(policy.head, alpha=0.0)))
    return family.replace("ema:0", "ema:alpha", 1), policy.head.alpha


def best_alphas(rows: Sequence[TradeOff]) -> list[dict[str, Any]]:
    """Say which alpha makes each part smallest, on the average over traces.

    Parameters
    ----------
    rows : sequence of TradeOff
        As for `over_traces`.

    Returns
    -------
    list of dict
        For each `ema` policy with at least two alphas and each h: ``policy`` (its string with ``alpha`` for the
        number), ``h``, the ``alphas`` tried, for each part the list of alphas that share the smallest value, and
        ``at_edge``: for each part whether an alpha beyond those tried might do better (`kvsim.alphas.at_edge`).
    """
    families: dict[tuple[str, int | None], dict[float, dict[str, Any]]] = {}
    for row in over_traces(rows, resamples=1):
        found = alpha_family(parse(row["policy"]))
        if found is not None:
            family, alpha = found
            families.setdefault((family, row["h"]), {})[alpha] = row
    best = []
    for (family, h), by_alpha in families.items():
        if len(by_alpha) > 1:
            least = {part: min(row[part] for row in by_alpha.values()) for part in PARTS}
            winners = {
                part: sorted(alpha for alpha, row in by_alpha.items() if row[part] <= least[part] + TIE)
                for part in PARTS
            }
            alphas = sorted(by_alpha)
            edges = {part: at_edge(winners[part], alphas) for part in PARTS}
            best.append({"policy": family, "h": h, "alphas": alphas, **winners, "at_edge": edges})
    return best


def best_alphas_by(rows: Sequence[Mapping[str, Any]], metric: str = "kept_mass") -> list[dict[str, Any]]:
    """Say which alpha is best by a metric of replays of one recording.

    Parameters
    ----------
    rows : sequence of mapping
        Summaries of results (``Result.summary()``); those without an alpha or a value do not count.
    metric : str
        One of `BETTER`.

    Returns
    -------
    list of dict
        For each `ema` policy with at least two alphas: ``policy`` (its string with ``alpha`` for the number), the
        ``alphas`` tried, ``best``, those that share the best value, ``value``, and ``at_edge``, whether an alpha beyond
        those tried might do better.

    Raises
    ------
    KvsimError
        If neither more nor less of the metric is better, or the rows are of several recordings.
    """
    if metric not in BETTER:
        raise unknown_name("metric with a best value", metric, BETTER)
    if len({row["trace_hash"] for row in rows}) > 1:
        raise KvsimError("the best alpha by a metric is that of one recording; the rows are of several")
    families: dict[str, dict[float, float]] = {}
    for row in rows:
        found = alpha_family(parse(row["policy"]))
        if found is not None and row[metric] is not None:
            families.setdefault(found[0], {})[found[1]] = row[metric]
    best = []
    for family, values in families.items():
        if len(values) > 1:
            value = max(values.values()) if BETTER[metric] == "more" else min(values.values())
            winners = sorted(alpha for alpha, own in values.items() if abs(own - value) <= TIE)
            alphas = sorted(values)
            row = {"policy": family, "alphas": alphas, "best": winners, "value": value}
            best.append(row | {"at_edge": at_edge(winners, alphas)})
    return best
