"""Rules that choose their coefficients while they run, from what they have seen so far."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvsim.plan import FloatArray, Plan

__all__ = ["Control", "Decide", "Moment"]


@dataclass(frozen=True)
class Moment:
    """What a rule knows when it is about to take in a scored step.

    Attributes
    ----------
    step : int
        Step t, from 1.
    visible : list of array
        Positions that each group sees, ascending, the step's own last.
    states : list of array
        [n_g] each group's states over them, before the update; 0 for the step's own position.
    scores : list of array
        [K, n_g] the step's scores, layer by layer.
    """

    step: int
    visible: "list[npt.NDArray[np.intp]]"
    states: "list[FloatArray]"
    scores: "list[FloatArray]"


Decide = Callable[[Moment], "tuple[FloatArray, FloatArray]"]
"""Gives the coefficients a and b of a step, [K] each, the same for all groups."""


class Control(ABC):
    """How a rule chooses the coefficients of each scored step; frozen, while what `begin` gives has a memory."""

    @abstractmethod
    def begin(self, plan: "Plan") -> Decide:
        """Start on a new sequence."""
