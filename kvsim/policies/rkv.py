"""R-KV."""

from dataclasses import dataclass, field
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.window import Window
from kvsim.policy import Policy
from kvsim.scorers.rkv import RKVScore


@register
@dataclass(frozen=True)
class RKV(Preset):
    """Keep what the last queries attend to and other keys do not repeat, head by head (Cai et al., 2025).

    Evicts after every step; the authors' code lets 128 tokens gather first (``when=overflow`` is near to that), and
    takes the maximum over query heads before the softmax, this one after it.

    Attributes
    ----------
    window_size : int
        Queries whose attention counts, and most recent tokens that stay.
    kernel : int
        Positions that the max-pooling of the attention spans (odd).
    mix : float
        Weight of importance against redundancy, the paper's lambda.
    """

    name: ClassVar[str] = "rkv"
    window_size: int = 8
    kernel: int = field(default=7, kw_only=True)
    mix: float = field(default=0.07, kw_only=True)

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        rule = Window(self.window_size, pool=self.kernel, start="prompt")
        return Policy(rule, score=RKVScore(self.mix), group="head")
