"""Proposition 1 beside what was measured, pair by pair."""

import math
from collections.abc import Sequence

import altair as alt

from kvsim.charts.intake import Rows, policy_labels, rows_of, with_values
from kvsim.charts.style import MAX_ROWS, WIDTH, Row, embed, heading, layered, number, panel_title, stacked
from kvsim.errors import KvsimError

__all__ = ["rank_stability"]

BOUNDS = {
    "finite": "finite-t bound",
    "asymptotic": "asymptotic bound",
    "bound_finite": "finite-t bound",
    "bound": "bound",
}
HELD, BROKEN = "holds", "violated"


def rank_stability(rows: Rows, bound: str | None = None) -> alt.VConcatChart:
    """Draw how often pairs near the boundary are misranked against what Proposition 1 allows; one panel a policy.

    Both axes are logarithmic. Above the diagonal the bound is violated; those pairs are crosses. Pairs that are never
    misranked lie on a line of their own at the bottom. Right of 1 a bound says nothing.

    Parameters
    ----------
    rows : rows
        Pairs: ``misranked``, a bound's column, and optional ``policy`` and ``trace``; or results that have ``pairs``,
        as `kvsim.stability` gives. Too many pairs are thinned evenly by bound, those that violate it apart.
    bound : str, optional
        The bound's column; ``finite`` where there is one, or else ``asymptotic``.

    Raises
    ------
    KvsimError
        If a column is missing or no pair has a value.
    """
    table = rows_of(rows, "misranked")
    if bound is None:
        bound = next((name for name in BOUNDS if any(name in row for row in table)), "finite")
    table = with_values(rows_of(table, bound), "misranked", bound)
    traces = list(dict.fromkeys(str(row["trace"]) for row in table if row.get("trace")))
    labels = policy_labels(str(row.get("policy", "all pairs")) for row in table)
    panels: dict[str, list[Row]] = {}
    for row in table:
        name = labels[str(row.get("policy", "all pairs"))]
        name += f", {row['trace']}" if len(traces) > 1 else ""
        panels.setdefault(name, []).append({"bound": float(row[bound]), "misranked": float(row["misranked"])})
    floor = _below([point["misranked"] for points in panels.values() for point in points])
    least = _below([point["bound"] for points in panels.values() for point in points])
    most = max(1.0, *(point["bound"] for points in panels.values() for point in points))
    room = MAX_ROWS // len(panels) - 4
    if room < 10:
        raise KvsimError(f"a chart holds {MAX_ROWS // 14} panels of pairs, got {len(panels)}")
    drawn = []
    for index, (name, points) in enumerate(panels.items()):
        broken = sum(point["misranked"] > point["bound"] for point in points)
        telling = sum(point["bound"] < 1 for point in points)
        chosen = _thinned(points, room)
        text = f"{name}: violated by {broken} of {len(points)} pairs; the bound is below 1 for {telling}"
        text += f"; {len(chosen)} drawn" if len(chosen) < len(points) else ""
        last = index == len(panels) - 1
        drawn.append(_panel(chosen, (least, most), floor, BOUNDS.get(bound, bound), text, last))
    notes = (
        traces[0] if len(traces) == 1 else "",
        "above the line: violated; lowest row: never misranked; right of 1 the bound says nothing",
    )
    return stacked(drawn, heading(f"Misranking against the {BOUNDS.get(bound, bound)}", *notes), "fill", "shape")


def _below(values: Sequence[float]) -> float:
    """Give a place for zeros on a logarithmic scale: half the least positive value."""
    return min((value for value in values if value > 0), default=1.0) / 2


def _decades(least: float, most: float) -> list[float]:
    return [10.0**power for power in range(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1)]


def _thinned(points: list[Row], room: int) -> list[Row]:
    """Take an even sample by bound, of the violated pairs and of the others in proportion."""
    if len(points) <= room:
        return points
    kept: list[Row] = []
    for broken in (False, True):
        own = sorted((p for p in points if (p["misranked"] > p["bound"]) == broken), key=lambda p: p["bound"])
        if own:
            stride = math.ceil(len(own) / max(1, room * len(own) // len(points)))
            kept += own[::stride]
    return kept[:room]


def _panel(
    points: list[Row], reach: tuple[float, float], floor: float, bound: str, text: str, last: bool
) -> alt.LayerChart:
    least, most = reach
    rows = [
        {
            **point,
            "x": point["bound"] or least,
            "y": point["misranked"] or floor,
            "state": BROKEN if point["misranked"] > point["bound"] else HELD,
        }
        for point in points
    ]
    across = alt.Scale(type="log", domain=[least / 1.2, most * 1.2], nice=False)
    up = alt.Scale(type="log", domain=[floor / 1.4, 1.3], nice=False)
    x = number(
        "x",
        f"{bound} on the share misranked" if last else None,
        scale=across,
        format="~g",
        values=_decades(least, most),
    )
    ticks = [floor, *(tick for tick in (0.001, 0.01, 0.03, 0.1, 0.3, 1) if tick > 1.5 * floor)]
    y = number("y", "share misranked", scale=up, values=ticks)
    y["axis"]["labelExpr"] = f"datum.value < {1.2 * floor:.6g} ? 'none' : format(datum.value, '.2~g')"
    states = [HELD, BROKEN]
    legend = alt.Legend(title="the bound", symbolStrokeWidth=1.2)
    pairs = alt.Chart(embed(rows)).mark_point(size=26, strokeWidth=1, opacity=0.8)
    pairs = pairs.encode(
        x=alt.X(**x),
        y=alt.Y(**y),
        shape=alt.Shape("state:N", scale=alt.Scale(domain=states, range=["circle", "cross"]), legend=legend),
        stroke=alt.Stroke("state:N", scale=alt.Scale(domain=states, range=["#5c8abb", "#000000"]), legend=legend),
        tooltip=[alt.Tooltip("misranked:Q", format=".4g"), alt.Tooltip("bound:Q", format=".4g"), "state:N"],
    )
    low = max(floor, least)
    diagonal = alt.Chart(embed([{"x": low, "y": low}, {"x": 1, "y": 1}, {"x": most * 1.2, "y": 1}]))
    line = diagonal.mark_line(color="black", strokeWidth=1.2).encode(x="x:Q", y="y:Q")
    return layered(pairs, line, width=WIDTH, height=170, title=panel_title(text))
