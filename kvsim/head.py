"""Base classes of policy heads: a `Rule` draws up a plan, a `Preset` names a policy made of rules and axes."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from kvsim.context import Context
from kvsim.plan import FloatArray, Plan
from kvsim.registry import registrar

if TYPE_CHECKING:
    from kvsim.policy import Policy

__all__ = ["HEADS", "Coefficients", "Head", "LinearRule", "Preset", "Rule", "register"]


class Head(ABC):
    """The first word of a policy string; subclasses are frozen dataclasses whose fields are its arguments.

    Attributes
    ----------
    name : str
        The word.
    needs_future : bool
        Whether it reads what later queries attend to: it can be replayed, and never run live.
    """

    name: ClassVar[str]
    needs_future: ClassVar[bool] = False


class Rule(Head):
    """A head that turns scores into a ranking by itself."""

    @abstractmethod
    def plan(self, context: Context) -> Plan:
        """Draw up the plan for the trace and axes in `context`."""


class Coefficients(NamedTuple):
    """A linear rule, ``m <- a * m + b * s`` once for each layer, in order.

    Attributes
    ----------
    a, b : array
        [K] factors on the old state and on the layer's score.
    reset : bool
        m = 0 at the start of every scored step.
    """

    a: FloatArray
    b: FloatArray
    reset: bool

    @property
    def layer_weights(self) -> FloatArray:
        """Weight of each layer's score in the state after its step, [K]: b times the later layers' a."""
        weights: FloatArray = self.b * np.append(np.cumprod(self.a[:0:-1])[::-1], 1.0)
        return weights

    @property
    def step_decay(self) -> float:
        """Factor on the state from one scored step to the next: the product of a, 0 without memory."""
        return 0.0 if self.reset else float(np.prod(self.a))


class LinearRule(Rule):
    """A rule that is one linear recurrence with the same coefficients at every step."""

    @abstractmethod
    def coefficients(self, depth: int) -> Coefficients:
        """Give the recurrence of a group of `depth` layers."""


class Preset(Head):
    """A published policy, as a name for a rule with axes."""

    @abstractmethod
    def expand(self) -> "Policy":
        """Give the policy that this name stands for."""


HEADS: dict[str, type[Head]] = {}

register = registrar(HEADS, "policies")
"""Makes a head available in policy strings under its `name`."""
