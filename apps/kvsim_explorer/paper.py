"""Charts on a page: black on white in both themes, as wide as there is room, with the legend below."""

import textwrap
from typing import Any

import streamlit as st

__all__ = ["is_narrow", "notice_width", "on_paper"]

NARROW = 1000
"""Pixels of a window from which on charts of several panels have their full width."""

PANEL, NARROW_PANEL = 600, 380
"""Pixels of a panel among several, which cannot follow the window."""

LETTERS, NARROW_LETTERS = 110, 72
"""Letters in a line of a title."""

_INK = {"labelColor": "#1a1a1a", "titleColor": "#1a1a1a"}
_PAPER: dict[str, Any] = {
    "background": "#ffffff",
    "title": {"color": "#1a1a1a"},
    "axis": _INK,
    "legend": _INK,
    "header": _INK,
}

_LISTEN = f"""
export default function ({{ setStateValue }}) {{
  const tell = () => setStateValue("narrow", window.innerWidth < {NARROW});
  // Said while the component is being mounted, it would not be heard.
  if (window.innerWidth < {NARROW}) setTimeout(tell, 100);
  const query = window.matchMedia("(max-width: {NARROW - 1}px)");
  query.addEventListener("change", tell);
  return () => query.removeEventListener("change", tell);
}}
"""
_width = st.components.v2.component("kvsim_width", js=_LISTEN)


def notice_width() -> None:
    """Learn whether the window is narrow; the page runs again when that changes."""
    _width(key="window", default={"narrow": False}, on_narrow_change=lambda: None)


def is_narrow() -> bool:
    """Whether the window is narrow, as far as is known."""
    state = st.session_state.get("window")
    return bool(state and state.get("narrow"))


def on_paper(spec: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """Fit a chart's Vega-Lite to the page, in place.

    Parameters
    ----------
    spec : dict
        From a chart's ``to_dict()``. A single view is made as wide as its place; panels get a width of their own.
    narrow : bool
        Whether the window is narrow.
    """
    config = spec.setdefault("config", {})
    for name, value in _PAPER.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    spec["padding"] = dict.fromkeys(("left", "top", "right", "bottom"), 8)
    _lay_legends(spec, columns=1 if narrow else 3)
    _wrap(spec.get("title"), NARROW_LETTERS if narrow else LETTERS)
    if "vconcat" in spec or "hconcat" in spec:
        _narrow_panels(spec, NARROW_PANEL if narrow else PANEL)
    elif "width" in spec:
        spec |= {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}}
    return spec


def _wrap(title: Any, letters: int) -> None:
    """Break the lines of a title that are longer than the page is wide."""
    if isinstance(title, dict):
        for name in ("text", "subtitle"):
            given = title.get(name, [])
            lines = [given] if isinstance(given, str) else given
            title[name] = [part for line in lines for part in textwrap.wrap(line, letters) or [line]]


def _lay_legends(part: Any, columns: int) -> None:
    """Put every legend below, symbols in so many columns."""
    if isinstance(part, list):
        for one in part:
            _lay_legends(one, columns)
    elif isinstance(part, dict):
        for name, value in part.items():
            if name == "legend" and isinstance(value, dict):
                value["orient"] = "bottom"
                if "gradientLength" not in value:
                    value["columns"] = columns
            elif name not in ("data", "datasets"):
                _lay_legends(value, columns)


def _narrow_panels(spec: dict[str, Any], width: int) -> None:
    for row in spec.get("vconcat", ()):
        _narrow_panels(row, width)
    beside = spec.get("hconcat", ())
    for one in beside:
        _narrow_panels(one, width // len(beside))
    if isinstance(spec.get("width"), int | float):
        spec["width"] = width
