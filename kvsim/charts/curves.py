"""Charts of one number a result against a setting or a cost: alpha, budget, memory, cache size."""

from collections.abc import Sequence
from typing import Any

import altair as alt

from kvsim.budget import Budget
from kvsim.charts.families import families_of
from kvsim.charts.intake import Rows, policy_labels, rows_of, with_values
from kvsim.charts.naming import family_of, name_of, without_budget
from kvsim.charts.style import HEIGHT, WIDTH, Row, distinct, embed, heading, layered, number, panel_title, stacked
from kvsim.errors import KvsimError
from kvsim.policy import parse

__all__ = ["alpha_sensitivity", "budget_curves", "quality_by_size", "quality_cost"]

Panels = alt.VConcatChart


def alpha_sensitivity(rows: Rows, metric: str = "kept_mass", *, normalise: bool = False) -> Panels:
    """Draw a metric against alpha, one line a rule, one panel a recording (Fig. 9, Table 5).

    Rules without an alpha, such as `cumulative`, are drawn as level lines.

    Parameters
    ----------
    rows : rows
        One a result: ``policy``, `metric`, and ``trace`` if there are several recordings; as `kvsim.sweep` and
        ``Result.summary()`` give, or `kvsim.tradeoff` for its parts.
    metric : str
        The column to draw.
    normalise : bool
        Divide by a rule's best, that is largest, value, as Fig. 9 does.

    Raises
    ------
    KvsimError
        If there is no such column, or no rule has an alpha.
    """
    table = with_values(rows_of(rows, "policy", metric), metric)
    points: list[Row] = []
    level: list[Row] = []
    labels = policy_labels(family_of(row["policy"])[0] for row in table)
    for row in table:
        family, alpha = family_of(row["policy"])
        point = {"trace": str(row.get("trace", "")), "series": labels[family], "y": float(row[metric])}
        if alpha is None:
            level.append(point)
        else:
            points.append(point | {"x": alpha})
    if not points:
        raise KvsimError("no policy has an alpha; give ema policies")
    ends = min(point["x"] for point in points), max(point["x"] for point in points)
    points += [point | {"x": end} for point in level for end in dict.fromkeys(ends)]
    if normalise:
        points = _normalised(points)
    title, y = name_of(metric)
    y = f"{y}; over its best" if normalise else y
    x = number("x", "alpha (weight of the old state in one update)")
    return _panels(
        points,
        x,
        number("y", y),
        heading(f"{title} against alpha", *_notes(table, _common_budget(table))),
        "rule",
        "alpha",
    )


def budget_curves(rows: Rows, metric: str = "kept_mass") -> Panels:
    """Draw a metric against the budget as a share of the prompt, one line a policy, one panel a recording (Fig. 5).

    Parameters
    ----------
    rows : rows
        One a result: ``policy``, `metric`, ``trace``, and where the policy's budget is not a share of the prompt also
        ``budget`` and ``prompt_length``, or ``keep_ratio``.
    metric : str
        The column to draw.

    Raises
    ------
    KvsimError
        If a column is missing.
    """
    table = with_values(rows_of(rows, "policy", metric), metric)
    table = [row | {"keep_ratio": _keep_ratio(row)} for row in table]
    points = _points(table, "keep_ratio", metric)
    title, y = name_of(metric)
    x = number("x", "budget B, share of the prompt kept", scale=alt.Scale(type="log", nice=False), format=".3~p")
    x["axis"]["values"] = sorted({point["x"] for point in points})
    notes = (*_notes(table), "compression ratio: 1 minus the share kept")
    return _panels(points, x, number("y", y), heading(f"{title} against budget", *notes), "policy", "share kept")


def quality_cost(rows: Rows, quality: str = "kept_mass", cost: str = "kv_bytes") -> Panels:
    """Draw quality against cost, the budgets of a policy joined by a line, one panel a recording (Fig. 6).

    Parameters
    ----------
    rows : rows
        One a result: ``policy``, `quality`, `cost`, ``trace``.
    quality, cost : str
        Columns, such as ``kept_mass`` or a task's ``score`` against ``kv_bytes`` or ``tokens_per_second``.

    Raises
    ------
    KvsimError
        If a column is missing.
    """
    table = with_values(rows_of(rows, "policy", quality, cost), quality, cost)
    points = _points(table, cost, quality)
    values = sorted(point["x"] for point in points)
    kind: Any = "log" if values[0] > 0 and values[-1] > 20 * values[0] else "linear"
    x = number("x", name_of(cost)[1], scale=alt.Scale(type=kind, zero=False, nice=True), format="~s", tickCount=6)
    title = heading(f"{name_of(quality)[0]} against {name_of(cost)[0].lower()}", *_notes(table))
    return _panels(points, x, number("y", name_of(quality)[1]), title, "policy", name_of(cost)[1])


def quality_by_size(rows: Rows, quality: str = "kept_mass", size: str = "cache_size") -> Panels:
    """Draw quality against the normalised size of the cache, one line a family of policies (WG-KV Fig. 7).

    Policies that differ only in numbers of what sets the size (budget, protection, overflow, admission, selection) are
    one family, in the order of their sizes: the axis on which admission, eviction and both together compare.

    Parameters
    ----------
    rows : rows
        One a result: ``policy``, `quality`, `size`, ``trace``.
    quality, size : str
        Columns.

    Raises
    ------
    KvsimError
        If a column is missing.
    """
    table = with_values(rows_of(rows, "policy", quality, size), quality, size)
    families = families_of(row["policy"] for row in table)
    points = [
        {
            "trace": str(row.get("trace", "")),
            "series": families[row["policy"]][0],
            "x": float(row[size]),
            "y": float(row[quality]),
        }
        for row in table
    ]
    x = number("x", name_of(size)[1], scale=alt.Scale(zero=False, nice=True), format=".3~p")
    title = heading(f"{name_of(quality)[0]} against {name_of(size)[0].lower()}", *_notes(table))
    told = "; ".join(f"{point['series']}: {point['y']:.3g} at {point['x']:.3g}" for point in points)
    chart = _panels(points, x, number("y", name_of(quality)[1]), title, "policy", "cache size")
    return chart.properties(description=f"{name_of(quality)[0]} against {name_of(size)[0].lower()}. {told}")


def _keep_ratio(row: Row) -> float:
    """Give the share of the prompt that a result's policy keeps: what was asked for, before it was floored."""
    if row.get("keep_ratio") is not None:
        return float(row["keep_ratio"])
    budget = _budget_of(row["policy"])
    if budget is not None and budget.keep_ratio is not None:
        return float(budget.keep_ratio)
    rows_of([row], "budget", "prompt_length")
    return float(row["budget"] / row["prompt_length"])


def _points(table: Sequence[Row], x: str, y: str) -> list[Row]:
    policies = {row["policy"]: without_budget(row["policy"]) for row in table}
    return [
        {
            "trace": str(row.get("trace", "")),
            "series": policies[row["policy"]],
            "x": float(row[x]),
            "y": float(row[y]),
        }
        for row in table
    ]


def _normalised(points: list[Row]) -> list[Row]:
    best: dict[tuple[str, str], float] = {}
    for point in points:
        key = point["trace"], point["series"]
        best[key] = max(best.get(key, point["y"]), point["y"])
    if any(value <= 0 for value in best.values()):
        raise KvsimError("normalise=True divides by the best value, which is not above 0 for some rule")
    return [point | {"y": point["y"] / best[point["trace"], point["series"]]} for point in points]


def _common_budget(table: Sequence[Row]) -> str:
    """Say which budget all policies have; nothing where they differ or rows do not say."""
    found = {_budget_of(row["policy"]) for row in table}
    tokens = {row.get("budget") for row in table}
    budget = found.pop()
    if found or budget is None:
        return ""
    share = "" if budget.keep_ratio is None else f"{budget} of the prompt"
    size = tokens.pop()
    known = "" if tokens or size is None else f" = {size:.10g} tokens"
    return f"B = {share}{known}" if share else f"B{known or f' = {budget} tokens'}"


def _budget_of(policy: str) -> Budget | None:
    try:
        return parse(policy).budget
    except KvsimError:
        return None


def _notes(table: Sequence[Row], budget: str = "") -> list[str]:
    traces = list(dict.fromkeys(str(row.get("trace", "")) for row in table))
    modes = list(dict.fromkeys(str(row["mode"]) for row in table if row.get("mode")))
    how = {"irreversible": "irreversible; open loop", "shadow": "shadow mode: nothing is evicted"}
    told = " and ".join(how.get(mode, mode) for mode in modes)
    return [traces[0] if len(traces) == 1 else "", "; ".join(filter(None, [told, budget]))]


def _panels(points: list[Row], x: Row, y: Row, title: alt.TitleParams, legend: str, x_tip: str) -> Panels:
    series = list(dict.fromkeys(point["series"] for point in points))
    traces = list(dict.fromkeys(point["trace"] for point in points))
    encodings = distinct(series, legend)
    panels = []
    if len(traces) > 1:
        y["axis"]["titleFontSize"] = 10
    for trace in traces:
        own = sorted((p for p in points if p["trace"] == trace), key=lambda p: (series.index(p["series"]), p["x"]))
        named = {"title": None} if trace != traces[-1] else {}
        base = alt.Chart(embed({k: v for k, v in p.items() if k != "trace"} for p in own)).encode(
            x=alt.X(**(x | named)),
            y=alt.Y(**y),
            tooltip=[
                alt.Tooltip("series:N", title=legend),
                alt.Tooltip("x:Q", title=x_tip, format=".4~g"),
                alt.Tooltip("y:Q", title=y["title"], format=".4g"),
            ],
        )
        line = base.mark_line().encode(color=encodings["color"], strokeDash=encodings["strokeDash"])
        marks = base.mark_point(filled=True, size=55, opacity=1)
        marks = marks.encode(color=encodings["color"], shape=encodings["shape"])
        size = {"width": WIDTH, "height": HEIGHT if len(traces) == 1 else 190}
        own_title = {"title": panel_title(trace)} if len(traces) > 1 else {}
        panels.append(layered(line, marks, **size, **own_title))
    return stacked(panels, title, "color", "shape", "strokeDash")
