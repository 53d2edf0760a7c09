"""Quest."""

from dataclasses import dataclass
from typing import ClassVar

from kvsim.admission import Admission, Selection
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.selections.base import Select, register

PAGE = 16


@register
@dataclass(frozen=True)
class Quest(Select):
    """Read the pages whose keys could have the highest logit, 16 tokens a page (Quest); needs a qk capture.

    Pages are consecutive visible positions. A page is worth the sum over dimensions of ``max(q * min, q * max)`` of its
    keys, which no logit of the page exceeds, at its highest over the KV head's query heads. The newest token's page is
    always read; under ``admit=`` the local window is, and counts, and the pages are those of the positions before it.

    Attributes
    ----------
    tokens : int
        Positions that a KV head reads in a step, a multiple of 16.
    """

    name: ClassVar[str] = "quest"
    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < PAGE or self.tokens % PAGE:
            raise PolicyError(f"tokens of 'quest' must be whole pages of {PAGE}, at least one, got {self.tokens}")

    def selection(self, context: Context, admission: Admission | None) -> Selection:
        """See `Select.selection`."""
        for array in ("queries", "keys"):
            if not context.trace.has(array):
                context.trace.stored(array)
        if admission is not None and self.tokens < min(admission.window, context.trace.num_positions):
            raise PolicyError(
                f"{context.policy}: quest reads {self.tokens} tokens, fewer than the local window of "
                f"{admission.window}, which is always read"
            )
        return Selection("quest", self.tokens, PAGE)
