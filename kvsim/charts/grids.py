"""Grids of scores: needles by length and depth."""

from collections import defaultdict

import altair as alt

from kvsim.charts.intake import Rows, policy_labels, rows_of, with_values
from kvsim.charts.naming import name_of
from kvsim.charts.style import MAX_ROWS, Row, embed, heading, layered, panel_title, shades, stacked
from kvsim.errors import KvsimError

__all__ = ["needle_grid"]

CELL, WRITTEN = 34, 300
"""Pixels across one cell, and up to how many cells a panel has numbers in them."""


def needle_grid(rows: Rows, score: str = "score", *, length: str = "length", depth: str = "depth") -> alt.VConcatChart:
    """Draw a task's score by context length and needle depth, one panel a policy (Fig. 8); samples are averaged.

    Parameters
    ----------
    rows : rows
        One a sample or a cell: `length` (tokens), `depth` (where the needle is, 0 to 1 or in percent), `score`, and
        optional ``policy`` and ``samples`` (how many a row stands for).
    score, length, depth : str
        The columns.

    Raises
    ------
    KvsimError
        If a column is missing, or there are too many cells.
    """
    table = with_values(rows_of(rows, length, depth, score), length, depth, score)
    labels = policy_labels(str(row.get("policy", "")) for row in table)
    cells: dict[str, dict[tuple[float, float], list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for row in table:
        cells[labels[str(row.get("policy", ""))]][row[length], row[depth]].append(
            (float(row[score]), int(row.get("samples") or 1))
        )
    if sum(map(len, cells.values())) > MAX_ROWS:
        raise KvsimError(f"a chart holds {MAX_ROWS} cells, got {sum(map(len, cells.values()))}")
    values = [value for own in cells.values() for one in own.values() for value, _ in one]
    low, high = min(0.0, *values), max(1.0, *values)
    percent = any(row[depth] > 1 for row in table)
    lengths = sorted({row[length] for row in table})
    depths = sorted({row[depth] for row in table})
    panels = []
    for index, (policy, own) in enumerate(cells.items()):
        points: list[Row] = []
        for (at_length, at_depth), scores in sorted(own.items()):
            count = sum(samples for _, samples in scores)
            mean = sum(value * samples for value, samples in scores) / count
            where = {"length": f"{at_length:g}", "depth": _depth(at_depth, percent)}
            dark = (mean - low) / (high - low) > 0.55
            points.append({**where, "score": mean, "samples": count, "dark": dark})
        axes = [f"{one:g}" for one in lengths], [_depth(one, percent) for one in depths]
        panel = _panel(points, axes, (low, high), name_of(score)[1], index == len(cells) - 1)
        panels.append(panel.properties(title=panel_title(policy)) if policy else panel)
    counts = {sum(samples for _, samples in one) for own in cells.values() for one in own.values()}
    each = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    note = f"mean of {each} samples a cell" if max(counts) > 1 else ""
    return stacked(panels, heading(f"{name_of(score)[0]} by length and depth", note), "fill")


def _depth(value: float, percent: bool) -> str:
    return f"{value if percent else 100 * value:.3g}%"


def _panel(
    points: list[Row], axes: tuple[list[str], list[str]], limits: tuple[float, float], name: str, last: bool
) -> alt.LayerChart:
    lengths, depths = axes
    x = alt.X(
        "length:N",
        sort=lengths,
        scale=alt.Scale(domain=lengths),
        title="context length (tokens)" if last else None,
        axis=alt.Axis(labelAngle=0),
    )
    y = alt.Y("depth:N", sort=depths, scale=alt.Scale(domain=depths), title="depth of the needle")
    base = alt.Chart(embed(points)).encode(x=x, y=y)
    tips = ["length:N", "depth:N", alt.Tooltip("score:Q", format=".3f"), "samples:Q"]
    fill = alt.Fill("score:Q", **shades(name, limits, format=".2~f"))
    layers = [base.mark_rect(stroke="white").encode(fill=fill, tooltip=tips)]
    if len(points) <= WRITTEN:
        ink = alt.condition(alt.datum.dark, alt.value("white"), alt.value("black"))
        layers.append(base.mark_text(fontSize=9).encode(text=alt.Text("score:Q", format=".2~f"), color=ink))
    return layered(*layers, width=CELL * len(lengths), height=20 * len(depths))
