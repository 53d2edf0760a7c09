"""Charts in notebooks: live where a notebook can draw Vega-Lite, and as a picture everywhere else."""

import base64
from typing import Any

import altair as alt

from kvsim.charts.files import can_draw

__all__ = ["in_notebooks"]

SCALE = 1.25
MIME = f"application/vnd.vegalite.{alt.SCHEMA_VERSION.split('.')[0]}+json"


def in_notebooks() -> None:
    """Show charts as Vega-Lite with a PNG beside it, which is what viewers without JavaScript, GitHub's say, show.

    Without the extra ``charts`` there is no PNG.
    """
    alt.renderers.register("kvsim", _render)
    alt.renderers.enable("kvsim")


def _render(spec: dict[str, Any], **_: Any) -> dict[str, Any]:
    found: dict[str, Any] = {MIME: spec, "text/plain": _title(spec)}
    if can_draw():
        import vl_convert

        png = vl_convert.vegalite_to_png(spec, scale=SCALE)
        found["image/png"] = base64.b64encode(png).decode()
    return found


def _title(spec: dict[str, Any]) -> str:
    title = spec.get("title", {})
    lines = [title.get("text", "chart"), *title.get("subtitle", [])] if isinstance(title, dict) else [str(title)]
    return "\n".join(lines)
