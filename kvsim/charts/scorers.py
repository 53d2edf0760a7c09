"""The spectrum of scorers, layer by layer."""

import altair as alt

from kvsim.charts.intake import Rows, rows_of, with_values
from kvsim.charts.style import (
    MAX_ROWS,
    WIDTH,
    Row,
    distinct,
    embed,
    heading,
    layered,
    marked,
    number,
    panel_title,
    stacked,
)
from kvsim.errors import KvsimError

__all__ = ["scorer_spectrum"]

MEASURES = {
    "spearman": ("Spearman's rho with attention", "rho", [-1, 1]),
    "top_jaccard": ("Jaccard index of the top-B sets", "Jaccard", [0, 1]),
}
AVERAGES = ("mean_of_layers", "layer_mean")


def scorer_spectrum(rows: Rows, average: str = "mean_of_layers") -> alt.VConcatChart:
    """Draw how far each scorer is from attention: rank correlation and top-B overlap by layer, and their average.

    Parameters
    ----------
    rows : rows
        ``scorer``, ``layer`` (None for an average over depth), ``spearman``, ``top_jaccard``; optional ``trace``, and
        ``reading`` where there are several averages; as `kvsim.spectrum` gives (its results are taken too).
    average : str
        Which reading the points at the right are.

    Raises
    ------
    KvsimError
        If a column is missing, or nothing has a value.
    """
    table = rows_of(rows, "scorer", "layer", *MEASURES)
    table = [row for row in table if row["layer"] is not None or row.get("reading", average) == average]
    scorers = list(dict.fromkeys(str(row["scorer"]) for row in table))
    traces = list(dict.fromkeys(str(row.get("trace", "")) for row in table))
    layers = [int(row["layer"]) for row in table if row["layer"] is not None]
    if not layers:
        raise KvsimError("nothing to draw: no row has a layer")
    if len(table) * len(MEASURES) > MAX_ROWS:
        raise KvsimError(f"{len(table)} rows are too many for one chart; give fewer scorers or recordings")
    panels = []
    for trace in traces:
        for measure in MEASURES:
            own = [row for row in table if str(row.get("trace", "")) == trace]
            last = trace == traces[-1] and measure == list(MEASURES)[-1]
            panels.append(_panel(own, measure, scorers, max(layers), trace if len(traces) > 1 else "", last))
    notes = (
        traces[0] if len(traces) == 1 else "",
        "shadow mode: nothing is evicted; at the right: " + average.replace("_", " "),
    )
    return stacked(panels, heading("Scorers against attention", *notes), "color", "shape", "strokeDash")


def _panel(rows: list[Row], measure: str, scorers: list[str], deepest: int, trace: str, last: bool) -> alt.LayerChart:
    title, axis, domain = MEASURES[measure]
    mean_at = deepest + max(2, deepest // 12)
    points: list[Row] = []
    for index, scorer in enumerate(scorers):
        own = sorted(
            (row for row in with_values(rows, measure) if row["scorer"] == scorer and row["layer"] is not None),
            key=lambda row: row["layer"],
        )
        for row, mark in zip(own, marked(len(own), index), strict=True):
            points.append(
                {"series": scorer, "x": row["layer"], "y": row[measure], "mark": mark, "layer": f"layer {row['layer']}"}
            )
        for row in with_values(rows, measure):
            if row["scorer"] == scorer and row["layer"] is None:
                points.append({"series": scorer, "x": mean_at, "y": row[measure], "mark": True, "layer": "average"})
    encodings = distinct(scorers, "scorer")
    ticks = list(range(0, deepest + 1, max(1, round(deepest / 10))))
    x = number(
        "x",
        "layer" if last else None,
        scale=alt.Scale(domain=[0, mean_at], nice=False, padding=6),
        values=[*ticks, mean_at],
    )
    x["axis"]["labelExpr"] = f"datum.value == {mean_at} ? 'mean' : datum.label"
    y = number(
        "y",
        axis,
        scale=alt.Scale(
            domain=domain if measure == "top_jaccard" else [min([0.0, *(p["y"] for p in points)]), 1], nice=True
        ),
    )
    tips = [
        alt.Tooltip("series:N", title="scorer"),
        alt.Tooltip("layer:N"),
        alt.Tooltip("y:Q", title=axis, format=".3f"),
    ]
    base = alt.Chart(embed(points)).encode(x=alt.X(**x), y=alt.Y(**y), tooltip=tips)
    line = base.transform_filter(f"datum.x < {mean_at}").mark_line()
    line = line.encode(color=encodings["color"], strokeDash=encodings["strokeDash"])
    marks = base.transform_filter("datum.mark").mark_point(filled=True, size=45, opacity=1)
    marks = marks.encode(color=encodings["color"], shape=encodings["shape"])
    name = title + (f", {trace}" if trace else "")
    return layered(line, marks, width=WIDTH, height=190, title=panel_title(name))
