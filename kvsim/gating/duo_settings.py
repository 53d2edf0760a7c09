"""How retrieval heads are found; imports no torch."""

import math
from dataclasses import dataclass

from kvsim.errors import KvsimError
from kvsim.gating.settings import FORMS

__all__ = ["DuoSettings"]


@dataclass(frozen=True)
class DuoSettings:
    """How retrieval heads are found.

    Attributes
    ----------
    penalty : float
        The weight lambda of the sum of all alphas.
    sink, window : int
        What a streaming head sees: its first tokens and the last ones.
    steps : int
        Updates, one sample each.
    samples : int
        How many there are.
    length : int
        The most tokens of a sample, the answer's included.
    task : str
        One of `kvsim.tasks.TASKS` that hides values.
    learning_rate : float
        Of AdamW, without weight decay; it rises linearly over the first fifth of the updates and falls over the last.
    attention, checkpointing, seed
        As in `kvsim.gating.settings.Settings`.
    """

    penalty: float = 0.05
    sink: int = 128
    window: int = 256
    steps: int = 300
    samples: int = 64
    length: int = 4096
    task: str = "niah_multivalue"
    learning_rate: float = 0.02
    attention: str = "auto"
    checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "steps", "samples", "length"):
            if getattr(self, name) < 1:
                raise KvsimError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("penalty", "sink", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise KvsimError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.sink + self.window >= self.length:
            raise KvsimError(
                f"a sink of {self.sink} and a window of {self.window} see all of a sample of {self.length} tokens, so "
                "no heads can be told apart; make them smaller or length larger"
            )
        if not 0 < self.learning_rate < math.inf:
            raise KvsimError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        if self.attention not in FORMS:
            raise KvsimError(f"attention must be one of {', '.join(FORMS)}, got {self.attention!r}")

    def rate(self, step: int) -> float:
        """Give the learning rate of update `step`, counted from 0."""
        ramp = max(1, self.steps // 5)
        return self.learning_rate * min(1.0, (step + 1) / ramp, (self.steps - step) / ramp)
