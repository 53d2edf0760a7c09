"""A plain sliding window."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.recency import Recency


@register
@dataclass(frozen=True)
class RecencyOnly(Preset):
    """Keep the most recent tokens: StreamingLLM without its sinks."""

    name: ClassVar[str] = "recency"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=Recency())
