"""InertiaKV and its two cheaper forms."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.ema import Ema
from kvsim.policy import Policy


@register
@dataclass(frozen=True)
class InertiaKV(Preset):
    """EMA 0.8 over layers and steps, scored at every step (InertiaKV section 3.1)."""

    name: ClassVar[str] = "inertiakv"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Ema(0.8))


@register
@dataclass(frozen=True)
class InertiaKVLazy(Preset):
    """InertiaKV scored at the first step and every r-th after it (Eq. 6).

    Attributes
    ----------
    r : int
        Steps between two refreshes.
    """

    name: ClassVar[str] = "inertiakv-lazy"
    r: int = 4

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Ema(0.8), refresh=self.r)


@register
@dataclass(frozen=True)
class ScoreFree(Preset):
    """InertiaKV scored at the first step only (section 3.2, Score-Free decoding)."""

    name: ClassVar[str] = "score-free"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Ema(0.8), refresh="first")
