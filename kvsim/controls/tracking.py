"""The tracking signal: a low alpha while the state's errors keep their direction, a high one while they cancel."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsim.control import Control, Decide, Moment
from kvsim.controls.base import AlphaChooser
from kvsim.plan import FloatArray, Plan

if TYPE_CHECKING:
    from kvsim.policies.ema import Ema

__all__ = ["Tracking"]


@dataclass(frozen=True)
class Tracking(Control):
    """Tell a shift from noise by the direction of the errors; the gain ``1 - alpha`` is how much of them keeps it.

    The error of a step is each position's share of the step's scores less its share of the state, so that errors sum to
    0 and only what changes the ranking counts. After a relevance shift the same positions stay above the state and the
    same ones below it, step after step; errors that are noise turn back. Trigg and Leach's tracking signal tells the
    two apart. With E and D the moving averages of the errors and of their absolute values, ``S = sum |E| / sum D`` over
    the visible positions is 1 while no error changes its sign, and about ``S0`` for independent Gaussian errors,
    ``S0^2`` being the sum of the squared weights in E over the square of their sum. Averaged over groups, it gives
    ``1 - alpha = (S - S0) / (1 - S0)``, between ``1 - high`` and ``1 - low``.

    The scores are weighted over layers as the rule does. A position that is new starts from 0, so the state lags behind
    it: that is an error like any other. Under irreversible eviction only survivors have errors.

    References
    ----------
    D. W. Trigg and A. G. Leach, "Exponential smoothing with an adaptive response rate", Operational Research Quarterly
    18 (1967), 53-59, who set ``1 - alpha = S`` for a single series.

    Attributes
    ----------
    rule : Ema
        The EMA, with the alpha of the first two steps, while errors have no direction yet.
    beta : float
        Weight of the newest error in E and D, in (0, 1).
    low, high : float
        Bounds on alpha.
    """

    rule: "Ema"
    beta: float = 0.2
    low: float = 0.3
    high: float = 0.95

    def begin(self, plan: Plan) -> Decide:
        """See `Control.begin`."""
        return _Tracker(self, plan)


class _Tracker(AlphaChooser):
    def __init__(self, control: Tracking, plan: Plan) -> None:
        super().__init__(control.rule, plan)
        self._control = control
        self._errors = [np.zeros((2, 0)) for _ in range(plan.groups.count)]
        self._weights = 0.0, 0.0

    def choose(self, moment: Moment) -> float:
        """See `AlphaChooser.choose`."""
        if not any(state.any() for state in moment.states):
            return self.alpha
        beta, (total, squares) = self._control.beta, self._weights
        # Sums of the weights in E and of their squares.
        self._weights = total, squares = beta + (1 - beta) * total, beta**2 + (1 - beta) ** 2 * squares
        found = [self._signal(moment, g) for g in range(len(moment.visible))]
        known = [signal for signal in found if signal is not None]
        random = math.sqrt(squares) / total
        if random >= 1 or not known:
            return self.alpha
        self.signals = {"signal": float(np.mean(known)), "random": random}
        gain = (self.signals["signal"] - random) / (1 - random)
        return min(max(1 - gain, self._control.low), self._control.high)

    def _signal(self, moment: Moment, g: int) -> float | None:
        """Take in a group's errors; give its tracking signal, None where there never was an error."""
        visible, state = moment.visible[g], moment.states[g]
        error = _shares(self.coefficients.layer_weights @ moment.scores[g]) - _shares(state)
        smoothed = self._errors[g]
        if visible[-1] >= smoothed.shape[1]:
            smoothed = np.pad(smoothed, ((0, 0), (0, int(visible[-1]) + 1 - smoothed.shape[1])))
            self._errors[g] = smoothed
        smoothed[:, visible] += self._control.beta * (np.stack([error, np.abs(error)]) - smoothed[:, visible])
        signed, absolute = np.abs(smoothed[:, visible]).sum(axis=1)
        return float(signed / absolute) if absolute > 0 else None


def _shares(m: FloatArray) -> FloatArray:
    total = m.sum()
    return m / total if total > 0 else np.zeros_like(m)
