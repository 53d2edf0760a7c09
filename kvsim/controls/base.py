"""What the controls of an EMA share: one alpha for the whole model, chosen before each scored step."""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvsim.control import Moment
from kvsim.head import Coefficients
from kvsim.plan import FloatArray, Plan

if TYPE_CHECKING:
    from kvsim.policies.ema import Ema

__all__ = ["AlphaChooser"]


class AlphaChooser(ABC):
    """The memory of a control on one sequence; calling it gives the coefficients of a step.

    Parameters
    ----------
    rule : Ema
        The EMA to run, at the alpha it starts with.
    plan : Plan
        The plan that it is part of.

    Attributes
    ----------
    alpha : float
        In use at the last step that was scored.
    signals : dict of str to float
        What `alpha` was chosen by; empty while nothing is known.
    """

    def __init__(self, rule: "Ema", plan: Plan) -> None:
        self.rule, self.plan = rule, plan
        self.alpha = rule.alpha
        self.signals: dict[str, float] = {}

    @abstractmethod
    def choose(self, moment: Moment) -> float:
        """Choose alpha for the step about to be taken in."""

    def __call__(self, moment: Moment) -> tuple[FloatArray, FloatArray]:
        """Give the coefficients of a step, [K] each."""
        self.alpha = self.choose(moment)
        a, b, _ = self.coefficients
        return a, b

    @property
    def coefficients(self) -> Coefficients:
        """The recurrence at the alpha in use."""
        return dataclasses.replace(self.rule, alpha=self.alpha).coefficients(self.plan.groups.depth)
