"""Pairs of positions around a boundary: how their scores vary, and how often a linear rule misranks them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvsim.plan import FloatArray
from kvsim.proposition import ema_states, finite_factor, limit_factor, mean_factor, variance_factor

__all__ = [
    "BOUNDS",
    "Bound",
    "Pair",
    "Process",
    "Series",
    "Shuffled",
    "mean_of",
    "measure",
    "median",
    "shuffle",
    "step_shares",
]

Bound = Literal["asymptotic", "finite"]
BOUNDS: tuple[Bound, ...] = ("asymptotic", "finite")

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Pair:
    """Two positions on either side of the boundary; `above` has the larger time mean.

    Attributes
    ----------
    group : str
        Their retention group.
    above, below : int
        The positions.
    rank_above, rank_below : int
        Their ranks by time mean, 1 being the highest.
    delta : float
        Difference of the time means of their scores, at least 0.
    variance_above, variance_below : float
        Time variances of their scores.
    autocorrelation, autocorrelation_above, autocorrelation_below : float or None
        Lag-1 autocorrelation of the difference of their scores, and of each one's; of successive recorded steps,
        scored or not. Proposition 1 assumes 0 (of T independent scores it is -1/T on average). None where constant.
    correlation : float or None
        Of the two positions' scores over time; Proposition 1 assumes 0.
    misranked : float or None
        Share of the last half of the steps with the order reversed; None if the means are equal in float32, as there is
        no order then, and nothing to bound either.
    asymptotic, finite : float or None
        The bounds on it from the sum of the two variances, not capped: 1 or more says nothing.
    variance_ratio : float or None
        Mean square of what the gap of the states lies off its expectation, over the last half of the steps, over the
        variance that Proposition 1 gives it there. None where both scores are constant.
    """

    group: str
    above: int
    below: int
    rank_above: int
    rank_below: int
    delta: float
    variance_above: float
    variance_below: float
    autocorrelation: float | None
    autocorrelation_above: float | None
    autocorrelation_below: float | None
    correlation: float | None
    misranked: float | None
    asymptotic: float | None
    finite: float | None
    variance_ratio: float | None

    @property
    def asymptotic_common(self) -> float | None:
        """The asymptotic bound with one sigma^2 for both, the larger variance, as the paper writes it."""
        total = self.variance_above + self.variance_below
        if self.asymptotic is None or total == 0:
            return self.asymptotic
        return self.asymptotic * 2 * max(self.variance_above, self.variance_below) / total

    def violated(self, bound: Bound) -> bool:
        """Say whether the pair is in the wrong order more often than a bound allows."""
        value = self.asymptotic if bound == "asymptotic" else self.finite
        return value is not None and self.misranked is not None and self.misranked > value

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        told = {f"{bound}_violated": self.violated(bound) for bound in BOUNDS}
        return dict(vars(self)) | {"asymptotic_common": self.asymptotic_common} | told


@dataclass(frozen=True)
class Process:
    """One aggregate update a scored step.

    Attributes
    ----------
    decay : float
        A, the factor on the state from one scored step to the next; 1 for the running mean.
    scored : array of bool
        [T] the steps that update the state.
    """

    decay: float
    scored: BoolArray

    @property
    def half(self) -> int:
        """Steps before the last half."""
        return len(self.scored) // 2

    @property
    def updates(self) -> IntArray:
        """How many updates there were by each step, [T]."""
        return np.cumsum(self.scored, dtype=np.intp)


@dataclass(frozen=True)
class Series:
    """Scores of the positions around the boundary of one group; pairs are arrays [above, below].

    Attributes
    ----------
    group : str
        The group.
    positions : array of int
        [n] positions by falling time mean.
    ranks : array of int
        [n] their ranks, from 1.
    inside : int
        How many of them are within the budget.
    scores : array
        [T, n] their scores.
    """

    group: str
    positions: IntArray
    ranks: IntArray
    inside: int
    scores: FloatArray

    @classmethod
    def around(cls, group: str, order: IntArray, budget: int, reach: int, steps: int) -> "Series":
        """Take `reach` positions to either side of rank `budget` from positions in falling order; scores are zero."""
        first, last = max(0, budget - reach), min(order.size, budget + reach)
        ranks = np.arange(first + 1, last + 1)
        return cls(group, order[first:last], ranks, budget - first, np.zeros((steps, last - first)))

    @property
    def mean(self) -> FloatArray:
        """Time means, [n]."""
        found: FloatArray = self.scores.mean(axis=0)
        return found

    @property
    def centred(self) -> FloatArray:
        """Scores less their means, [T, n]; exactly 0 where a position's scores are constant."""
        return np.where(np.ptp(self.scores, axis=0) > 0, self.scores - self.mean, 0.0)

    @property
    def variance(self) -> FloatArray:
        """Time variances, [n]."""
        found: FloatArray = (self.centred**2).mean(axis=0)
        return found

    @property
    def tied(self) -> BoolArray:
        """Which pairs have equal means in float32."""
        mean = self.mean.astype(np.float32)
        found: BoolArray = mean[: self.inside, None] == mean[None, self.inside :]
        return found

    @property
    def noise(self) -> FloatArray:
        """``(v_i + v_j) / delta^2`` of each pair; infinite where tied."""
        total = self._pairs(self.variance, 1)
        squared = self._pairs(self.mean, -1) ** 2
        return np.divide(total, squared, out=np.full_like(total, np.inf), where=~self.tied)

    def run(self, process: Process, order: IntArray | None = None) -> tuple[BoolArray, FloatArray]:
        """Run a rule on the steps, in another order if one is given.

        Returns
        -------
        array of bool
            [T, above, below]: whether the order is reversed after each step, in float32.
        array
            [above, below]: `Pair.variance_ratio`, NaN where there is none.
        """
        states = ema_states(self.scores if order is None else self.scores[order], process.decay, process.scored)
        single = states.astype(np.float32)
        wrong: BoolArray = single[:, : self.inside, None] < single[:, None, self.inside :]
        last, updates = slice(process.half, None), process.updates[process.half :]
        expected = mean_factor(process.decay, updates)[:, None, None] * self._pairs(self.mean, -1)
        gap = states[last, : self.inside, None] - states[last, None, self.inside :]
        want = self._pairs(self.variance, 1) * variance_factor(process.decay, updates).mean()
        ratio = np.full_like(want, np.nan)
        np.divide(((gap - expected) ** 2).mean(axis=0), want, out=ratio, where=want > 0)
        return wrong, ratio

    def _pairs(self, values: FloatArray, sign: int) -> FloatArray:
        both: FloatArray = values[: self.inside, None] + sign * values[None, self.inside :]
        return both


@dataclass(frozen=True)
class Shuffled:
    """What the measures are with the steps in random order: chance, and dependence between tokens, but none over time.

    Attributes
    ----------
    asymptotic, finite : float
        Pairs whose bound is violated; a mean over shuffles, as are the others.
    misranked : float or None
        Mean share of the last half of the steps with the order reversed.
    variance_ratio : float or None
        Median of `Pair.variance_ratio`.
    """

    asymptotic: float
    finite: float
    misranked: float | None
    variance_ratio: float | None


def measure(series: Series, process: Process) -> list[Pair]:
    """Measure every pair of a series under a rule."""
    updates = process.updates
    limit = limit_factor(process.decay) if updates[-1] > 1 else None
    finite = float(finite_factor(process.decay, updates[process.half :]).mean())
    wrong, ratio = series.run(process)
    misranked = wrong[process.half :].mean(axis=0)
    mean, variance, centred, noise, tied = series.mean, series.variance, series.centred, series.noise, series.tied
    own = [_autocorrelation(column) for column in centred.T]
    found = []
    for i, k in np.ndindex(tied.shape):
        j, told = series.inside + k, not tied[i, k]
        found.append(
            Pair(
                group=series.group,
                above=int(series.positions[i]),
                below=int(series.positions[j]),
                rank_above=int(series.ranks[i]),
                rank_below=int(series.ranks[j]),
                delta=float(mean[i] - mean[j]) if told else 0.0,
                variance_above=float(variance[i]),
                variance_below=float(variance[j]),
                autocorrelation=_autocorrelation(centred[:, i] - centred[:, j]),
                autocorrelation_above=own[i],
                autocorrelation_below=own[j],
                correlation=_cosine(centred[:, i], centred[:, j]),
                misranked=float(misranked[i, k]) if told else None,
                asymptotic=limit * float(noise[i, k]) if told and limit is not None else None,
                finite=finite * float(noise[i, k]) if told else None,
                variance_ratio=None if np.isnan(ratio[i, k]) else float(ratio[i, k]),
            )
        )
    return found


def step_shares(series: Sequence[Series], process: Process) -> tuple[FloatArray | None, FloatArray | None]:
    """Give two [T] after each step: the share of pairs in the wrong order, and the mean finite-t bound capped at 1."""
    factor = finite_factor(process.decay, process.updates)
    wrong, bound, count = np.zeros(factor.shape), np.zeros(factor.shape), 0
    for one in series:
        told = ~one.tied
        wrong += one.run(process)[0][:, told].sum(axis=1)
        bound += np.minimum(1, factor[:, None] * one.noise[told]).sum(axis=1)
        count += int(told.sum())
    return (wrong / count, bound / count) if count else (None, None)


def shuffle(series: Sequence[Series], pairs: Sequence[Pair], process: Process, shuffles: int, seed: int) -> Shuffled:
    """Measure with the steps in random order, which leaves means, variances and bounds what they are."""
    rng = np.random.default_rng(seed)
    bounds = np.array([[np.inf if b is None else b for b in (pair.asymptotic, pair.finite)] for pair in pairs])
    told = np.array([pair.misranked is not None for pair in pairs])
    violated, misranked, ratios = np.zeros(2), [], []
    for _ in range(shuffles):
        order = rng.permutation(len(process.scored))
        runs = [one.run(process, order) for one in series]
        shares = np.concatenate([wrong[process.half :].mean(axis=0).ravel() for wrong, _ in runs])
        ratio = np.concatenate([own[~np.isnan(own)] for _, own in runs])
        violated += (shares[:, None] > bounds).sum(axis=0) / shuffles
        misranked += shares[told].tolist()
        ratios += [float(np.median(ratio))] if ratio.size else []
    return Shuffled(float(violated[0]), float(violated[1]), mean_of(misranked), mean_of(ratios))


def mean_of(values: Sequence[float]) -> float | None:
    """Give the mean of values, None of none."""
    return float(np.mean(values)) if values else None


def median(values: Sequence[float | None]) -> float | None:
    """Give the median of those values that there are, None if there are none."""
    found = [value for value in values if value is not None]
    return float(np.median(found)) if found else None


def _autocorrelation(x: FloatArray) -> float | None:
    """Give the lag-1 autocorrelation of a centred series; None where it is constant."""
    square = float(x @ x)
    return float(x[:-1] @ x[1:]) / square if square > 0 else None


def _cosine(x: FloatArray, y: FloatArray) -> float | None:
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(x @ y) / scale if scale > 0 else None
