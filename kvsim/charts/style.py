"""How every chart looks, and what may be embedded in one.

A chart is read in print and by people who see no hue: lines differ by dash and point shape as well as by colour, and
areas by lightness. Colours of lines are Okabe and Ito's, in an order of alternating lightness.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import altair as alt

from kvsim.errors import KvsimError

__all__ = ["COLOURS", "DASHES", "HEIGHT", "MAX_ROWS", "PARTS", "SEQUENTIAL", "SHAPES", "WIDTH"]

MAX_ROWS = 5000
"""The most rows of data that one chart embeds; functions aggregate what is more."""

WIDTH, HEIGHT = 520, 260
"""Pixels of a panel."""

SEQUENTIAL = ("#f1f1ec", "#c8d6e5", "#93b1d1", "#5c8abb", "#2f649c", "#173f73", "#08204a")
"""Colours of a number, from the lowest to the highest; lightness falls from each to the next."""

PARTS = ("#1f3b63", "#7d9cc4", "#d5dfeb", "#b0895a", "#5c4322", "#eadfce")
"""Fills of the parts of a stack; neighbours differ in lightness."""

COLOURS = ("#000000", "#0072b2", "#d55e00", "#56b4e9", "#7a3e8e", "#009e73", "#cc79a7", "#b07d00")
DASHES = ([1, 0], [8, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 2], [8, 3, 2, 3, 2, 3])
SHAPES = (
    "circle",
    "square",
    "triangle-up",
    "diamond",
    "cross",
    "triangle-down",
    "triangle-right",
    "triangle-left",
    "M0,-1.1L0.27,-0.37L1.05,-0.34L0.43,0.14L0.65,0.89L0,0.45L-0.65,0.89L-0.43,0.14L-1.05,-0.34L-0.27,-0.37Z",
    "M-1,-0.8L1,0.8L1,-0.8L-1,0.8Z",
    "M-1.1,-0.35L1.1,-0.35L1.1,0.35L-1.1,0.35Z",
    "M-0.8,-1L0.8,1L-0.8,1L0.8,-1Z",
    "M-0.35,-1.1L0.35,-1.1L0.35,1.1L-0.35,1.1Z",
)
"""Point shapes; the last five are a star, a bow tie, a flat bar, an hourglass and an upright bar."""

GREY = "#6b6b6b"
MARKS = 10
"""About how many points mark a long line."""

Row = dict[str, Any]


class Embedded(alt.InlineData):
    """Data that a chart carries with it; copies of a chart, which Altair makes many of, share it.

    Made by `embed` alone, which has checked every value; the whole chart is validated when it is written.
    """

    _class_is_valid_at_instantiation: ClassVar[bool] = False

    def __deepcopy__(self, memo: Any = None) -> "Embedded":
        """See `copy.deepcopy`."""
        return self


def embed(rows: Iterable[Mapping[str, Any]]) -> alt.InlineData:
    """Turn rows into data that a chart carries with it; numbers are rounded to six significant digits.

    Raises
    ------
    KvsimError
        If there are more than `MAX_ROWS`, none at all, or a number is not finite or missing.
    """
    values = [{name: _plain(name, value) for name, value in row.items()} for row in rows]
    if not values:
        raise KvsimError("nothing to draw: no row has a value")
    if len(values) > MAX_ROWS:
        raise KvsimError(f"a chart holds {MAX_ROWS} rows, got {len(values)}; draw fewer policies or recordings at once")
    return Embedded(values=values)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, str | bool):
        return value
    if value is None or not math.isfinite(value):
        raise KvsimError(f"column {name!r}: {value} cannot be drawn")
    if float(value).is_integer():
        return int(value)
    return float(f"{value:.6g}")


def shades(title: str, domain: Sequence[float] | None = None, *, kind: Any = "linear", **legend: Any) -> dict[str, Any]:
    """Give the colour encoding of a heat map: its scale and legend."""
    limits: dict[str, Any] = {} if domain is None else {"domain": list(domain)}
    scale = alt.Scale(type=kind, range=list(SEQUENTIAL), interpolate="lab", clamp=True, **limits)
    return {"scale": scale, "legend": alt.Legend(title=title, labelLimit=0, titleLimit=0, gradientLength=120, **legend)}


def distinct(series: Sequence[str], title: str, skip: int = 0) -> dict[str, Any]:
    """Give the encodings that tell series apart: colour, dash and point shape, with one legend for the three.

    The first `skip` looks are left to series of other charts.
    """
    legend = alt.Legend(
        title=title,
        labelLimit=0,
        titleLimit=0,
        symbolStrokeWidth=0,
        symbolOpacity=1,
        symbolSize=70,
        orient="right",
        columns=1,
    )
    found: dict[str, Any] = {}
    for channel, values, of in (
        ("color", COLOURS, alt.Color),
        ("strokeDash", DASHES, alt.StrokeDash),
        ("shape", SHAPES, alt.Shape),
    ):
        chosen: list[Any] = [values[(skip + index) % len(values)] for index in range(len(series))]
        scale = alt.Scale(domain=list(series), range=chosen)
        found[channel] = of("series:N", sort=list(series), scale=scale, legend=legend)
    return found


def marked(count: int, index: int) -> list[bool]:
    """Say which of a line's points carry its shape: all of a short line; of long ones few, not at the same places."""
    if count <= 2 * MARKS:
        return [True] * count
    stride = count // MARKS
    start = (index * 3) % stride
    return [place % stride == start for place in range(count)]


def number(field: str, title: str | None, *, scale: alt.Scale | None = None, **axis: Any) -> dict[str, Any]:
    """Give a quantitative position encoding with a whole title."""
    return {
        "shorthand": f"{field}:Q",
        "title": title,
        "scale": alt.Scale(zero=False, nice=True) if scale is None else scale,
        "axis": alt.Axis(titleLimit=0, labelLimit=0, labelFlush=False, grid=True, gridColor="#e6e6e6", **axis),
    }


def heading(text: str, *notes: str) -> alt.TitleParams:
    """Give a title and the small print below it, one line a note."""
    lines = [note for note in notes if note]
    return alt.TitleParams(text=text, subtitle=lines, anchor="start", subtitleColor=GREY, offset=10, limit=0)


def panel_title(text: str) -> alt.TitleParams:
    """Give the title of one panel among several."""
    return alt.TitleParams(text=text, anchor="start", fontSize=11, offset=4, limit=0)


def layered(*charts: alt.Chart | alt.LayerChart, **properties: Any) -> alt.LayerChart:
    """Draw charts on top of one another."""
    return alt.LayerChart(layer=list(charts), **properties)


def stacked(
    panels: Sequence[alt.Chart | alt.LayerChart | alt.HConcatChart], title: alt.TitleParams, *shared: str
) -> alt.VConcatChart:
    """Draw charts below one another; the scales of the channels `shared` are common to them."""
    chart: alt.VConcatChart = alt.vconcat(*panels, title=title, spacing=12)
    if shared:
        common: dict[str, Any] = dict.fromkeys(shared, "shared")
        chart = chart.resolve_scale(**common)
    return chart
