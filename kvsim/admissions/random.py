"""Admission by a seeded draw."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvsim.admission import Admission
from kvsim.admissions.base import WINDOW, Admit, check_share, check_window, register
from kvsim.context import Context
from kvsim.errors import PolicyError


@register
@dataclass(frozen=True)
class RandomAdmit(Admit):
    """Admit each position of each head with the same probability, drawn once: a control.

    Attributes
    ----------
    share : float
        The probability, in [0, 1].
    seed : int
        Seed of the draws; a longer trace extends the draws of a shorter one.
    window : int
        Recent positions that every query sees.
    """

    name: ClassVar[str] = "random"
    share: float
    seed: int = field(default=0, kw_only=True)
    window: int = field(default=WINDOW, kw_only=True)

    def __post_init__(self) -> None:
        check_share(self.name, "share", self.share)
        check_window(self.name, self.window)
        if self.seed < 0:
            raise PolicyError(f"seed of 'random' must be 0 or more, got {self.seed}")

    def admission(self, context: Context) -> Admission:
        """See `Admit.admission`."""
        shape = context.trace.num_positions, context.groups.count
        draws = np.random.Generator(np.random.PCG64(self.seed)).random(shape).T
        return Admission(self.window, draws < self.share)
