"""StreamingLLM."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.protect import Protect
from kvsim.scorers.recency import Recency


@register
@dataclass(frozen=True)
class Streaming(Preset):
    """Attention sinks plus a sliding window: the first tokens and the most recent ones (Xiao et al., 2024).

    Attributes
    ----------
    n_sink : int
        Sink tokens at the start of the sequence.
    """

    name: ClassVar[str] = "streaming"
    n_sink: int = 4

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=Recency(), protect=Protect(sink=self.n_sink))
