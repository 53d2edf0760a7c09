"""The pages by name; each module has `TITLE` and ``show(view)``."""

from typing import Any

from kvsim_explorer.pages import text, trace

__all__ = ["PAGES"]

PAGES: dict[str, Any] = {"trace": trace, "text": text}
"""Name, which is the path in the URL, and module of each page, in the order of the menu."""
