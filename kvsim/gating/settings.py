"""How gates are trained; imports no torch."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from kvsim.errors import KvsimError

__all__ = ["FORMS", "INSTRUCTION", "Settings", "numbers"]

INSTRUCTION = "Please analyze and summarize the following text:\n\n"
"""Put before every sample, as WG-KV's Appendix C does."""

FORMS = ("auto", "plain", "flex")


@dataclass(frozen=True)
class Settings:
    """How a write gate is trained (WG-KV section 3.3 and Appendix C).

    Attributes
    ----------
    penalty : float
        The weight lambda of sparsity.
    window : int
        Tokens W of the local window.
    tau : float
        The threshold that the gate is meant for, and that progress reports the cache size of.
    steps : int
        Updates.
    batch : int
        Samples in an update.
    length : int
        Tokens of a sample, the instruction included.
    learning_rate, weight_decay : float
        Of AdamW; the rate rises linearly over the first `warmup` of the updates and falls along a cosine to 0.
    warmup : float
        Share of the updates.
    hidden : int or None
        Hidden units of a head's network; None for what makes the gates 0.4% of the model's parameters.
    held_out : int
        Samples, the last ones, that are not trained on, where no other text is held out.
    taus : tuple of float
        Thresholds of the validation.
    instruction : str
        Put before every sample.
    attention : {"auto", "plain", "flex"}
        How write-gated attention is computed; auto is flex on a GPU and plain elsewhere.
    checkpointing : bool
        Compute a layer's activations again on the way back instead of keeping them.
    checkpoint_every : int
        Updates from one checkpoint to the next; 0 for none.
    max_tokens : int
        A run over more tokens than this is refused.
    seed : int
        Seed of the initial numbers and of the order of the samples.
    """

    penalty: float = 0.08
    window: int = 256
    tau: float = 0.1
    steps: int = 500
    batch: int = 1
    length: int = 4096
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup: float = 0.1
    hidden: int | None = None
    held_out: int = 4
    taus: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    instruction: str = INSTRUCTION
    attention: str = "auto"
    checkpointing: bool = False
    checkpoint_every: int = 20
    max_tokens: int = 6_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "steps", "batch", "length", "held_out", "max_tokens"):
            if getattr(self, name) < 1:
                raise KvsimError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.hidden is not None and self.hidden < 1:
            raise KvsimError(f"hidden must be at least 1, got {self.hidden}")
        for name in ("penalty", "weight_decay", "tau", "checkpoint_every", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise KvsimError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise KvsimError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        if not 0 <= self.warmup <= 1:
            raise KvsimError(f"warmup must be between 0 and 1, got {self.warmup}")
        if not self.taus or not all(0 <= tau < math.inf for tau in self.taus):
            raise KvsimError(f"taus must be one or more thresholds of at least 0, got {list(self.taus)}")
        if self.attention not in FORMS:
            raise KvsimError(f"attention must be one of {', '.join(FORMS)}, got {self.attention!r}")
        if self.tokens > self.max_tokens:
            raise KvsimError(
                f"{self.steps} steps of {self.batch} x {self.length} tokens are {self.tokens:,}, more than max_tokens "
                f"({self.max_tokens:,}); take fewer steps or raise it"
            )

    @property
    def tokens(self) -> int:
        """Tokens of all updates."""
        return self.steps * self.batch * self.length

    def rate(self, step: int) -> float:
        """Give the learning rate of update `step`, counted from 0."""
        rising = math.ceil(self.warmup * self.steps)
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, self.steps - rising)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def facts(self) -> dict[str, Any]:
        """Give the settings as JSON data."""
        return asdict(self) | {"taus": list(self.taus)}


def numbers(text: str, option: str) -> tuple[float, ...]:
    """Read numbers with commas between them.

    Raises
    ------
    KvsimError
        If it is something else.
    """
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise KvsimError(f"{option} {text}: must be numbers with commas between them, as in 0.05,0.1") from None
    if not all(0 <= number < math.inf for number in found):
        raise KvsimError(f"{option} {text}: numbers must be at least 0 and finite")
    return found
