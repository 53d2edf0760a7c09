"""Text that comes from files and addresses: shown as it is, never as Markdown, which could fetch pictures."""

import re

__all__ = ["literal"]

_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~$:&])")


def literal(text: str) -> str:
    """Escape all that Markdown would read as markup."""
    return _MARKUP.sub(r"\\\1", text)
