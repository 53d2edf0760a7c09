"""The pages by name; each module has `TITLE` and ``show(view)``."""

from typing import Any

from kvsim_explorer.pages import alpha, compare, heads, oracle, scorers, text, trace
from kvsim_explorer.pages import map as map_page

__all__ = ["PAGES"]

PAGES: dict[str, Any] = {
    "trace": trace,
    "text": text,
    "map": map_page,
    "compare": compare,
    "alpha": alpha,
    "heads": heads,
    "scorers": scorers,
    "oracle": oracle,
}
"""Name, which is the path in the URL, and module of each page, in the order of the menu."""
