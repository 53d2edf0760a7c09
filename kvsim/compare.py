"""Comparing two files of results: what only one of them holds, and how far the metrics of the others lie apart."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsim.errors import KvsimError
from kvsim.results_file import SETTING, read_results

if TYPE_CHECKING:
    import polars as pl

__all__ = ["DEFAULT_TOLERANCE", "Comparison", "Spread", "compare"]

DEFAULT_TOLERANCE = 1e-9

JOIN_KEY = ["trace_hash", "policy", "mode", "loop"]
MADE_BY = ("version", "engine", "engine_mode")
IN_B = " in B"
NO_METRICS = ("prompt_length", "steps")
ON_REQUEST = ("shadow_churn",)
"""Metrics that a run may have left out; every other one that only one file has a value for is a difference."""


@dataclass(frozen=True)
class Spread:
    """How far two files lie apart in one metric.

    Attributes
    ----------
    rows : int
        Common rows for which both files have a value.
    largest, mean : float
        Largest and mean absolute difference over them, 0 if there are none.
    beyond : int
        Common rows that differ by more than the tolerance, or have a value in one file only.
    """

    rows: int
    largest: float
    mean: float
    beyond: int


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    made_by : tuple of dict
        For either file, its number of ``rows`` and the sorted ``version``, ``engine`` and ``engine_mode`` in it.
    common : int
        Rows that both files hold.
    only : tuple of list of dict
        For either file, the ``policy``, ``trace``, ``mode``, ``loop`` and ``trace_hash`` of what it alone holds.
    only_metrics : tuple of list of str
        For either file, the metrics that it alone has.
    metrics : dict of str to Spread
        The metrics of both files.
    differences : list of dict
        ``policy``, ``trace``, ``mode``, ``metric``, ``a``, ``b`` and ``difference`` (None where one has no value) of
        what differs by more than the tolerance, worst first.
    """

    made_by: tuple[dict[str, Any], dict[str, Any]]
    common: int
    only: tuple[list[dict[str, str]], list[dict[str, str]]]
    only_metrics: tuple[list[str], list[str]]
    metrics: dict[str, Spread]
    differences: list[dict[str, Any]]

    @property
    def agree(self) -> bool:
        """Whether all common rows agree within the tolerance."""
        return not self.differences


def compare(a: str | Path, b: str | Path, *, tolerance: float = DEFAULT_TOLERANCE) -> Comparison:
    """Compare two files of results, row by row with equal trace (by hash), policy, mode and loop.

    Parameters
    ----------
    a, b : path
        Files of sweeps, or what `kvsim.tables.write_parquet` wrote (its directory or its ``results.parquet``).
    tolerance : float
        Largest absolute difference at which two values agree.

    Raises
    ------
    KvsimError
        If a file cannot be read or holds several rows for one key, or if they have no row in common.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise KvsimError(f"tolerance must be a number of at least 0, got {tolerance}")
    first, second = _read(a), _read(b)
    both = first.join(second, on=JOIN_KEY, how="inner", suffix=IN_B, maintain_order="left")
    only = (
        first.join(second, on=JOIN_KEY, how="anti", maintain_order="left"),
        second.join(first, on=JOIN_KEY, how="anti", maintain_order="left"),
    )
    if not both.height:
        raise KvsimError(f"{a} ({first.height} rows) and {b} ({second.height} rows) have no row in common")
    names = _metrics(first), _metrics(second)
    metrics: dict[str, Spread] = {}
    differences: list[dict[str, Any]] = []
    for name in names[0]:
        if name in names[1]:
            metrics[name], found = _spread(both, name, tolerance)
            differences += found
    differences.sort(key=lambda d: math.inf if d["difference"] is None else d["difference"], reverse=True)
    return Comparison(
        made_by=(_made_by(first), _made_by(second)),
        common=both.height,
        only=(_keys(only[0]), _keys(only[1])),
        only_metrics=(
            [name for name in names[0] if name not in names[1]],
            [name for name in names[1] if name not in names[0]],
        ),
        metrics=metrics,
        differences=differences,
    )


def _read(path: str | Path) -> "pl.DataFrame":
    frame = read_results(path)
    twice = frame.filter(frame.select(JOIN_KEY).is_duplicated())
    if twice.height:
        policy, trace = twice.row(0, named=True)["policy"], twice.row(0, named=True)["trace"]
        same = twice.filter(policy=policy, trace=trace)
        kinds = " and ".join(sorted({" ".join(_makers(row)) for row in same.to_dicts()}))
        raise KvsimError(f"{path}: holds several rows for {policy} on {trace} ({kinds}); keep one of each")
    return frame


def _makers(row: dict[str, Any]) -> list[str]:
    return [f"{name} {row[name]}" for name in MADE_BY if row.get(name) is not None]


def _metrics(frame: "pl.DataFrame") -> list[str]:
    numeric = [name for name, dtype in frame.schema.items() if dtype.is_numeric()]
    return [name for name in numeric if not name.startswith(SETTING) and name not in NO_METRICS]


def _made_by(frame: "pl.DataFrame") -> dict[str, Any]:
    facts: dict[str, Any] = {"rows": frame.height}
    for name in MADE_BY:
        facts[name] = sorted(set(frame[name].drop_nulls().to_list())) if name in frame.columns else []
    return facts


def _keys(frame: "pl.DataFrame") -> list[dict[str, str]]:
    return frame.select("policy", "trace", "mode", "loop", "trace_hash").to_dicts()


def _spread(both: "pl.DataFrame", name: str, tolerance: float) -> tuple[Spread, list[dict[str, Any]]]:
    import polars as pl

    # A result has no infinities; where a foreign file holds one, or NaN, it counts as no value.
    a, b = (pl.col(column).cast(pl.Float64) for column in (name, name + IN_B))
    a, b = (pl.when(column.is_finite()).then(column).alias(label) for column, label in ((a, "a"), (b, "b")))
    table = both.select("policy", "trace", "mode", pl.lit(name).alias("metric"), a, b)
    table = table.with_columns(difference=(pl.col("a") - pl.col("b")).abs())
    one_sided = pl.lit(name not in ON_REQUEST) & (pl.col("a").is_null() != pl.col("b").is_null())
    beyond = table.filter((pl.col("difference") > tolerance) | one_sided)
    known = table["difference"].drop_nulls()
    mean = known.mean()
    return (
        Spread(
            rows=known.len(),
            largest=float(known.max() or 0.0),  # type: ignore[arg-type]
            mean=float(mean or 0.0),  # type: ignore[arg-type]
            beyond=beyond.height,
        ),
        beyond.to_dicts(),
    )
