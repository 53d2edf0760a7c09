"""Base class of selections, the values of the ``select=`` axis."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvsim.admission import Admission, Selection
from kvsim.registry import registrar

if TYPE_CHECKING:
    from kvsim.context import Context

__all__ = ["SELECTIONS", "Select", "register"]


class Select(ABC):
    """Which visible positions a query reads; subclasses are frozen dataclasses whose fields are its arguments."""

    name: ClassVar[str]

    @abstractmethod
    def selection(self, context: "Context", admission: Admission | None) -> Selection:
        """Say what is read on the trace in `context`, under what the plan admits."""


SELECTIONS: dict[str, type[Select]] = {}

register = registrar(SELECTIONS, "selections")
"""Makes a selection available to ``select=`` under its `name`."""
