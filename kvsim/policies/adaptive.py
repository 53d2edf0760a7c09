"""An EMA whose alpha follows what it sees: the paper's two attempts, and one that asks for the direction."""

import dataclasses
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from kvsim.context import Context
from kvsim.control import Control
from kvsim.controls.disagreement import Disagreement
from kvsim.controls.noise import Noise
from kvsim.controls.tracking import Tracking
from kvsim.errors import PolicyError, unknown_name
from kvsim.head import Rule, register
from kvsim.plan import Plan
from kvsim.policies.ema import Ema

_TAKES = {
    "noise": ("warmup",),
    "disagreement": ("threshold", "share", "low", "high"),
    "tracking": ("beta", "low", "high"),
}
_COMMON = ("how", "over", "start")


@register
@dataclass(frozen=True)
class Adaptive(Rule):
    """An EMA that chooses its alpha while it runs, causally: one alpha for the whole model (InertiaKV Appendix H).

    Where each layer or head is a retention group of its own, the alpha follows the average over groups.

    Attributes
    ----------
    how : {"noise", "disagreement", "tracking"}
        ``noise``: noise and drift of the first `warmup` scored steps settle alpha for the rest, by Eq. 5 as we read it
        (`kvsim.controls.noise`). ``disagreement``: `low` at steps whose ranking differs from the state's by more than
        `threshold`, else `high` (`kvsim.controls.disagreement`). ``tracking``: lower the longer the state's errors
        keep their direction, higher where they cancel: Trigg and Leach's tracking signal (`kvsim.controls.tracking`).
    over : {"both", "step"}
        As in `ema`. With ``both`` alpha is, in a group of many layers, the weight of the layers far more than memory.
    start : float
        Alpha while nothing is known, in [0, 1).
    warmup : int
        ``noise``: scored steps that are watched, at least 2.
    threshold : float
        ``disagreement``: 1 - Jaccard from which on alpha is `low`, in [0, 1].
    share : float
        ``disagreement``: share of the budget that is compared, in (0, 1].
    beta : float
        ``tracking``: weight of the newest error, in (0, 1).
    low, high : float
        ``disagreement``, ``tracking``: the lowest and the highest alpha, in [0, 1).
    """

    name: ClassVar[str] = "adaptive"
    how: Literal["noise", "disagreement", "tracking"] = "tracking"
    over: Literal["both", "step"] = field(default="both", kw_only=True)
    start: float = field(default=0.8, kw_only=True)
    warmup: int = field(default=10, kw_only=True)
    threshold: float = field(default=0.3, kw_only=True)
    share: float = field(default=0.5, kw_only=True)
    beta: float = field(default=0.2, kw_only=True)
    low: float = field(default=0.3, kw_only=True)
    high: float = field(default=0.95, kw_only=True)

    def __post_init__(self) -> None:
        if self.how not in _TAKES:
            raise unknown_name("how of 'adaptive'", self.how, _TAKES)
        if self.over not in ("both", "step"):
            raise unknown_name("over of 'adaptive'", self.over, ("both", "step"))
        takes = _COMMON + _TAKES[self.how]
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            if own.name not in takes and value != own.default:
                raise PolicyError(f"'adaptive:{self.how}' does not take {own.name} (it takes {', '.join(takes[1:])})")
            if isinstance(value, float):
                # Minus zero is zero, and must print like it.
                object.__setattr__(self, own.name, value + 0.0)
        for name in ("start", "low", "high"):
            if not 0 <= getattr(self, name) < 1:
                raise PolicyError(f"{name} of 'adaptive' must be in [0, 1), got {getattr(self, name)}")
        if self.low > self.high:
            raise PolicyError(f"low of 'adaptive' must be at most high, got {self.low} and {self.high}")
        if self.warmup < 2:
            raise PolicyError(f"warmup of 'adaptive' must be at least 2 steps, got {self.warmup}")
        if not 0 <= self.threshold <= 1:
            raise PolicyError(f"threshold of 'adaptive' must be in [0, 1], got {self.threshold}")
        if not 0 < self.share <= 1:
            raise PolicyError(f"share of 'adaptive' must be in (0, 1], got {self.share}")
        if not 0 < self.beta < 1:
            raise PolicyError(f"beta of 'adaptive' must be in (0, 1), got {self.beta}")

    def control(self) -> Control:
        """Give what chooses alpha."""
        rule = Ema(self.start, over=self.over)
        if self.how == "noise":
            return Noise(rule, self.warmup)
        if self.how == "disagreement":
            return Disagreement(rule, self.threshold, self.share, self.low, self.high)
        return Tracking(rule, self.beta, self.low, self.high)

    def plan(self, context: Context) -> Plan:
        """See `Rule.plan`."""
        return replace(Ema(self.start, over=self.over).plan(context), control=self.control())
