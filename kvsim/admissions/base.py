"""Base class of admissions, the values of the ``admit=`` axis."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvsim.admission import Admission
from kvsim.errors import PolicyError
from kvsim.registry import registrar

if TYPE_CHECKING:
    from kvsim.context import Context

__all__ = ["ADMISSIONS", "SINK", "WINDOW", "Admit", "check_share", "check_window", "first_positions", "register"]

WINDOW = 256
"""Positions of the local window where nobody says otherwise (WG-KV appendix E)."""

SINK = 128
"""Positions at the start that streaming heads admit where nobody says otherwise (WG-KV appendix E)."""


class Admit(ABC):
    """Which positions stay when they leave the local window; subclasses are frozen dataclasses with its arguments.

    Attributes
    ----------
    name : str
        The word after ``admit=``.
    needs_future : bool
        Whether it reads what later queries attend to: it can be replayed, and never run live.
    """

    name: ClassVar[str]
    needs_future: ClassVar[bool] = False

    @abstractmethod
    def admission(self, context: "Context") -> Admission:
        """Say which positions of the trace in `context` are promoted; its groups are of kind ``head``."""


ADMISSIONS: dict[str, type[Admit]] = {}

register = registrar(ADMISSIONS, "admissions")
"""Makes an admission available to ``admit=`` under its `name`."""


def check_window(name: str, window: int) -> None:
    """Refuse a window without the query's own position."""
    if window < 1:
        raise PolicyError(f"window of {name!r} must be at least 1 token, the query's own, got {window}")


def check_share(name: str, argument: str, share: float) -> None:
    """Refuse a share outside [0, 1]."""
    if not 0 <= share <= 1:
        raise PolicyError(f"{argument} of {name!r} must be in [0, 1], got {share}")


def first_positions(context: "Context", sink: int) -> npt.NDArray[np.bool_]:
    """Mark the first `sink` positions of every group, [G, L0+T]."""
    marks = np.zeros((context.groups.count, context.trace.num_positions), dtype=np.bool_)
    marks[:, :sink] = True
    return marks
