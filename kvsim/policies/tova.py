"""TOVA."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.head import Preset, register
from kvsim.policies.single import Single
from kvsim.policy import Policy


@register
@dataclass(frozen=True)
class Tova(Preset):
    """Token omission via attention: each layer keeps what its last query attends to (Oren et al., 2024)."""

    name: ClassVar[str] = "tova"

    def expand(self) -> Policy:
        """See `Preset.expand`."""
        return Policy(Single(), group="layer")
