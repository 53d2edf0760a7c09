"""Policy strings in narrow columns: they break before a "/" first, and within words last."""

import re

from rich.console import Console, JustifyMethod, OverflowMethod
from rich.containers import Lines
from rich.text import Text

__all__ = ["PolicyText", "fold"]


class PolicyText(Text):
    """Text without markup that folds as `fold` does."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """See `rich.text.Text.wrap`."""
        folded = Text("\n".join(fold(self.plain, width)), style=self.style)
        return folded.wrap(console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap)


def fold(policy: str, width: int) -> list[str]:
    """Cut a policy string into lines: before axes, then after ``,`` ``+`` or ``:``; longer words stay whole.

    Parameters
    ----------
    policy : str
        The string.
    width : int
        Most characters of a line.
    """
    lines = [""]
    for axis in re.split(r"(?=/)", policy):
        pieces = [axis] if len(axis) <= width else re.split(r"(?<=[,+:])", axis)
        for piece in pieces:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append("")
            lines[-1] += piece
    return lines
