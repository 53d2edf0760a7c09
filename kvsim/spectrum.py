"""The spectrum of scorers: how far each one's ranking is from attention's (InertiaKV section 5.1).

Shadow mode: scores cover all of positions 0..p_t, and nothing is evicted. Of two scorings of one layer's positions,
Spearman's rho says how alike the rankings are and the Jaccard index of their top-B sets how alike what would be kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import CaptureError, Trace, open_trace

from kvsim.budget import Budget
from kvsim.candidates import candidates, reason, require_heads
from kvsim.context import Context
from kvsim.correlation import centred_ranks, correlation, jaccard, top
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError, PolicyError
from kvsim.plan import FloatArray, Groups, ScoreSource
from kvsim.protect import Protect
from kvsim.replay import choose_budget
from kvsim.scorers import Scorer
from kvsim.scorers.attention import Attention
from kvsim.shadow_scores import ShadowScores, shadow_rows
from kvsim.when import When

__all__ = ["MEASURES", "READINGS", "Spectrum", "half_depth", "spectrum"]

MEASURES = ("spearman", "top_jaccard")

READINGS = {
    "layer": "one layer's scores against its attention",
    "mean_of_layers": "the mean over layers of what each layer gives by itself",
    "layer_mean": "scores averaged over layers against attention averaged over layers, as a shared group ranks by",
}
"""What a row correlates. The last two differ: averaging scores first lets layers make up for one another."""


@dataclass(frozen=True)
class Spectrum:
    """Every scorer against attention on one recording.

    Attributes
    ----------
    trace_name, trace_hash : str
        The recording.
    budget : int
        B of the top-B sets.
    layers : tuple of int
        The eligible layers, by their numbers in the recording.
    steps : tuple of int
        The steps averaged over.
    rows : list of dict
        For each scorer one row a layer, then one for each average: ``trace``, ``scorer``, ``reading`` (of `READINGS`),
        ``layer`` (None for an average), ``spearman``, ``top_jaccard``, ``steps`` and ``spearman_steps``. Rho is
        averaged over those steps, and for ``mean_of_layers`` those layers, where neither scoring is constant;
        `spearman_steps` counts the steps, and with none of them it is None. The Jaccard index is None where B is no
        smaller than the number of positions at every step: then there is nothing to choose.
    left_out : dict of str to str
        Scorers that this recording cannot give, and why.
    """

    trace_name: str
    trace_hash: str
    budget: int
    layers: tuple[int, ...]
    steps: tuple[int, ...]
    rows: list[dict[str, Any]] = field(repr=False)
    left_out: dict[str, str] = field(repr=False)

    def overview(self, layer: int | None = None) -> list[dict[str, Any]]:
        """Give one row a scorer: both averages, one layer, and the least and greatest layer.

        Parameters
        ----------
        layer : int, optional
            A layer's number in the recording; the one at half depth by default.

        Returns
        -------
        list of dict
            ``trace``, ``scorer``, ``layer``, and for each measure ``<measure>_mean_of_layers``,
            ``<measure>_layer_mean``, ``<measure>_layer``, ``<measure>_min``, ``<measure>_max``; by descending rho.

        Raises
        ------
        KvsimError
            If the layer is not an eligible one.
        """
        layer = half_depth(self.layers) if layer is None else layer
        if layer not in self.layers:
            raise KvsimError(
                f"{self.trace_name}: no layer {layer} to measure (eligible: {', '.join(map(str, self.layers))})"
            )
        found: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            one = found.setdefault(row["scorer"], {"trace": row["trace"], "scorer": row["scorer"], "layer": layer})
            if row["reading"] != "layer" or row["layer"] == layer:
                one |= {f"{measure}_{row['reading']}": row[measure] for measure in MEASURES}
        for scorer, one in found.items():
            own = [row for row in self.rows if row["scorer"] == scorer and row["reading"] == "layer"]
            for measure in MEASURES:
                known = [row[measure] for row in own if row[measure] is not None]
                one |= {f"{measure}_min": min(known, default=None), f"{measure}_max": max(known, default=None)}
        return sorted(found.values(), key=_by_rho)


def half_depth(layers: Sequence[int]) -> int:
    """Give the layer at half depth: of 32 layers, number 15, which the paper quotes."""
    return layers[(len(layers) - 1) // 2]


def spectrum(
    trace: Trace | str | Path,
    scorers: Sequence[Scorer | str] | None = None,
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    steps: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Spectrum:
    """Correlate scorers with attention, layer by layer, over the visible positions of a recording.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    scorers : sequence of Scorer or str, optional
        As after ``score=``; by default all that the recording can give, except attention itself.
    compression_ratio, budget
        As for `kvsim.replay`: B of the top-B sets.
    steps : sequence of int, optional
        Steps to average over, from 1; all by default.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    Spectrum

    Raises
    ------
    KvsimError
        On a bad scorer, budget or step, or a named scorer that the recording cannot give.
    TraceError
        If the recording is damaged, or lacks what a named scorer reads.

    Examples
    --------
    >>> from kvsim.spectrum import spectrum
    >>> rows = spectrum("traces/samples/smollm2-needle-512", ["keydiff"], steps=[1]).overview()
    >>> round(rows[0]["spearman_layer"], 2), rows[0]["layer"]
    (0.2, 14)
    """
    chosen = choose_budget(compression_ratio, budget)
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    layers = trace.eligible_layers
    if not layers:
        raise PolicyError(f"{trace.path}: no recorded layer is eligible for eviction")
    measured = _steps(trace, steps)
    found, left_out = candidates(scorers)
    if scorers is None:
        del found[Attention.name]
    running: dict[str, ShadowScores] = {}
    for label, scorer in found.items():
        try:
            source = _source(trace, layers, scorer, label, chosen)
        except (PolicyError, CaptureError) as error:
            if scorers is not None:
                raise
            left_out[label] = reason(error, trace, f"score={label}")
        else:
            running[label] = ShadowScores(trace, layers, source)

    size = chosen.resolve(trace.prompt_length)
    values = np.full((2, len(running), len(measured), len(layers) + 1), np.nan)
    reference = ShadowScores(trace, layers, ScoreSource("attention"))
    for done, step in enumerate(measured):
        rows = shadow_rows(trace, layers, step)
        attention = reference.at(step, rows)
        ranks, best = centred_ranks(attention), top(attention, size)
        for index, one in enumerate(running.values()):
            scores = one.at(step, rows)
            values[0, index, done] = correlation(centred_ranks(scores), ranks)
            if size < scores.shape[1]:
                values[1, index, done] = jaccard(top(scores, size), best)
        if progress is not None:
            progress(done + 1, len(measured))
    table = [
        row
        for index, label in enumerate(running)
        for row in _rows({"trace": trace.path.name, "scorer": label}, layers, values[:, index])
    ]
    return Spectrum(trace.path.name, trace.hash, size, layers, tuple(measured), table, dict(sorted(left_out.items())))


def _steps(trace: Trace, steps: Sequence[int] | None) -> list[int]:
    if steps is None:
        steps = range(1, trace.num_steps + 1)
    for step in steps:
        if isinstance(step, bool) or not isinstance(step, (int, np.integer)) or not 1 <= step <= trace.num_steps:
            raise KvsimError(f"{trace.path}: steps must be whole numbers from 1 to {trace.num_steps}, got {step!r}")
    if not len(steps):
        raise KvsimError(f"{trace.path}: no steps to measure")
    return sorted({int(step) for step in steps})


def _source(trace: Trace, layers: tuple[int, ...], scorer: Scorer, label: str, budget: Budget) -> ScoreSource:
    groups = Groups("shared", layers, trace.num_heads, trace.num_kv_heads)
    source = scorer.source(Context(f"score={label}", trace, groups, scorer, 1, budget, Protect(), When()))
    require_heads(trace, source, f"score={label}")
    return source


def _rows(labels: dict[str, Any], layers: tuple[int, ...], values: FloatArray) -> list[dict[str, Any]]:
    """Average one scorer's [2, S, K + 1] over steps into its rows."""
    known = ~np.isnan(values)
    counts = known.sum(axis=1)
    sums = np.where(known, values, 0).sum(axis=1)
    means = [
        [float(s / c) if c else None for s, c in zip(*pair, strict=True)] for pair in zip(sums, counts, strict=True)
    ]
    ordered = [("layer", layer) for layer in layers] + [("layer_mean", None)]
    rows = []
    for place, (reading, layer) in enumerate(ordered):
        own = {measure: mean[place] for measure, mean in zip(MEASURES, means, strict=True)}
        tail = {"steps": values.shape[1], "spearman_steps": int(counts[0, place])}
        rows.append({**labels, "reading": reading, "layer": layer, **own, **tail})
    depth = len(layers)
    pooled = {}
    for measure, mean in zip(MEASURES, means, strict=True):
        defined = [value for value in mean[:depth] if value is not None]
        pooled[measure] = float(np.mean(defined)) if defined else None
    tail = {"steps": values.shape[1], "spearman_steps": int(known[0, :, :depth].any(axis=1).sum())}
    rows.insert(depth, {**labels, "reading": "mean_of_layers", "layer": None, **pooled, **tail})
    return rows


def _by_rho(row: dict[str, Any]) -> tuple[float, str]:
    rho = row["spearman_mean_of_layers"]
    return (np.inf if rho is None else -rho, row["scorer"])
