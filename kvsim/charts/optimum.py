"""The oracle gap over time."""

from collections.abc import Iterable
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt

from kvsim.charts.intake import Rows, notes_of, policy_labels, results_of, rows_of, with_values
from kvsim.charts.lines import step_chart
from kvsim.charts.naming import without_budget
from kvsim.charts.style import Row, heading
from kvsim.errors import KvsimError
from kvsim.policy import parse
from kvsim.result import Result

__all__ = ["oracle_gap", "oracle_gap_rows"]


def oracle_gap(given: Result | Rows) -> alt.LayerChart:
    """Draw the oracle gap up to each step: 1 - kept mass so far / the optimum's so far; the last point is the gap.

    The optimum maximises the sum over all steps, so a policy may be ahead of it early on.

    Parameters
    ----------
    given : results or rows
        Irreversible results, among them an ``oracle:exact`` or ``oracle:bound`` of the same recordings, groups and
        budgets; or rows ``step``, ``policy``, ``kept_mass``, ``optimum`` (optional ``trace``, ``reference``,
        ``budget``), as `kvsim.optima.Beside.step_rows` and `oracle_gap_rows` give.

    Raises
    ------
    KvsimError
        If a result has no oracle to compare with, or a column is missing.
    """
    many: Any = [given] if isinstance(given, Result) else given
    items = many.to_dicts() if hasattr(many, "to_dicts") else list(many)
    notes: list[str] = []
    if items and all(isinstance(item, Result) for item in items):
        results = results_of(items)
        table = rows_of(oracle_gap_rows(results))
        notes = notes_of(results)
        best = dict.fromkeys(without_budget(row["reference"]) for row in table)
        notes.append(f"thick grey: the optimum, {' and '.join(best)}")
    else:
        table = with_values(rows_of(items, "step", "policy", "kept_mass", "optimum"), "kept_mass", "optimum")
        notes = _notes(table)
    labels = policy_labels(row["policy"] for row in table)
    traces = list(dict.fromkeys(row.get("trace") for row in table))
    lines: dict[str, list[Row]] = {}
    for row in table:
        name = labels[row["policy"]] + (f", {row['trace']}" if len(traces) > 1 else "")
        lines.setdefault(name, []).append(row)
    drawn = {name: _gap(own) for name, own in lines.items()}
    title = heading("Oracle gap up to a step", *notes)
    y = "1 − kept mass so far / the optimum's so far"
    return step_chart(drawn, title, y, scale=alt.Scale(zero=True, nice=True), rule=0.0)


def oracle_gap_rows(results: Iterable[Result]) -> list[Row]:
    """Put each result's kept mass beside that of the best oracle of its recording, groups and budgets, step by step.

    Returns
    -------
    list of dict
        ``trace``, ``trace_hash``, ``policy``, ``step``, ``kept_mass``, ``optimum``, ``reference`` (the oracle's
        policy); none for that oracle itself.

    Raises
    ------
    KvsimError
        If a result is of the shadow mode, or has no oracle.
    """
    found = list(results)
    if any(result.mode == "shadow" for result in found):
        raise KvsimError("a shadow result evicts nothing; its sets can return, the optimum's cannot")
    best: dict[Any, Result] = {}
    for result in found:
        if parse(result.policy).head.name == "oracle":
            key = _kind(result)
            if key not in best or _total(result) > _total(best[key]):
                best[key] = result
    rows: list[Row] = []
    for result in found:
        reference = best.get(_kind(result))
        if reference is None:
            raise KvsimError(
                f"{result.policy}: there is no oracle with its groups and budget among the results; add oracle:exact "
                "or oracle:bound"
            )
        if result is reference:
            continue
        kept = result.outcome.metrics["kept_mass"].tolist()
        most = reference.outcome.metrics["kept_mass"].tolist()
        names = {"trace": result.trace_name, "trace_hash": result.trace_hash}
        names |= {"policy": result.policy, "reference": reference.policy}
        pairs = enumerate(zip(kept, most, strict=True), start=1)
        rows += [{**names, "step": step, "kept_mass": own, "optimum": bound} for step, (own, bound) in pairs]
    if not rows:
        raise KvsimError("nothing to draw: there is only the optimum itself")
    return rows


def _notes(table: list[Row]) -> list[str]:
    traces, references, budgets = (
        list(dict.fromkeys(row[name] for row in table if row.get(name) is not None))
        for name in ("trace", "reference", "budget")
    )
    if not references:
        return []
    how = "irreversible; open loop"
    if budgets:
        how += (
            f"; B = {', '.join(f'{one:.10g}' for one in budgets)} tokens" if len(budgets) < 4 else "; several budgets"
        )
    best = ", ".join(dict.fromkeys(map(without_budget, references)))
    return [
        ", ".join(traces) if len(traces) < 4 else f"{len(traces)} recordings",
        how,
        f"thick grey: the optimum, {best}",
    ]


def _kind(result: Result) -> Any:
    return result.trace_hash, result.plan.groups, result.plan.budgets.tobytes()


def _total(result: Result) -> float:
    return float(result.outcome.metrics["kept_mass"].sum())


def _gap(rows: list[Row]) -> tuple[npt.NDArray[Any], npt.NDArray[np.float64]]:
    own = sorted(rows, key=lambda row: row["step"])
    kept, most = (np.cumsum([row[name] for row in own]) for name in ("kept_mass", "optimum"))
    gap = 1 - np.divide(kept, most, out=np.ones_like(most, dtype=np.float64), where=most > 0)
    return np.array([row["step"] for row in own]), gap
