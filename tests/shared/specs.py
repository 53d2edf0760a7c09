"""What a chart holds: its rows, and whether its specification is sound."""

import math
from collections.abc import Iterator
from typing import Any

MAX_ROWS = 5000


def rows_of_chart(chart: Any) -> list[list[dict[str, Any]]]:
    """The tables of a chart, in the order they are drawn; the specification has been validated by then."""
    spec = chart.to_dict()
    return [table for view in views(spec) if (table := _table(spec, view)) is not None]


def checked(chart: Any) -> list[dict[str, Any]]:
    """All rows of a chart, once it is known that they are few enough and finite, and that it draws the same again."""
    spec = chart.to_dict()
    assert chart.to_dict() == spec
    tables = list(spec.get("datasets", {}).values()) + list(_inline(spec))
    rows = [row for table in tables for row in table]
    assert 0 < len(rows) <= MAX_ROWS
    for row in rows:
        for name, value in row.items():
            assert value is not None, (name, row)
            assert isinstance(value, str | bool) or math.isfinite(value), (name, row)
    for panel in spec.get("vconcat", [spec]):
        for channel in ("x", "y"):
            # A panel above others leaves the title of their common axis to the lowest, and says so with a null.
            assert any("title" in view["encoding"].get(channel, {}) for view in views(panel)), channel
    return rows


def views(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every single view, with the data of what encloses it."""
    for name in ("layer", "vconcat", "hconcat"):
        for child in spec.get(name, []):
            yield from views({"data": spec.get("data"), **child} if "data" in spec else child)
    if "mark" in spec:
        yield spec


def series(chart: Any, value: str, key: str = "series") -> dict[str, list[float]]:
    """The numbers of a chart's lines by name, of every table that has such a column."""
    found: dict[str, list[float]] = {}
    seen = []
    for table in rows_of_chart(chart):
        if table in seen or value not in table[0] or key not in table[0]:
            continue
        seen.append(table)
        for row in table:
            found.setdefault(row[key], []).append(row[value])
    return found


def _table(spec: dict[str, Any], view: dict[str, Any]) -> list[dict[str, Any]] | None:
    data = view.get("data") or {}
    return spec["datasets"][data["name"]] if "name" in data else data.get("values")


def _inline(spec: Any) -> Iterator[list[dict[str, Any]]]:
    if isinstance(spec, dict):
        for name, value in spec.items():
            if name == "data" and isinstance(value, dict) and "values" in value:
                yield value["values"]
            elif name != "datasets":
                yield from _inline(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from _inline(value)
