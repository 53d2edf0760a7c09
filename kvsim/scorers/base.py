"""Base class of scorers, the values of the ``score=`` axis."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvsim.plan import ScoreSource
from kvsim.registry import registrar

if TYPE_CHECKING:
    from kvsim.context import Context

__all__ = ["SCORERS", "Scorer", "register"]


class Scorer(ABC):
    """What a token is worth to one step; subclasses are frozen dataclasses whose fields are its arguments."""

    name: ClassVar[str]

    @abstractmethod
    def source(self, context: "Context") -> ScoreSource:
        """Say where the scores come from on the trace in `context`."""


SCORERS: dict[str, type[Scorer]] = {}

register = registrar(SCORERS, "scorers")
"""Makes a scorer available to ``score=`` under its `name`."""
