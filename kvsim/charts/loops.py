"""How far open loops can be trusted: their sets beside a run's, and whether replays predict answers."""

import math
from typing import Any

import altair as alt
import numpy as np

from kvsim.charts.intake import Rows, points_each, policy_labels, rows_of, with_values
from kvsim.charts.lines import step_chart
from kvsim.charts.naming import name_of, without_budget
from kvsim.charts.style import (
    COLOURS,
    GREY,
    HEIGHT,
    Row,
    distinct,
    embed,
    heading,
    layered,
    number,
    panel_title,
    stacked,
)
from kvsim.errors import unknown_name
from kvsim.policy import parse
from kvsim.predictions import LOOPS, MEASURES, budget_of
from kvsim.predictions import prediction as measure_prediction

__all__ = ["fidelity", "prediction"]

LINES = {
    "jaccard_steps": "open loop",
    "oldest_steps": "null: the oldest goes",
    "random_steps": "null: a random one goes",
}
SIDE = 200
"""Pixels of a panel that stands beside another."""


def fidelity(rows: Rows) -> alt.VConcatChart:
    """Draw the Jaccard index of an open loop's sets with the run's over the steps, beside two nulls.

    One row of panels a result; at its right the total variation of attention by layer.

    Parameters
    ----------
    rows : rows
        `kvsim.fidelity.Fidelity` objects or the rows of ``kvsim fidelity --out``: ``policy``, ``loop``,
        ``jaccard_steps``, ``random_steps``, ``oldest_steps``, ``layers``, ``total_variation_by_layer`` and optional
        ``trace`` and ``budget``.

    Raises
    ------
    KvsimError
        If a column is missing, or there are too many results for one chart.
    """
    table = rows_of(rows, "policy", "loop", *LINES, "layers", "total_variation_by_layer")
    points_each(len(LINES) * len(table))
    labels = policy_labels(str(row["policy"]) for row in table)
    traces = list(dict.fromkeys(str(row.get("trace", "")) for row in table))
    budgets = list(dict.fromkeys(f"{row['budget']:.10g}" for row in table if row.get("budget") is not None))
    deepest = max(max(row["total_variation_by_layer"]) for row in table)
    panels = []
    for index, row in enumerate(table):
        last = index == len(table) - 1
        name = labels[row["policy"]] + (f", {row['trace']}" if len(traces) > 1 else "")
        lines = {
            title: (np.arange(1, len(row[column]) + 1), np.array(row[column], np.float64))
            for column, title in LINES.items()
        }
        left = step_chart(
            lines,
            panel_title(name),
            "Jaccard with the run",
            scale=alt.Scale(domain=[0, 1]),
            legend="sets after a step",
            height=110,
        )
        right = _by_layer(row["layers"], row["total_variation_by_layer"], deepest, last)
        panels.append(alt.hconcat(left, right, spacing=24))
    against = " and ".join(dict.fromkeys("token by token" if row["loop"] == "live" else "closed loop" for row in table))
    notes = (
        traces[0] if len(traces) == 1 else f"{len(traces)} recordings",
        f"open loop against {against}; nulls start from the run's first eviction"
        + (f"; B = {', '.join(budgets)} tokens" if budgets else ""),
    )
    return stacked(panels, heading("Open loop against the run", *notes))


def _by_layer(layers: list[int], values: list[float], most: float, last: bool) -> alt.LayerChart:
    rows = [{"layer": layer, "variation": value} for layer, value in zip(layers, values, strict=True)]
    x = number("layer", "layer" if last else None, format="d", tickMinStep=1)
    y = number("variation", "total variation", scale=alt.Scale(domain=[0, most], nice=True))
    base = alt.Chart(embed(rows)).encode(
        x=alt.X(**x), y=alt.Y(**y), tooltip=["layer:Q", alt.Tooltip("variation:Q", format=".3f")]
    )
    line, marks = base.mark_line(color=COLOURS[0]), base.mark_point(filled=True, size=20, color=COLOURS[0], opacity=1)
    return layered(line, marks, width=SIDE, height=110, title=panel_title("attention, by layer"))


def prediction(rows: Rows, measure: str = "kept_mass") -> alt.VConcatChart:
    """Draw the live score against what a replay said, one point a policy and budget; open loop beside closed loop.

    One row of panels a task and length. Points are means over samples; titles say how well the replay orders the
    policies of one budget (Spearman's rho), and pairs of answers to one sample (AUC).

    Parameters
    ----------
    rows : rows
        From ``kvsim predict``: ``task``, ``length``, ``index``, ``policy``, ``score`` and the replays' measures.
    measure : {"kept_mass", "survival", "output_error"}
        What the replay says.

    Raises
    ------
    KvsimError
        If the measure is unknown, a column is missing or undefined, or samples lack policies.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    columns = [f"{loop}_{measure}" for loop in LOOPS]
    table = with_values(rows_of(rows, "task", "length", "index", "policy", "score", *columns), "score", *columns)
    settings = list(dict.fromkeys((row["task"], row["length"]) for row in table))
    lines = measure_prediction(table, resamples=1)
    series = list(dict.fromkeys(without_budget(row["policy"]) for row in table))
    encodings = distinct(series, "policy") | {"size": _sizes(table)}
    title, axis = name_of(measure)
    panels = []
    for index, (task, length) in enumerate(settings):
        own = [row for row in table if (row["task"], row["length"]) == (task, length)]
        pair = []
        for loop, column in zip(LOOPS, columns, strict=True):
            told = [
                _quality(line)
                for line in lines
                if (line["task"], line["length"], line["predictor"]) == (task, length, column)
            ]
            name = alt.TitleParams(
                f"{task} at {length}, {loop} loop",
                subtitle=told,
                subtitleColor=GREY,
                anchor="start",
                fontSize=11,
                offset=4,
                limit=0,
            )
            pair.append(_points(own, column, encodings, axis if index == len(settings) - 1 else None, name))
        panels.append(alt.hconcat(*pair, spacing=24).resolve_scale(x="shared", y="shared"))
    samples = len({(row.get("seed", 0), row["index"]) for row in table})
    notes = (
        f"means of {samples} samples",
        "rho: over policies of one budget; AUC: over pairs of policies on one sample, 0.5 is chance",
    )
    return stacked(panels, heading(f"Live score against replayed {title.lower()}", *notes), "color", "shape", "size")


def _sizes(rows: list[Row]) -> alt.Size:
    """Give budgets sizes, the largest budget the largest point."""
    amounts = {budget_of(row["policy"]): _amount(row["policy"]) for row in rows}
    order = sorted(amounts, key=lambda name: amounts[name])
    sizes = np.linspace(45, 130, len(order)).tolist() if len(order) > 1 else [80]
    legend = alt.Legend(title="budget B", symbolFillColor=GREY) if len(order) > 1 else None
    return alt.Size("budget:N", sort=order, scale=alt.Scale(domain=order, range=sizes), legend=legend)


def _amount(policy: str) -> float:
    budget = parse(policy).budget
    return math.inf if budget is None else float(budget.tokens or budget.keep_ratio or 0)


def _quality(line: Row) -> str:
    rho, share = ("–" if line[name] is None else f"{line[name]:.2f}" for name in ("rank_correlation", "auc"))
    return f"B = {line['budget']}: rho {rho}, AUC {share}"


def _points(
    rows: list[Row], column: str, encodings: dict[str, Any], axis: str | None, title: alt.TitleParams
) -> alt.LayerChart:
    means: dict[str, list[Row]] = {}
    for row in rows:
        means.setdefault(row["policy"], []).append(row)
    points = [
        {
            "series": without_budget(policy),
            "policy": policy,
            "budget": budget_of(policy),
            "x": float(np.mean([row[column] for row in own])),
            "y": float(np.mean([row["score"] for row in own])),
            "samples": len(own),
        }
        for policy, own in means.items()
    ]
    x, y = number("x", axis), number("y", "live score (0 to 100)", scale=alt.Scale(domain=[0, 100]))
    base = alt.Chart(embed(points)).encode(x=alt.X(**x), y=alt.Y(**y))
    tips = ["policy:N", alt.Tooltip("x:Q", title=column, format=".3f"), alt.Tooltip("y:Q", title="score", format=".1f")]
    marks = base.mark_point(filled=True, opacity=0.9)
    marks = marks.encode(
        color=encodings["color"],
        shape=encodings["shape"],
        size=encodings["size"],
        tooltip=[*tips, "samples:Q"],
    )
    return layered(marks, width=300, height=HEIGHT, title=title)
