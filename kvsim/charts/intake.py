"""What charts take: results, rows of numbers, frames; and what they call the series."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvsim.charts.style import MAX_ROWS, Row
from kvsim.errors import KvsimError, unknown_name
from kvsim.result import Result

__all__ = ["Results", "Rows"]

Results = Result | Sequence[Result]
Rows: TypeAlias = Any
"""Rows: a polars frame; or one or several dicts, objects with a ``summary()`` (`Result`, `kvsim.tradeoff.TradeOff`, …)
or tables of their own (`TABLES`)."""

TABLES = ("pairs", "rows")
"""Where results that are tables of their own keep their rows: `Stability`, `Spectrum`, `TwoTokens`, `Sweep`."""

MOST_POINTS = 200
"""Points of one line; longer ones are drawn as means of bins, with their range."""

_BUDGET = re.compile(r"/budget=[^/]*")


def results_of(given: Results) -> list[Result]:
    """List results, each once.

    Raises
    ------
    KvsimError
        If there is none.
    """
    results = [given] if isinstance(given, Result) else list(given)
    if not results:
        raise KvsimError("nothing to draw: no results")
    return list({tuple(result.key.values()): result for result in results}.values())


def rows_of(given: Rows, *needed: str) -> list[Row]:
    """List rows as dicts, recordings of the same name told apart by the start of their hashes.

    Raises
    ------
    KvsimError
        If there are none, one has no names, or no row has a needed column.
    """
    if hasattr(given, "to_dicts"):
        rows: list[Row] = given.to_dicts()
    else:
        single = isinstance(given, Mapping) or any(hasattr(given, name) for name in ("summary", *TABLES))
        many: Any = [given] if single else given
        rows = [row for one in many for row in _rows(one)]
    if not rows:
        raise KvsimError("nothing to draw: no rows")
    names = dict.fromkeys(name for row in rows for name in row)
    for name in needed:
        if name not in names:
            raise unknown_name("column", name, names)
    if not {"trace", "trace_hash"} <= names.keys():
        return rows
    known = {row["trace_hash"]: row["trace"] for row in rows if row.get("trace_hash") and row.get("trace")}
    traces = told_apart(known)
    return [row | {"trace": traces[row["trace_hash"]]} if row.get("trace_hash") in traces else row for row in rows]


def _rows(one: Any) -> list[Row]:
    if isinstance(one, Mapping):
        return [dict(one)]
    for name in TABLES:
        if hasattr(one, name):
            table = getattr(one, name)
            labels = {"policy": "policy", "trace": "trace_name", "trace_hash": "trace_hash"}
            known = {label: value for label, name in labels.items() if (value := getattr(one, name, None)) is not None}
            return [known | row for part in (table() if callable(table) else table) for row in _rows(part)]
    if hasattr(one, "summary"):
        return [dict(one.summary())]
    raise KvsimError(f"a row is a dict or has a summary(), got {type(one).__name__}")


def with_values(rows: Sequence[Row], *columns: str) -> list[Row]:
    """Leave out rows in which one of the columns is undefined.

    Raises
    ------
    KvsimError
        If none is left.
    """
    found = [row for row in rows if all(_is_defined(row.get(column)) for column in columns)]
    if not found:
        raise KvsimError(f"nothing to draw: no row has a value of {' and '.join(map(repr, columns))}")
    return found


def _is_defined(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not np.isfinite(value))


def policy_labels(policies: Iterable[str]) -> dict[str, str]:
    """Shorten policy strings for legends: a budget that all have in common is left out."""
    wanted = list(dict.fromkeys(policies))
    budgets = {match[0] for policy in wanted if (match := _BUDGET.search(policy))}
    if len(budgets) > 1:
        return {policy: policy for policy in wanted}
    short = {policy: _BUDGET.sub("", policy) for policy in wanted}
    return short if len(set(short.values())) == len(wanted) else {policy: policy for policy in wanted}


def series_of(results: Sequence[Result]) -> list[str]:
    """Name results for a legend: the policy, and the recording and the mode where those differ."""
    labels = policy_labels(result.policy for result in results)
    traces = trace_labels(results)
    several_modes = len({result.mode for result in results}) > 1
    several_loops = len({result.loop for result in results}) > 1
    names = []
    for result in results:
        name = labels[result.policy]
        if several_modes and result.mode == "shadow":
            name += " (shadow)"
        if several_loops and result.loop != "open":
            name += " (live)" if result.loop == "live" else f" ({result.loop} loop)"
        if len(traces) > 1:
            name += f", {traces[result.trace_hash]}"
        names.append(name)
    return names


def trace_labels(results: Sequence[Result]) -> dict[str, str]:
    """Name recordings by hash; names that occur twice get the start of the hash."""
    return told_apart({result.trace_hash: result.trace_name for result in results})


def told_apart(names: Mapping[str, str]) -> dict[str, str]:
    """Give the names of recordings by hash, followed by the start of the hash where two have the same."""
    twice = {name for name in names.values() if list(names.values()).count(name) > 1}
    return {key: f"{name} {key[:6]}" if name in twice else name for key, name in names.items()}


def notes_of(results: Sequence[Result], *, modes: bool = True) -> list[str]:
    """Say below a title what its numbers are: which recording, which mode (unless panels do), which budget."""
    traces = list(dict.fromkeys(result.trace_name for result in results))
    ways = [
        {"irreversible": "irreversible", "shadow": "shadow mode: nothing is evicted"}[mode]
        for mode in dict.fromkeys(result.mode for result in results)
    ]
    budgets = list(dict.fromkeys(f"{result.budget:.10g}" for result in results if "budget=" in result.policy))
    notes = [", ".join(traces) if len(traces) < 4 else f"{len(traces)} recordings"]
    loops = ["live" if loop == "live" else f"{loop} loop" for loop in dict.fromkeys(result.loop for result in results)]
    how = ["; ".join(ways)] * modes + [" and ".join(loops)]
    if budgets:
        how.append(f"B = {', '.join(budgets)} tokens" if len(budgets) < 4 else "several budgets")
    if any(result.approximate for result in results):
        how.append("approximate: head means, not renormalised")
    return [*notes, "; ".join(how)]


def points_each(series: int) -> int:
    """Say how many points a line may have when a chart has so many.

    Raises
    ------
    KvsimError
        If there are too many lines.
    """
    points = min(MOST_POINTS, MAX_ROWS // max(1, series))
    if points < 10:
        raise KvsimError(f"a chart holds {MAX_ROWS // 10} lines, got {series}")
    return points


def thinned(steps: npt.NDArray[Any], values: npt.NDArray[np.float64], most: int) -> tuple[list[Row], int]:
    """Thin a line to at most so many points: means of equal bins of steps, with the lowest and the highest of each.

    Parameters
    ----------
    steps, values : array
        [n]; undefined values are NaN and left out.
    most : int
        Points.

    Returns
    -------
    rows : list of dict
        ``step`` (a bin's middle), ``value``, and where bins are longer than 1, ``low`` and ``high``.
    size : int
        Steps in a bin.
    """
    size = -(-len(steps) // most)
    rows: list[Row] = []
    for start in range(0, len(steps), size):
        own = values[start : start + size]
        own = own[~np.isnan(own)]
        if own.size:
            row = {"step": float(steps[start : start + size].mean()), "value": float(own.mean())}
            rows.append(row if size == 1 else row | {"low": float(own.min()), "high": float(own.max())})
    return rows, size
