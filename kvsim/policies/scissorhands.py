"""ScissorHands."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.window import Window
from kvsim.policy import Policy
from kvsim.scorers.pivotal import Pivotal


@register
@dataclass(frozen=True)
class ScissorHands(Preset):
    """Keep the tokens that were pivotal in most of the last queries, head by head (Liu et al., 2023).

    Attributes
    ----------
    history : int
        Queries over which being pivotal is counted; as many recent tokens stay, as far as the budget reaches.
    """

    name: ClassVar[str] = "scissorhands"
    history: int = 32

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Window(self.history), score=Pivotal(), group="head")
