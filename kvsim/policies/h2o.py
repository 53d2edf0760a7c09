"""H2O."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.cumulative import Cumulative
from kvsim.policy import Policy
from kvsim.protect import Protect


@register
@dataclass(frozen=True)
class H2O(Preset):
    """Heavy hitters: cumulative attention from the prompt on, half of the budget recent (Zhang et al., 2023)."""

    name: ClassVar[str] = "h2o"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Cumulative(start="prompt"), group="head", protect=Protect(recent="50%"))
