"""Charts of lines over decode steps."""

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from kvsim.charts.intake import Results, notes_of, points_each, results_of, series_of, thinned, trace_labels
from kvsim.charts.naming import name_of
from kvsim.charts.style import HEIGHT, WIDTH, Row, distinct, embed, heading, layered, marked, number
from kvsim.engines.outcome import METRICS
from kvsim.errors import KvsimError, unknown_name
from kvsim.result import Result

__all__ = ["attended_pairs", "churn", "kept_mass", "step_chart", "timeline"]


def step_chart(
    lines: Mapping[str, tuple[npt.NDArray[Any], npt.NDArray[np.float64]]],
    title: alt.TitleParams | None,
    y: str,
    *,
    scale: alt.Scale | None = None,
    rule: float | None = None,
    legend: str = "policy",
    x: str = "decode step t",
    height: int = HEIGHT,
    skip: int = 0,
) -> alt.LayerChart:
    """Draw lines over steps; long ones as means of bins of steps, with a band from the lowest to the highest.

    Parameters
    ----------
    lines : mapping of str to (steps, values)
        [n] each, by series name; NaN is left out.
    title : TitleParams or None
        From `kvsim.charts.style.heading`.
    y, x, legend : str
        What the axes and the legend are called, with units.
    scale : Scale, optional
        Of y.
    height : int
        Pixels.
    rule : float, optional
        Where a thick grey line, unlike any series, crosses.
    skip : int
        Looks that are left to series of other charts.

    Raises
    ------
    KvsimError
        If no line has a value.
    """
    most = points_each(len(lines))
    rows: list[Row] = []
    sizes = set()
    for index, (name, (steps, values)) in enumerate(lines.items()):
        own, size = thinned(steps, values, most)
        sizes.add(size)
        for row, mark in zip(own, marked(len(own), index), strict=True):
            rows.append({"series": name, **row, "mark": mark})
    series = [name for name in lines if any(row["series"] == name for row in rows)]
    size = max(sizes)
    encodings = distinct(series, legend, skip)
    x_axis = alt.X(**number("step", x if size == 1 else f"{x} (means of {size} steps; band: their range)", format="d"))
    y_axis = alt.Y(**number("value", y, scale=scale))
    tips = [alt.Tooltip("series:N", title=legend), alt.Tooltip("step:Q", title="step")]
    tips.append(alt.Tooltip("value:Q", title=y, format=".4g"))
    if size > 1:
        tips += [alt.Tooltip("low:Q", format=".4g"), alt.Tooltip("high:Q", format=".4g")]
    base = alt.Chart(embed(rows)).encode(x=x_axis, tooltip=tips)
    layers: list[alt.Chart] = []
    if size > 1:
        band = base.mark_area(opacity=0.15).transform_filter("isValid(datum.low)")
        layers.append(band.encode(y=alt.Y("low:Q", title=y), y2="high:Q", color=encodings["color"]))
    layers.append(base.mark_line().encode(y=y_axis, color=encodings["color"], strokeDash=encodings["strokeDash"]))
    points = base.mark_point(filled=True, size=45, opacity=1).transform_filter("datum.mark")
    layers.append(points.encode(y=y_axis, color=encodings["color"], shape=encodings["shape"]))
    if rule is not None:
        level = alt.Chart(embed([{"level": rule}])).encode(y="level:Q")
        layers.insert(0, level.mark_rule(color="#b8b8b8", strokeWidth=5, opacity=0.7))
    own_title = {} if title is None else {"title": title}
    return layered(*layers, width=WIDTH, height=height, **own_title)


def timeline(results: Results, metric: str = "kept_mass") -> alt.LayerChart:
    """Draw a metric over the steps, one line a result.

    Parameters
    ----------
    results : Result or sequence of Result
        Of any policies, recordings and modes.
    metric : str
        A name of `kvsim.engines.outcome.METRICS`.

    Raises
    ------
    KvsimError
        If the metric is unknown or defined for none of the results.
    """
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    found = results_of(results)
    title, y = name_of(metric)
    lines = {name: _line(result, metric) for name, result in zip(series_of(found), found, strict=True)}
    if all(np.isnan(values).all() for _, values in lines.values()):
        needs = "; output error needs a recording with values (--capture qkv)" if metric == "output_error" else ""
        raise KvsimError(f"{metric} is not defined for any of these results{needs}")
    return step_chart(lines, heading(title, *notes_of(found)), y)


def _line(result: Result, metric: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    return np.arange(1, result.num_steps + 1), result.outcome.metrics[metric]


def kept_mass(results: Results) -> alt.LayerChart:
    """Draw the kept mass over the steps: what each step's query could still see; 1 at step 1."""
    return timeline(results, "kept_mass")


def churn(results: Results) -> alt.LayerChart:
    """Draw the churn of the retained sets over the steps, beside that of the raw top-B (Fig. 4, App. I).

    Where one token leaves a step, irreversible eviction bounds churn by 2 / (B + 1), whatever the policy; the bound is
    drawn. Give shadow results (``kvsim.replay(..., shadow=True)``) too: their churn is a property of the ranking.

    Parameters
    ----------
    results : Result or sequence of Result
        Of at least two steps.

    Raises
    ------
    KvsimError
        If the recordings have one step only, which has no churn.
    """
    found = results_of(results)
    names = series_of(found)
    lines = {name: _line(result, "churn") for name, result in zip(names, found, strict=True)}
    # Results with equal groups and budgets have the same raw sets; where nothing is left out there are none.
    raws: dict[bytes, tuple[str, Result]] = {}
    for name, result in zip(names, found, strict=True):
        values = result.outcome.metrics["raw_churn"]
        if not np.isnan(values).all() and result.budget < result.prompt_length + result.num_steps:
            raws.setdefault(values.tobytes(), (name, result))
    for name, result in raws.values():
        lines["raw top-B" if len(raws) == 1 else f"raw top-B of {name}"] = _line(result, "raw_churn")
    if all(np.isnan(values).all() for _, values in lines.values()):
        raise KvsimError("churn compares the sets of two successive steps; there is only one step")
    budgets = {float(result.budget) for result in found if result.mode == "irreversible"}
    rule, notes = None, notes_of(found)
    if len(budgets) == 1:
        rule = 2 / (budgets.pop() + 1)
        notes.append(f"thick grey: 2 / (B + 1) = {rule:.3g}, the churn of one token that leaves as one comes")
    title, y = name_of("churn")
    return step_chart(lines, heading(title, *notes), y, scale=alt.Scale(zero=True, nice=True), rule=rule)


def attended_pairs(results: Results) -> alt.LayerChart:
    """Draw the attended pairs up to each step: the sum of |V_t| over steps, layers and KV heads (WG-KV Fig. 2b).

    The full cache, which evicts nothing, stands beside them.

    Parameters
    ----------
    results : Result or sequence of Result
        Irreversible results; in shadow mode |V_t| counts what is retained and the step's own position.
    """
    found = results_of(results)
    lines = {name: _pairs(result) for name, result in zip(series_of(found), found, strict=True)}
    traces = trace_labels(found)
    for result in {result.trace_hash: result for result in found}.values():
        steps = np.arange(1, result.num_steps + 1)
        heads = len(result.plan.groups.layers) * result.plan.groups.num_kv_heads
        full = np.cumsum((result.prompt_length + steps) * float(heads))
        lines.setdefault("full cache" + (f", {traces[result.trace_hash]}" if len(traces) > 1 else ""), (steps, full))
    title = heading("Attended pairs up to a step", *notes_of(found))
    y = "query–key pairs, over layers and KV heads"
    return step_chart(lines, title, y, scale=alt.Scale(zero=True, nice=True))


def _pairs(result: Result) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    groups = result.plan.groups
    start = float(result.prompt_length)
    if result.outcome.evicted_at is not None:
        start -= float((result.outcome.evicted_at == 0).sum(axis=1).mean())
    visible = np.concatenate([[start], result.outcome.metrics["retained"][:-1]]) + 1
    heads = len(groups.layers) * groups.num_kv_heads
    return np.arange(1, result.num_steps + 1), np.cumsum(visible * heads)
