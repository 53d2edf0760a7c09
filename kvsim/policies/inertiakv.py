"""InertiaKV, its two cheaper forms, and the paper's auxiliary variant."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.ema import Ema
from kvsim.policies.rescue import Rescue
from kvsim.policy import Policy
from kvsim.protect import Protect


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


@register
@dataclass(frozen=True)
class InertiaKVAux(Preset):
    """InertiaKV with a static reserve and first-eviction rescue, the variant its App. B argues against.

    The paper gives no sizes: here the reserve is the first four tokens and the most recent tenth of the budget, and
    another tenth is rescued (`rescue`).
    """

    name: ClassVar[str] = "inertiakv-aux"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Rescue(0.8), protect=Protect(sink=4, recent="10%"))
