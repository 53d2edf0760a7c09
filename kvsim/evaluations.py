"""Files of evaluations, and the table that compares policies with the full cache and with full refresh."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

from kvsim.errors import KvsimError
from kvsim.evaluate import EVAL_KEY
from kvsim.paired import paired
from kvsim.policy import Policy, parse

__all__ = ["comparisons", "full_refresh", "key_of", "read_evaluations", "write_evaluations"]

Row = Mapping[str, Any]


def key_of(row: Row) -> tuple[Any, ...]:
    """Give what a row is a function of."""
    return tuple(row[name] for name in EVAL_KEY)


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
    for name in (*EVAL_KEY, "score"):
        if name not in frame.columns or frame[name].null_count():
            raise KvsimError(f"{path}: is not a file of kvsim evaluations: it has no column {name!r}")
    if not frame["score"].dtype.is_numeric():
        raise KvsimError(f"{path}: is not a file of kvsim evaluations: column 'score' does not hold numbers")
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

    frame = pl.DataFrame([dict(row) for row in rows], infer_schema_length=None)
    write_results(frame.with_columns(pl.col(pl.Null).cast(pl.Float64)), out)


def full_refresh(policy: Policy) -> Policy | None:
    """Give a lazily refreshed policy with every step scored; None for one that scores every step already."""
    return None if policy.expand().refresh in (None, 1) else dataclasses.replace(policy, refresh=1)


def comparisons(rows: Items[Row], *, seed: int = 0) -> list[dict[str, Any]]:
    """Compare every policy with the full cache, and lazy ones with full refresh, on the same samples (Table 3's form).

    Parameters
    ----------
    rows : sequence of mapping
        From `kvsim.evaluate.evaluate`.
    seed : int
        Of the bootstrap.

    Returns
    -------
    list of dict
        For each task, length and policy: ``samples``, ``score`` (mean), ``kept_mass`` and ``survival`` (means), and for
        ``full`` and ``refresh`` the paired difference: ``<name>_delta``, ``_low``, ``_high`` (95% bootstrap interval,
        None without spread), ``_p`` and ``_test``; all None where there is no such baseline.
    """
    found: list[dict[str, Any]] = []
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        scores: dict[str, dict[Any, float]] = {}
        for row in own:
            scores.setdefault(row["policy"], {})[row["seed"], row["index"]] = row["score"]
        for policy, by_sample in scores.items():
            mine = [row for row in own if row["policy"] == policy]
            line: dict[str, Any] = {"task": task, "length": length, "policy": policy, "samples": len(by_sample)}
            line["score"] = sum(by_sample.values()) / len(by_sample)
            line |= {name: _mean([row[name] for row in mine]) for name in ("kept_mass", "survival")}
            lazy = full_refresh(parse(policy))
            for name, baseline in (("full", "full"), ("refresh", None if lazy is None else str(lazy))):
                theirs = scores.get(baseline or "", {})
                common = [sample for sample in by_sample if sample in theirs]
                against = None
                if common and baseline != policy:
                    against = paired([by_sample[s] for s in common], [theirs[s] for s in common], seed=seed)
                for part in ("delta", "low", "high", "p", "test"):
                    line[f"{name}_{part}"] = None if against is None else getattr(against, part)
            found.append(line)
    return found


def _mean(values: Items[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
