"""KVzip."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.nonuniform import NonUniform
from kvsim.policy import Policy
from kvsim.protect import Protect
from kvsim.scorers.kvzip import KVzipScore
from kvsim.when import When


@register
@dataclass(frozen=True)
class KVzip(Preset):
    """Keep what the model needs to repeat its prompt, once after prefill, whichever head holds it (Kim et al., 2025).

    Budgets differ from head to head and average to B. The first four tokens stay, as in kvpress; the authors keep the
    whole system prompt.
    """

    name: ClassVar[str] = "kvzip"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(NonUniform(), score=KVzipScore(), group="head", protect=Protect(sink=4), when=When("prefill"))
