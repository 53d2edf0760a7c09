"""Is one policy better than another on the same samples? Paired differences, their intervals, and tests."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError

__all__ = ["Paired", "against_baseline", "paired"]

LEVEL = 0.95
RESAMPLES = 10_000
EXACT = 14
"""Up to this many samples that differ, every way to swap them is counted; beyond it, they are drawn."""


@dataclass(frozen=True)
class Paired:
    """Scores on the same samples as a baseline's.

    Attributes
    ----------
    samples : int
        How many.
    baseline, score : float
        Mean scores.
    delta : float
        `score` minus `baseline`, in the scores' own unit.
    low, high : float or None
        95% percentile bootstrap interval of `delta`, from resampling the samples. None with one sample or if every
        sample has the same difference: there is no spread to resample.
    p : float
        Two-sided p-value of no difference.
    test : {"mcnemar", "permutation"}
        Which test it is from.
    better, worse : int
        Samples with a higher and with a lower score than the baseline's.
    """

    samples: int
    baseline: float
    score: float
    delta: float
    low: float | None
    high: float | None
    p: float
    test: Literal["mcnemar", "permutation"]
    better: int
    worse: int

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data, for JSON."""
        return asdict(self)


def paired(
    scores: npt.ArrayLike,
    baseline: npt.ArrayLike,
    *,
    full: float = 100.0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Paired:
    """Compare scores with a baseline's, sample by sample.

    If every score is 0 or `full`, the test is McNemar's exact one (the sign test of the samples that differ), else the
    paired permutation test of the mean: the signs of the differences are swapped, in every way while at most 14 samples
    differ, otherwise in `resamples` random ways, with p = (1 + at least as extreme) / (1 + resamples). Samples that do
    not differ change neither. If nothing differs, or there is one sample, p is 1.

    Source: the paper's Table 3 (delta with a paired bootstrap interval); McNemar 1947; Fisher 1935.

    Parameters
    ----------
    scores, baseline : array
        [n] scores of the same samples in the same order.
    full : float
        Score of a right answer: 100 as `kvsim.tasks.score` gives it, 1 for shares.
    resamples : int
        Of the bootstrap and of the permutation test.
    seed : int
        Their seed.

    Raises
    ------
    KvsimError
        If there are no samples, not as many of either, or a score is not finite, or `resamples` is below 1.
    """
    ours, theirs = (np.asarray(values, np.float64) for values in (scores, baseline))
    if ours.ndim != 1 or ours.shape != theirs.shape:
        raise KvsimError(f"paired scores must be two lists of one length, got shapes {ours.shape} and {theirs.shape}")
    if not ours.size:
        raise KvsimError("there are no samples to compare")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise KvsimError("scores must be finite numbers")
    if resamples < 1:
        raise KvsimError(f"resamples must be at least 1, got {resamples}")
    difference = ours - theirs
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    rng = np.random.default_rng(seed)
    low = high = None
    if np.ptp(difference) > 0:
        low, high = _bootstrap(difference, resamples, rng)
    two_valued = bool(np.isin(np.concatenate([ours, theirs]), [0.0, full]).all())
    return Paired(
        samples=ours.size,
        baseline=float(theirs.mean()),
        score=float(ours.mean()),
        delta=float(difference.mean()),
        low=low,
        high=high,
        p=_mcnemar(better, worse) if two_valued else _permutation(difference, resamples, rng),
        test="mcnemar" if two_valued else "permutation",
        better=better,
        worse=worse,
    )


def against_baseline(
    scores: Mapping[str, Mapping[str, Sequence[float]]],
    baseline: str,
    *,
    full: float = 100.0,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Compare policies with a baseline, task by task and over all samples of all tasks: the paper's Table 3.

    Parameters
    ----------
    scores : mapping of str to mapping of str to sequence of float
        For each policy and task the scores of its samples, in one order.
    baseline : str
        A key of `scores`.
    full, resamples, seed
        As for `paired`.

    Returns
    -------
    list of dict
        ``policy``, ``task`` and the fields of `Paired`, one row for each policy but the baseline and each task, then
        one with task ``Avg`` if there are several: the mean over tasks, each counting once. Its interval resamples the
        samples within every task; its p-value is of the permutation test, samples weighted accordingly.

    Raises
    ------
    KvsimError
        If `baseline` is not there or a policy lacks a task or samples of the baseline's.
    """
    if baseline not in scores:
        raise KvsimError(f"no scores of the baseline {baseline!r} (there are: {', '.join(scores)})")
    base = scores[baseline]
    options: dict[str, Any] = {"full": full, "resamples": resamples, "seed": seed}
    rows: list[dict[str, Any]] = []
    for policy, by_task in scores.items():
        if policy == baseline:
            continue
        if set(by_task) != set(base):
            raise KvsimError(f"{policy} and {baseline} must have scores of the same tasks")
        found = {}
        for task in base:
            try:
                found[task] = paired(by_task[task], base[task], **options)
            except KvsimError as error:
                raise KvsimError(f"{policy} on {task}: {error}") from None
        rows += [{"policy": policy, "task": task, **row.to_dict()} for task, row in found.items()]
        if len(found) > 1:
            average = _average(by_task, base, list(found.values()), resamples, seed)
            rows.append({"policy": policy, "task": "Avg", **average.to_dict()})
    return rows


def _average(
    scores: Mapping[str, Sequence[float]],
    baseline: Mapping[str, Sequence[float]],
    rows: list[Paired],
    resamples: int,
    seed: int,
) -> Paired:
    rng = np.random.default_rng(seed)
    differences = [np.subtract(scores[task], baseline[task], dtype=np.float64) for task in baseline]
    weighted = np.concatenate([values / (len(values) * len(differences)) for values in differences])
    low = high = None
    if any(np.ptp(values) > 0 for values in differences):
        means = np.mean([_resampled(values, resamples, rng) for values in differences], axis=0)
        low, high = _tails(means)
    return Paired(
        samples=sum(row.samples for row in rows),
        baseline=float(np.mean([row.baseline for row in rows])),
        score=float(np.mean([row.score for row in rows])),
        delta=float(np.mean([row.delta for row in rows])),
        low=low,
        high=high,
        p=_permutation(weighted, resamples, rng),
        test="permutation",
        better=sum(row.better for row in rows),
        worse=sum(row.worse for row in rows),
    )


def _resampled(difference: npt.NDArray[np.float64], resamples: int, rng: np.random.Generator) -> Any:
    # Counts of each value are enough, and take little memory whatever the number of samples.
    values, counts = np.unique(difference, return_counts=True)
    drawn = rng.multinomial(difference.size, counts / difference.size, size=resamples)
    return drawn @ values / difference.size


def _tails(means: Any) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


def _bootstrap(difference: npt.NDArray[np.float64], resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    return _tails(_resampled(difference, resamples, rng))


def _mcnemar(better: int, worse: int) -> float:
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse, 0.5).pvalue) if better + worse else 1.0


def _permutation(difference: npt.NDArray[np.float64], resamples: int, rng: np.random.Generator) -> float:
    sizes = np.abs(difference[difference != 0])
    observed = abs(float(difference.sum()))
    if not sizes.size:
        return 1.0
    # A sum that differs by rounding alone is as extreme.
    bound = observed - 1e-12 * float(sizes.sum())
    if sizes.size <= EXACT:
        signs = 1 - 2 * ((np.arange(2**sizes.size)[:, None] >> np.arange(sizes.size)) & 1)
        return float((np.abs(signs @ sizes) >= bound).mean())
    extreme = 0
    for start in range(0, resamples, 1000):
        signs = rng.integers(2, size=(min(1000, resamples - start), sizes.size)) * 2 - 1
        extreme += int((np.abs(signs @ sizes) >= bound).sum())
    return (1 + extreme) / (1 + resamples)
