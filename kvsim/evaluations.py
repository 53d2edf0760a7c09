"""Files of evaluations, and the tables that compare policies on them."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError
from kvsim.paired import against_baseline
from kvsim.policy import Policy, parse

__all__ = [
    "EVAL_KEY",
    "cells",
    "comparisons",
    "engine_of",
    "full_refresh",
    "key_of",
    "read_evaluations",
    "write_evaluations",
]

EVAL_KEY = (
    "model_hash",
    "task",
    "length",
    "seed",
    "index",
    "question_hash",
    "policy",
    "depth",
    "answer_tokens",
    "version",
)
"""What a row is a function of. The question's hash holds its text, tokenizer, chat template and right answers."""

_TEXTS = ("model_hash", "task", "question_hash", "policy", "version", "answer")
_NUMBERS = ("length", "seed", "index", "answer_tokens", "prompt_length", "steps", "near_ties")
_SHARES = ("score",)
_MAYBE = ("kept_mass", "survival", "depth")

Row = Mapping[str, Any]
Table = dict[str, dict[str, list[Row]]]
"""Rows by policy and task."""


def key_of(row: Row) -> tuple[Any, ...]:
    """Give what a row is a function of."""
    return tuple(row[name] for name in EVAL_KEY)


def engine_of(row: Row) -> str:
    """Give what decoded a row; files from before there was a choice do not say."""
    return row.get("engine") or "plain"


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Read a Parquet file of evaluations; none if there is no such file.

    Raises
    ------
    KvsimError
        If it cannot be read, or holds something else.
    """
    import polars as pl

    try:
        with open(path, "rb") as source:
            frame = pl.read_parquet(source)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KvsimError(f"{path}: cannot be read ({error.strerror or error})") from error
    except pl.exceptions.PolarsError:
        raise KvsimError(f"{path}: is not a whole Parquet file") from None
    for name, kind in _schema().items():
        whole = name in _MAYBE or (name in frame.columns and not frame[name].null_count())
        if frame.schema.get(name) != kind or not whole:
            raise KvsimError(f"{path}: is not a file of kvsim evaluations: it has no column {name!r} of {kind}")
        if kind == pl.Float64 and not frame[name].drop_nulls().is_finite().all():
            raise KvsimError(f"{path}: is not a file of kvsim evaluations: column {name!r} has a number that is none")
    return frame.to_dicts()


def write_evaluations(rows: Items[Row], out: Path) -> None:
    """Write evaluations as Parquet, whole or not at all.

    Raises
    ------
    KvsimError
        If the file cannot be written; what was there before is still there then.
    """
    import polars as pl

    from kvsim.results_file import write_results

    write_results(pl.DataFrame([dict(row) for row in rows], schema_overrides=_schema(), infer_schema_length=None), out)


def _schema() -> dict[str, Any]:
    import polars as pl

    return (
        dict.fromkeys(_TEXTS, pl.String)
        | dict.fromkeys(_NUMBERS, pl.Int64)
        | dict.fromkeys((*_SHARES, *_MAYBE), pl.Float64)
        | {"chat": pl.Boolean}
    )


def full_refresh(policy: Policy) -> Policy | None:
    """Give a lazily refreshed policy with every step scored; None for one that scores every step already."""
    expanded = policy.expand()
    return None if expanded.refresh in (None, 1) else dataclasses.replace(expanded, refresh=None)


def comparisons(rows: Items[Row], *, seed: int = 0) -> list[dict[str, Any]]:
    """Compare every policy with the full cache, and lazy ones with full refresh, on the same samples (Table 3's form).

    Parameters
    ----------
    rows : sequence of mapping
        From `kvsim.evaluate.evaluate`, of one model and version.
    seed : int
        Of the bootstrap.

    Returns
    -------
    list of dict
        For each length, policy and task: ``samples``, ``score`` (mean), ``kept_mass`` and ``survival`` (means), and for
        ``full`` and ``refresh`` the paired difference: ``<name>_delta``, ``_low``, ``_high`` (95% bootstrap interval,
        None without spread), ``_p`` and ``_test``; all None where there is no such baseline. With several tasks a row
        of task ``Avg`` follows, to which each task counts once.

    Raises
    ------
    KvsimError
        If the rows are of several models, versions, engines or forms of prompt, one is there twice, or a policy lacks a
        sample.
    """
    _check_one(rows, "model_hash", "version", "chat")
    found: list[dict[str, Any]] = []
    for length in dict.fromkeys(row["length"] for row in rows):
        table = _by_policy([row for row in rows if row["length"] == length])
        for policy, tasks in table.items():
            lazy = full_refresh(parse(policy))
            against = {
                "full": _differences(table, policy, "full", seed),
                "refresh": {} if lazy is None else _differences(table, policy, str(lazy), seed),
            }
            lines = [{"task": task, "length": length, "policy": policy, **_means(own)} for task, own in tasks.items()]
            if len(lines) > 1:
                total = sum(line["samples"] for line in lines)
                lines.append(lines[0] | {"task": "Avg"} | _means(lines) | {"samples": total})
            for line in lines:
                for name, differences in against.items():
                    row = differences.get(line["task"], {})
                    line |= {f"{name}_{part}": row.get(part) for part in ("delta", "low", "high", "p", "test")}
            found += lines
    return found


def _differences(table: Table, policy: str, baseline: str, seed: int) -> dict[str, dict[str, Any]]:
    """Compare a policy with a baseline task by task; nothing where there is no such baseline."""
    if baseline == policy or baseline not in table:
        return {}
    scores = {
        one: {task: [row["score"] for row in own] for task, own in table[one].items()} for one in (baseline, policy)
    }
    return {row["task"]: row for row in against_baseline(scores, baseline, seed=seed)}


def cells(rows: Items[Row]) -> list[dict[str, Any]]:
    """Average answers of the needle task over a grid of lengths and depths (the paper's Figure 8).

    Parameters
    ----------
    rows : sequence of mapping
        From `kvsim.evaluate.evaluate` with `kvsim.tasks.needle_at` of several depths.

    Returns
    -------
    list of dict
        ``policy``, ``length``, ``depth`` (percent), ``samples`` and ``rouge_l_f``, the mean F in [0, 1], as
        `kvsim.charts.needle_grid` takes them.

    Raises
    ------
    KvsimError
        If the rows are of several models, versions, engines, forms of prompt or lengths of answer.
    """
    _check_one(rows, "model_hash", "version", "chat", "answer_tokens")
    places: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        places.setdefault((row["policy"], row["length"], row["depth"]), []).append(row["score"] / 100)
    return [
        {
            "policy": policy,
            "length": length,
            "depth": depth,
            "samples": len(own),
            "rouge_l_f": sum(own) / len(own),
        }
        for (policy, length, depth), own in places.items()
    ]


def _check_one(rows: Items[Row], *names: str) -> None:
    for name in names:
        kinds = dict.fromkeys(str(row[name]) for row in rows)
        if len(kinds) > 1:
            raise KvsimError(f"answers of one {name} can be compared, got {', '.join(kinds)}")
    engines = dict.fromkeys(engine_of(row) for row in rows)
    if len(engines) > 1:
        raise KvsimError(f"answers of one engine can be compared, got {', '.join(engines)}")


def _by_policy(rows: Items[Row]) -> Table:
    """Sort rows of one length into policies and tasks, samples in one order."""
    table: dict[str, dict[str, dict[tuple[Any, ...], Row]]] = {}
    for row in rows:
        own = table.setdefault(row["policy"], {}).setdefault(row["task"], {})
        sample = row["seed"], row["index"], row["question_hash"]
        if sample in own:
            raise KvsimError(f"{row['policy']} on {row['task']}: has sample {row['index']} twice")
        own[sample] = row
    first = next(iter(table.values()))
    for policy, tasks in table.items():
        for task in dict.fromkeys([*first, *tasks]):
            if set(tasks.get(task, {})) != set(first.get(task, {})):
                raise KvsimError(f"{policy} on {task}: does not have the same samples as the other policies")
    return {
        policy: {task: [own[sample] for sample in sorted(own)] for task, own in tasks.items()}
        for policy, tasks in table.items()
    }


def _means(rows: Items[Row]) -> dict[str, Any]:
    names = ("score", "kept_mass", "survival")
    return {"samples": len(rows), **{name: _mean([row[name] for row in rows]) for name in names}}


def _mean(values: Items[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
