"""The warm-up selector: noise and drift of the first steps settle alpha for the rest (InertiaKV Appendix H)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvsim.control import Control, Decide, Moment
from kvsim.controls.base import AlphaChooser
from kvsim.correlation import top
from kvsim.plan import Plan

if TYPE_CHECKING:
    from kvsim.policies.ema import Ema

__all__ = ["GRID", "Noise", "least_risk", "risk"]

GRID = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95)
"""The alphas of the paper's sweep (Table 5)."""


def risk(alpha: float, sigma: float, delta: float) -> float:
    """Give the two-term risk of Eq. 5 as we read it; the paper does not print its formula.

    ``2 (1 - alpha) sigma^2 / (1 + alpha)`` is Proposition 1's variance of an EMA gap; ``(delta alpha / (1 - alpha))^2``
    is the square of how far an EMA stays behind a quantity that moves by `delta` a step. Only ``eta = sigma / delta``
    decides which alpha is best: on `GRID` 0.3 from eta 0.45 on, 0.6 from 1.9, 0.8 from 7.0, 0.9 from 24, 0.95 from 72.

    Parameters
    ----------
    alpha : float
        In [0, 1).
    sigma, delta : float
        Noise, and drift a step.
    """
    return 2 * (1 - alpha) * sigma**2 / (1 + alpha) + (delta * alpha / (1 - alpha)) ** 2


def least_risk(sigma: float, delta: float) -> float | None:
    """Give the alpha of `GRID` with the least risk; None where there is neither noise nor drift."""
    if sigma == 0 and delta == 0:
        return None
    return min(GRID, key=lambda alpha: risk(alpha, sigma, delta))


@dataclass(frozen=True)
class Noise(Control):
    """Estimate noise and drift during a warm-up, then run at the alpha of the least `risk`.

    sigma is the cross-layer disagreement: 1 - Jaccard of the top-B of two layers' scores, over all pairs of layers
    (of groups in different layers, where each has its own), averaged over the warm-up. delta is the temporal drift:
    1 - Jaccard of the top-B of the state after successive steps, averaged over groups and the warm-up. Both see what
    the policy sees: under irreversible eviction B + 1 positions, so that delta is at most 2 / (B + 1).

    Attributes
    ----------
    rule : Ema
        The EMA, with the alpha it has during the warm-up, and for good where no estimate comes of it.
    warmup : int
        Scored steps that are watched, at least 2.
    """

    rule: "Ema"
    warmup: int = 10

    def begin(self, plan: Plan) -> Decide:
        """See `Control.begin`."""
        return _Warmup(self.rule, plan, self.warmup)


class _Warmup(AlphaChooser):
    def __init__(self, rule: "Ema", plan: Plan, warmup: int) -> None:
        super().__init__(rule, plan)
        self._warmup, self._steps = warmup, 0
        self._sigmas: list[float] = []
        self._deltas: list[float] = []
        self._before: list[npt.NDArray[np.intp]] = []
        groups = plan.groups
        layers = [own for own in range(len(groups.layers)) for _ in range(groups.count // len(groups.layers))]
        self._layer_of_row = np.array(layers or range(groups.depth))

    def choose(self, moment: Moment) -> float:
        """See `AlphaChooser.choose`."""
        if self._steps > self._warmup:
            return self.alpha
        self._watch_drift(moment)
        self._steps += 1
        if self._steps <= self._warmup:
            self._watch_noise(moment)
            return self.alpha
        if not self._sigmas:
            return self.alpha
        sigma, delta = float(np.mean(self._sigmas)), float(np.mean(self._deltas))
        self.signals = {"sigma": sigma, "delta": delta}
        if delta > 0:
            self.signals["eta"] = sigma / delta
        best = least_risk(sigma, delta)
        return self.alpha if best is None else best

    def _watch_drift(self, moment: Moment) -> None:
        """Compare the top-B of the states after the last scored step and after the one before it."""
        if self._steps == 0:
            return
        # The step's own position is not part of the state yet.
        known = [visible[:-1] for visible in moment.visible]
        now = [
            own[top(state[:-1], int(budget))]
            for own, state, budget in zip(known, moment.states, self.plan.budgets, strict=True)
        ]
        if self._before:
            pairs = zip(self._before, now, strict=True)
            self._deltas.append(float(np.mean([_disagreement(before, after) for before, after in pairs])))
        self._before = now

    def _watch_noise(self, moment: Moment) -> None:
        """Compare the top-B of the scores of all pairs of layers."""
        width = max(int(visible[-1]) for visible in moment.visible) + 1
        marks = np.zeros((self._layer_of_row.size, width), np.float32)
        rows = iter(marks)
        for visible, scores, budget in zip(moment.visible, moment.scores, self.plan.budgets, strict=True):
            for layer in scores:
                next(rows)[visible[top(layer, int(budget))]] = 1
        # Counts below 2^24 are exact in float32, and their products fast; shares of them are not.
        sizes = marks.sum(axis=1, dtype=np.float64)
        both = (marks @ marks.T).astype(np.float64)
        first, second = np.nonzero(self._layer_of_row[:, None] < self._layer_of_row)
        if first.size:
            common = both[first, second]
            self._sigmas.append(float(1 - (common / (sizes[first] + sizes[second] - common)).mean()))


def _disagreement(one: npt.NDArray[np.intp], other: npt.NDArray[np.intp]) -> float:
    """Give 1 - Jaccard of two sets of positions; two empty sets agree."""
    common = np.intersect1d(one, other, assume_unique=True).size
    union = one.size + other.size - common
    return 1 - common / union if union else 0.0
