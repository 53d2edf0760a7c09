"""The pages by name; each module has `TITLE` and ``show(view)``."""

from typing import Any

from kvsim_explorer.pages import alpha, heads, oracle, scorers, text, trace

__all__ = ["PAGES"]

PAGES: dict[str, Any] = {
    "trace": trace,
    "text": text,
    "alpha": alpha,
    "heads": heads,
    "scorers": scorers,
    "oracle": oracle,
}
"""Name, which is the path in the URL, and module of each page, in the order of the menu."""
