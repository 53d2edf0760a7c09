"""Key norm."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.knorm import KNormScore


@register
@dataclass(frozen=True)
class KNorm(Preset):
    """Keep the keys of the smallest norm, head by head (Devoto et al., 2024)."""

    name: ClassVar[str] = "knorm"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=KNormScore(), group="head")
