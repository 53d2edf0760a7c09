"""Attention sinks and a local window."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvsim.admission import Admission
from kvsim.admissions.base import SINK, WINDOW, Admit, check_window, first_positions, register
from kvsim.context import Context
from kvsim.errors import PolicyError


@register
@dataclass(frozen=True)
class Local(Admit):
    """Admit the first positions alone: local attention with sinks, the same in every head (StreamingLLM).

    Attributes
    ----------
    window : int
        Recent positions that every query sees.
    sink : int
        Positions at the start of the sequence that are admitted.
    """

    name: ClassVar[str] = "local"
    window: int = field(default=WINDOW, kw_only=True)
    sink: int = field(default=SINK, kw_only=True)

    def __post_init__(self) -> None:
        check_window(self.name, self.window)
        if self.sink < 0:
            raise PolicyError(f"sink of 'local' must be 0 or more, got {self.sink}")

    def admission(self, context: Context) -> Admission:
        """See `Admit.admission`."""
        return Admission(self.window, first_positions(context, self.sink))
