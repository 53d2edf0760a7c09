"""The reactive trigger: a low alpha while the step's ranking and the state's disagree (InertiaKV Appendix H)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvsim.control import Control, Decide, Moment
from kvsim.controls.base import AlphaChooser
from kvsim.correlation import jaccard, top
from kvsim.plan import Plan

if TYPE_CHECKING:
    from kvsim.policies.ema import Ema

__all__ = ["Disagreement"]


@dataclass(frozen=True)
class Disagreement(Control):
    """Run at `low` where the step's highest positions and the state's differ by more than a threshold, else at `high`.

    They differ by 1 - Jaccard, averaged over groups; the step's scores are averaged over layers. It says that the two
    differ, not which of them will turn out right.

    Attributes
    ----------
    rule : Ema
        The EMA, with the alpha of the first step, which has no state to disagree with.
    threshold : float
        In [0, 1].
    share : float
        Share of the budget that is compared, in (0, 1]. Under irreversible eviction only B + 1 positions are left to
        disagree about: all of the budget can then differ by no more than 2 / (B + 1).
    low, high : float
        The two alphas.
    """

    rule: "Ema"
    threshold: float = 0.3
    share: float = 0.5
    low: float = 0.3
    high: float = 0.95

    def begin(self, plan: Plan) -> Decide:
        """See `Control.begin`."""
        return _Trigger(self, plan)


class _Trigger(AlphaChooser):
    def __init__(self, control: Disagreement, plan: Plan) -> None:
        super().__init__(control.rule, plan)
        self._control = control
        self._first = True

    def choose(self, moment: Moment) -> float:
        """See `AlphaChooser.choose`."""
        if self._first:
            self._first = False
            return self.alpha
        found = []
        for state, scores, budget in zip(moment.states, moment.scores, self.plan.budgets, strict=True):
            count = max(1, int(self._control.share * budget))
            found.append(1 - jaccard(top(scores.mean(axis=0), count), top(state, count)))
        self.signals = {"disagreement": float(np.mean(found))}
        shifted = self.signals["disagreement"] > self._control.threshold
        return self._control.low if shifted else self._control.high
