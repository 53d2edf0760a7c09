"""Expected Attention."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.expected import Expected
from kvsim.when import When


@register
@dataclass(frozen=True)
class ExpectedAttention(Preset):
    """Keep what queries to come are expected to attend to, head by head, once after prefill (Devoto et al., 2025)."""

    name: ClassVar[str] = "expected"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=Expected(), group="head", when=When("prefill"))
