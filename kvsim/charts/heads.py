"""Charts by layer and KV head: what is kept, what could still be seen, and where the attention goes."""

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from kvsim.charts.intake import Rows, policy_labels, rows_of, with_values
from kvsim.charts.naming import name_of
from kvsim.charts.style import PARTS as FILLS
from kvsim.charts.style import (
    WIDTH,
    Row,
    distinct,
    embed,
    heading,
    layered,
    marked,
    number,
    panel_title,
    shades,
    stacked,
)
from kvsim.errors import KvsimError

__all__ = ["kept_by_head", "mass_by_layer"]

MOST_CELLS = 4800
MEANINGS = {
    "kept_fraction": "retained positions over all positions so far",
    "kept_mass": "what the queries of a layer and head could still see",
}
NAMES = {
    "sink": "sink: the first {n_sink}",
    "prompt": "prompt, between those",
    "rest": "generated, between those",
    "recent": "recent: the last {n_recent}",
}


def kept_by_head(rows: Rows, column: str = "kept_fraction") -> alt.VConcatChart:
    """Draw what each layer and KV head keeps as a map, one panel a policy and recording (WG-KV Fig. 13).

    Parameters
    ----------
    rows : rows
        ``policy``, ``layer``, ``head`` (None where a recording has head means only), `column`; optional ``trace``,
        ``mode`` and ``step``; as `kvsim.heads.ByHead.rows` and `kvsim.heads.size_rows` give. Where there are more than
        4,800 cells, neighbouring heads are averaged, and the axis says so.
    column : {"kept_fraction", "kept_mass"}
        What to draw; darker is more. Kept fractions on a scale from 0 to 1 that spreads the low ones out, kept masses
        from below the lowest to the highest.

    Raises
    ------
    KvsimError
        If a column is missing, recordings have different layers, or there are too many layers and policies.
    """
    table = with_values(rows_of(rows, "policy", "layer", "head", column), column)
    labels = _panels_of(table)
    layers = sorted({row["layer"] for row in table})
    if any({row["layer"] for row in own} != set(layers) for own in labels.values()):
        raise KvsimError("a chart by head shows recordings of equal layers; these have different ones")
    heads = 1 + max(row["head"] or 0 for row in table)
    room = MOST_CELLS // (len(layers) * len(labels))
    if not room:
        raise KvsimError(f"a chart holds {MOST_CELLS} cells; {len(labels)} maps x {len(layers)} layers are more")
    size = -(-heads // min(heads, room))
    values = [row[column] for row in table]
    title, legend = name_of(column)
    name = legend.partition(" (")[0]
    if column == "kept_fraction":
        fill = shades(name, [0, 1], kind="sqrt", values=[0, 0.1, 0.25, 0.5, 1], format=".2f")
    else:
        low = float(np.floor(min(values) * 20) / 20)
        high = max(*values, low + 0.01)
        fill = shades(name, [low, high], format=".2~f", values=np.linspace(low, high, 5).tolist())
    panels = []
    for label, own in labels.items():
        named = label == list(labels)[-1]
        panels.append(_map(own, column, layers, size, fill, named).properties(title=panel_title(label)))
    about = f"{title.lower()}: {MEANINGS[column]}" if column in MEANINGS else ""
    told = "; ".join(
        f"{label}: {min(values):.3g} to {max(values):.3g}, mean {float(np.mean(values)):.3g}"
        for label, own in labels.items()
        if (values := [row[column] for row in own])
    )
    chart = stacked(panels, heading(f"{title} by layer and KV head", *_notes(table), about), "fill")
    return chart.properties(description=f"{title} by layer and KV head. {told}")


def _panels_of(table: list[Row]) -> dict[str, list[Row]]:
    """Give the rows of each policy and recording, by what they are called together."""
    policies = policy_labels(row["policy"] for row in table)
    traces = {row.get("trace_hash") or row.get("trace") for row in table}
    panels: dict[str, list[Row]] = {}
    for row in table:
        where = f", {row.get('trace')}" if len(traces) > 1 else ""
        panels.setdefault(policies[row["policy"]] + where, []).append(row)
    return panels


def mass_by_layer(rows: Rows, parts: Rows) -> alt.VConcatChart:
    """Draw kept mass by layer, one line a policy, above what parts of the context the layers attend to.

    Parameters
    ----------
    rows : rows
        ``policy``, ``layer``, ``head``, ``kept_mass``, as `kvsim.heads.ByHead.rows` gives; heads are averaged.
    parts : rows
        ``layer``, ``part``, ``attention``, ``n_sink``, ``n_recent``, as `kvsim.heads.ByHead.part_rows` gives.

    Raises
    ------
    KvsimError
        If a column is missing, or there are several recordings.
    """
    kept = with_values(rows_of(rows, "policy", "layer", "head", "kept_mass"), "kept_mass")
    split = with_values(rows_of(parts, "layer", "part", "attention", "n_sink", "n_recent"), "attention")
    _one_recording([*kept, *split])
    layers = sorted({row["layer"] for row in split})
    scale = alt.Scale(domain=[layers[0] - 0.5, layers[-1] + 0.5], nice=False)
    lines = _lines(kept, scale)
    bars = _bars(split, scale)
    title = heading("Attention by layer, mean over heads", *_notes(kept))
    return stacked([lines, bars], title)


def _map(
    rows: list[Row], column: str, layers: Sequence[int], size: int, fill: dict[str, Any], named: bool
) -> alt.LayerChart:
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        cells.setdefault((row["layer"], (row["head"] or 0) // size), []).append(row[column])
    alone = all(row["head"] is None for row in rows)
    names = {place: _head_name(place, size, max(row["head"] or 0 for row in rows), alone) for _, place in cells}
    points = [
        {"layer": str(layer), "head": names[place], "value": float(np.mean(own))}
        for (layer, place), own in cells.items()
    ]
    order = [names[place] for place in sorted(names)]
    wide = min(26, max(4, WIDTH // len(layers)))
    shown = layers[:: -(-len(layers) // (wide * len(layers) // 18))]
    y_name = "KV head" + (f" (means of {size})" if size > 1 else "")
    x = alt.X(
        "layer:N",
        sort=[str(layer) for layer in layers],
        title="layer" if named else None,
        axis=alt.Axis(labelAngle=0, values=[str(layer) for layer in shown]),
    )
    y = alt.Y("head:N", sort=order, title=None if alone else y_name)
    tips = [
        "layer:N",
        alt.Tooltip("head:N", title=y_name),
        alt.Tooltip("value:Q", title=name_of(column)[0], format=".4f"),
    ]
    chart = alt.Chart(embed(points)).mark_rect(stroke="white", strokeWidth=0.5)
    chart = chart.encode(x=x, y=y, fill=alt.Fill("value:Q", **fill), tooltip=tips)
    return layered(chart, width=wide * len(layers), height=max(4, min(18, 320 // len(order))) * len(order))


def _head_name(place: int, size: int, last: int, alone: bool) -> str:
    if alone:
        return "all"
    end = min((place + 1) * size - 1, last)
    return str(place) if size == 1 else f"{place * size}-{end}"


def _lines(table: list[Row], scale: alt.Scale) -> alt.LayerChart:
    labels = policy_labels(row["policy"] for row in table)
    points: list[Row] = []
    for index, (policy, label) in enumerate(labels.items()):
        by_layer: dict[int, list[float]] = {}
        for row in table:
            if row["policy"] == policy:
                by_layer.setdefault(row["layer"], []).append(row["kept_mass"])
        own = sorted(by_layer.items())
        for (layer, masses), mark in zip(own, marked(len(own), index), strict=True):
            mean, low, high = float(np.mean(masses)), min(masses), max(masses)
            points.append({"series": label, "layer": layer, "value": mean, "low": low, "high": high, "mark": mark})
    encodings = distinct(list(labels.values()), "policy")
    tips = [alt.Tooltip("series:N", title="policy"), alt.Tooltip("layer:Q")]
    tips.append(alt.Tooltip("value:Q", title="kept mass, mean over heads", format=".4f"))
    tips += [alt.Tooltip(f"{end}:Q", title=f"{end}est head", format=".4f") for end in ("low", "high")]
    base = alt.Chart(embed(points)).encode(
        x=alt.X(**number("layer", None, scale=scale, format="d", tickMinStep=1)),
        y=alt.Y(**number("value", "kept mass")),
        tooltip=tips,
    )
    line = base.mark_line().encode(color=encodings["color"], strokeDash=encodings["strokeDash"])
    marks = base.mark_point(filled=True, size=45, opacity=1).transform_filter("datum.mark")
    marks = marks.encode(color=encodings["color"], shape=encodings["shape"])
    return layered(line, marks, width=WIDTH, height=190, title=panel_title("What a policy leaves to see"))


def _bars(table: list[Row], scale: alt.Scale) -> alt.LayerChart:
    sizes = {name: table[0][name] for name in ("n_sink", "n_recent")}
    names = {part: name.format(**sizes) for part, name in NAMES.items()}
    levels: dict[int, float] = {}
    points: list[Row] = []
    for part, name in names.items():
        for row in sorted((row for row in table if row["part"] == part), key=lambda row: row["layer"]):
            start = levels.get(row["layer"], 0.0)
            levels[row["layer"]] = start + row["attention"]
            ends = {"start": start, "end": levels[row["layer"]]}
            spans = {"left": row["layer"] - 0.42, "right": row["layer"] + 0.42}
            points.append({"layer": row["layer"], "part": name, "attention": row["attention"], **ends, **spans})
    order = list(names.values())
    fill = alt.Fill(
        "part:N",
        sort=order,
        scale=alt.Scale(domain=order, range=list(FILLS[: len(order)])),
        legend=alt.Legend(
            title="part of the context", labelLimit=0, symbolStrokeWidth=0.6, symbolStrokeColor="#333333"
        ),
    )
    tips = ["layer:Q", alt.Tooltip("part:N", title="part"), alt.Tooltip("attention:Q", format=".4f")]
    x = number("left", "layer", scale=scale, format="d", tickMinStep=1)
    x["axis"]["grid"] = False
    y = number("start", "attention (share of a query's)", scale=alt.Scale(domain=[0, 1], nice=False), format="~r")
    chart = alt.Chart(embed(points)).mark_bar(stroke="#333333", strokeWidth=0.4)
    chart = chart.encode(x=alt.X(**x), x2="right:Q", y=alt.Y(**y), y2="end:Q", fill=fill, tooltip=tips)
    return layered(chart, width=WIDTH, height=190, title=panel_title("Where the full cache's attention goes"))


def _one_recording(table: list[Row]) -> None:
    traces = {row.get("trace_hash") or row.get("trace") for row in table}
    if len(traces) > 1:
        raise KvsimError(f"a chart by head or layer shows one recording, got {len(traces)}")


def _notes(table: list[Row]) -> list[str]:
    first = table[0]
    how = {"irreversible": "irreversible; open loop", "shadow": "shadow mode: nothing is evicted"}
    told = [how[first["mode"]]] if first.get("mode") in how else []
    if "step" in first:
        told.append("mean over steps" if first["step"] is None else f"step {first['step']}")
    traces = list(dict.fromkeys(str(row.get("trace") or "") for row in table))
    return [", ".join(traces) if len(traces) < 4 else f"{len(traces)} recordings", "; ".join(told)]
