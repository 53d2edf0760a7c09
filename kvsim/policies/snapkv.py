"""SnapKV."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvsim.head import Preset, register
from kvsim.policies.window import Window
from kvsim.policy import Policy
from kvsim.scorers.attention import Attention
from kvsim.when import When


@register
@dataclass(frozen=True)
class SnapKV(Preset):
    """Keep what the prompt's last queries attend to, max-pooled, head by head, once after prefill (Li et al., 2024).

    Attributes
    ----------
    window_size : int
        Queries of the observation window, which itself stays.
    kernel : int
        Positions that the max-pooling spans (odd).
    heads : {"mean", "max"}
        How the query heads of a KV head are combined.
    """

    name: ClassVar[str] = "snapkv"
    window_size: int = 64
    kernel: int = field(default=5, kw_only=True)
    heads: Literal["mean", "max"] = field(default="mean", kw_only=True)

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        rule = Window(self.window_size, pool=self.kernel, start="prompt")
        return Policy(rule, score=Attention(heads=self.heads), group="head", when=When("prefill"))
