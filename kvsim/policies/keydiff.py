"""KeyDiff."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.keydiff import KeyDiffScore


@register
@dataclass(frozen=True)
class KeyDiff(Preset):
    """Keep the keys that differ most from the mean key, head by head (Park et al., 2025)."""

    name: ClassVar[str] = "keydiff"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=KeyDiffScore(), group="head")
