"""LagKV."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy
from kvsim.scorers.lagkv import LagKVScore
from kvsim.when import When


@register
@dataclass(frozen=True)
class LagKV(Preset):
    """Keep in each stretch of the prompt what varies most against the next stretch, head by head, once after prefill.

    Liang et al., 2025; the paper also compresses what is generated, stretch by stretch, which this does not.

    Attributes
    ----------
    lag_size : int
        Positions in a stretch.
    """

    name: ClassVar[str] = "lagkv"
    lag_size: int = 128

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), score=LagKVScore(self.lag_size), group="head", when=When("prefill"))
