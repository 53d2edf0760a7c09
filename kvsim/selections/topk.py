"""The oracle of selections."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.admission import Admission, Selection
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.selections.base import Select, register


@register
@dataclass(frozen=True)
class TopK(Select):
    """Read the visible positions with the highest attention, averaged over the KV head's query heads.

    No other choice of as many positions has a higher kept mass, and finding it means reading all of them: what
    `quest` and its like aim at.

    Attributes
    ----------
    tokens : int
        Positions that a KV head reads in a step.
    """

    name: ClassVar[str] = "topk"
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise PolicyError(f"tokens of 'topk' must be at least 1, got {self.tokens}")

    def selection(self, context: Context, admission: Admission | None) -> Selection:
        """See `Select.selection`."""
        return Selection("topk", self.tokens)
