"""Admission by the future."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvsim.admission import Admission
from kvsim.admissions.base import WINDOW, Admit, check_share, check_window, register
from kvsim.context import Context
from kvsim.mass import group_rows
from kvsim.plan import FloatArray
from kvsim.shares import share_of


@register
@dataclass(frozen=True)
class OracleAdmit(Admit):
    """Admit what later queries will attend to, head by head: the best choice of that many positions, seen afterwards.

    A position is worth the full-cache attention, averaged over the KV head's query heads, that decode steps give it
    once it has left the window. No other choice of as many positions a head has a higher kept mass without eviction.

    Attributes
    ----------
    share : float
        Share of the positions that leave the window before the last query, in [0, 1], floored.
    window : int
        Recent positions that every query sees.
    """

    name: ClassVar[str] = "oracle"
    needs_future: ClassVar[bool] = True
    share: float
    window: int = field(default=WINDOW, kw_only=True)

    def __post_init__(self) -> None:
        check_share(self.name, "share", self.share)
        check_window(self.name, self.window)

    def admission(self, context: Context) -> Admission:
        """See `Admit.admission`."""
        trace, groups = context.trace, context.groups
        mass: FloatArray = np.zeros((groups.count, trace.num_positions))
        for t in range(1, trace.num_steps + 1):
            outside = max(0, trace.prompt_length + t - self.window)
            mass[:, :outside] += group_rows(trace, groups, t)[:, :outside]
        leaving = max(0, trace.num_positions - self.window)
        count = share_of(self.share, leaving)
        admitted: npt.NDArray[np.bool_] = np.zeros(mass.shape, dtype=np.bool_)
        # Among equal masses the highest positions, as everywhere.
        order = np.argsort(mass[:, :leaving].astype(np.float32), axis=1, kind="stable")
        np.put_along_axis(admitted, order[:, leaving - count :], True, axis=1)
        return Admission(self.window, admitted, mass)
