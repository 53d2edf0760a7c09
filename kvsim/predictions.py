"""Does a replay predict what the model will answer? Statistics of the rows of `kvsim.predict`."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.correlation import spearman
from kvsim.errors import KvsimError
from kvsim.policy import parse

__all__ = ["LOOPS", "MEASURES", "PREDICTORS", "auc", "budget_of", "prediction", "read_predictions"]

LOOPS = ("open", "closed")
MEASURES = {"kept_mass": 1, "survival": 1, "output_error": -1}
"""What a replay says, and whether more of it should mean a better answer."""

PREDICTORS = {f"{loop}_{name}": sign for loop in LOOPS for name, sign in MEASURES.items()}
"""The same of either loop."""

LEVEL = 0.95
RESAMPLES = 1000
ONE = ("model_hash", "chat", "version")
"""What rows of one table have in common; those of one task and length have ``answer_tokens`` as well."""

Row = Mapping[str, Any]
Numbers = npt.NDArray[np.float64]


def read_predictions(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read files of rows: a JSON object a line, as ``kvsim predict`` writes them, or Parquet of the same.

    Raises
    ------
    KvsimError
        Naming the file and the line or row, if one cannot be read or holds something else.
    """
    rows = []
    for file in files:
        parquet = file.suffix == ".parquet"
        for number, row in enumerate(_parquet(file) if parquet else _lines(file), start=1):
            fault = _fault(row)
            if fault is not None:
                where = f"{file}: {'row' if parquet else 'line'} {number}"
                raise KvsimError(f"{where} is not a row of kvsim predict: it has no {fault!r}")
            rows.append(row)
    return rows


def _lines(file: Path) -> Iterator[Any]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise KvsimError(f"{file}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError:
        raise KvsimError(f"{file}: not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except ValueError:
            raise KvsimError(f"{file}: line {number} is not JSON") from None


def _parquet(file: Path) -> list[dict[str, Any]]:
    import polars as pl

    try:
        with open(file, "rb") as source:
            return pl.read_parquet(source).to_dicts()
    except OSError as error:
        raise KvsimError(f"{file}: cannot be read ({error.strerror or error})") from error
    except pl.exceptions.PolarsError:
        raise KvsimError(f"{file}: is not a whole Parquet file") from None


def _fault(row: Any) -> str | None:
    """Name the first column that a row should have and has not."""
    kinds: dict[str, Any] = {"task": str, "policy": str, "length": int, "index": int, "seed": int}
    own = {"seed": 0} | row if isinstance(row, dict) else {}
    for name in (*kinds, "score", *PREDICTORS):
        value = own.get(name)
        known = isinstance(value, kinds.get(name, int | float)) and not isinstance(value, bool)
        finite = not isinstance(value, float) or math.isfinite(value)
        missing = name in PREDICTORS and name in own and value is None
        if not (missing or (known and finite)):
            return name
    return None


def prediction(rows: Items[Row], *, resamples: int = RESAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Say how well each predictor orders policies of one budget, and tells their right answers from wrong ones.

    Parameters
    ----------
    rows : sequence of mapping
        From `kvsim.predict.predict_rows`, in any order; every sample with the same policies.
    resamples : int
        Bootstrap samples over the questions, for the 95% intervals.
    seed : int
        Theirs.

    Returns
    -------
    list of dict
        For each task, length and budget, and each predictor: ``rank_correlation`` (Spearman, over policies, of the mean
        score with the mean predictor), and ``auc``: the chance that of two policies on ONE sample, of which one scored
        higher, the predictor is on its side (ties count half), averaged over all such pairs; ``pairs``, their number.
        Each with ``_low`` and ``_high``, over the bootstrap samples in which it is defined. None where undefined
        (equal scores everywhere); a predictor that some row lacks (survival without needles) has no row.

    Raises
    ------
    KvsimError
        If there are no rows, a sample lacks a policy or has it twice, or rows are of several models, versions or forms
        of prompt.
    """
    if not rows:
        raise KvsimError("there are no rows to compare")
    for name in ONE:
        _check_one(name, rows)
    found: list[dict[str, Any]] = []
    for setting in dict.fromkeys(map(_setting, rows)):
        task, length, budget = setting
        by_key: dict[tuple[Any, str], Row] = {}
        for row in rows:
            if _setting(row) != setting:
                continue
            key = (row.get("seed", 0), row["index"]), row["policy"]
            if key in by_key:
                raise KvsimError(f"{task} at {length}: sample {row['index']} has two rows of {row['policy']}")
            by_key[key] = row
        _check_one("answer_tokens", list(by_key.values()))
        samples = sorted({sample for sample, _ in by_key})
        policies = list(dict.fromkeys(policy for _, policy in by_key))
        if len(by_key) != len(policies) * len(samples):
            raise KvsimError(f"{task} at {length}: every sample must have a row of every policy")
        scores = _table(by_key, samples, policies, "score")
        drawn = np.random.default_rng(seed).integers(len(samples), size=(resamples, len(samples)))
        for name, sign in PREDICTORS.items():
            if any(row.get(name) is None for row in by_key.values()):
                continue
            values = sign * _table(by_key, samples, policies, name)
            pairs, share = auc(scores, values)
            rho = _rank(scores, values)
            found.append(
                {
                    "task": task,
                    "length": length,
                    "budget": budget,
                    "samples": len(samples),
                    "policies": len(policies),
                    "predictor": name,
                    "rank_correlation": rho,
                    **_interval("rank_correlation", rho, [_rank(scores[d], values[d]) for d in drawn]),
                    "auc": share,
                    **_interval("auc", share, [auc(scores[d], values[d])[1] for d in drawn]),
                    "pairs": pairs,
                }
            )
    return found


def auc(scores: Numbers, values: Numbers) -> tuple[int, float | None]:
    """Chance that, of two policies with different scores on one sample, the better one has the higher value.

    Parameters
    ----------
    scores, values : array
        [samples, policies].

    Returns
    -------
    pairs : int
        How many such pairs there are.
    share : float or None
        Ties of the value count half; None without pairs.
    """
    better = scores[:, :, None] > scores[:, None, :]
    higher = values[:, :, None] > values[:, None, :]
    equal = values[:, :, None] == values[:, None, :]
    pairs = int(better.sum())
    return pairs, float((higher[better].sum() + equal[better].sum() / 2) / pairs) if pairs else None


def _check_one(name: str, rows: Items[Row]) -> None:
    kinds = dict.fromkeys(str(row.get(name)) for row in rows)
    if len(kinds) > 1:
        raise KvsimError(f"rows of one {name} can be compared, got {', '.join(kinds)}")


def budget_of(policy: str) -> str:
    """Give a policy's budget; - for the full cache."""
    budget = parse(policy).budget
    return "-" if budget is None else str(budget)


def _setting(row: Row) -> tuple[str, int, str]:
    # Policies are compared at one budget only: that more memory keeps more and answers better is no prediction.
    return row["task"], row["length"], budget_of(row["policy"])


def _table(by_key: Mapping[Any, Row], samples: Items[Any], policies: Items[str], name: str) -> Numbers:
    return np.array([[by_key[sample, policy][name] for policy in policies] for sample in samples], np.float64)


def _rank(scores: Numbers, values: Numbers) -> float | None:
    rho = spearman(scores.mean(axis=0), values.mean(axis=0))
    return None if math.isnan(rho) else rho


def _interval(name: str, value: float | None, drawn: Items[float | None]) -> dict[str, float | None]:
    known = [one for one in drawn if one is not None]
    if value is None or not known:
        return {f"{name}_low": None, f"{name}_high": None}
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return {f"{name}_low": low, f"{name}_high": high}
