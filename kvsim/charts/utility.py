"""The chart of what single tokens get from single heads."""

import altair as alt
import numpy as np
from kvsim_traces import Trace

from kvsim.charts.intake import thinned
from kvsim.charts.style import GREY, MAX_ROWS, PARTS, WIDTH, embed, heading, layered, number, panel_title
from kvsim.errors import KvsimError
from kvsim.token_display import display
from kvsim.utility import TokenUtility

__all__ = ["utility_of_tokens"]

MOST_PANELS = 36
MOST_POINTS = 200
TICKS = [0, 0.001, 0.01, 0.1, 1]


def utility_of_tokens(found: TokenUtility, trace: Trace) -> alt.VConcatChart:
    """Draw the attention that tokens get from heads over the steps: a row a head, a column a token (WG-KV Fig. 3).

    The vertical scale is linear up to a thousandth and logarithmic above, so that a tenth and a thousandth can both be
    seen; the dashed line is what every token would get of attention spread evenly. Of long runs bins of steps are
    drawn, with their means.

    Parameters
    ----------
    found : TokenUtility
        From `kvsim.utility.token_utility`.
    trace : Trace
        The recording.

    Raises
    ------
    KvsimError
        If there are more than 36 panels.
    """
    panels = len(found.heads) * len(found.positions)
    if panels > MOST_PANELS:
        raise KvsimError(
            f"a chart holds {MOST_PANELS} panels, got {len(found.heads)} heads x {len(found.positions)} tokens"
        )
    most = max(10, min(MOST_POINTS, MAX_ROWS // panels))
    words = display(trace)
    highest = float(np.nanmax(found.received)) if not np.isnan(found.received).all() else 1.0
    scale = alt.Scale(type="symlog", constant=0.001, domain=[0, max(highest, 2 * float(found.even.max()))], nice=False)
    rows, told = [], []
    for p, (layer, head) in enumerate(found.heads):
        row = []
        for n, position in enumerate(found.positions):
            values = found.received[p, n]
            mean = float(np.nanmean(values)) if not np.isnan(values).all() else 0.0
            word = words[position].text.replace("\n", "").strip() or "␣"
            name = f"layer {layer} head {head}, token {position} ‘{word}’"
            told.append(f"{name}: mean {mean:.3g}")
            edges = p == len(found.heads) - 1, n == 0
            row.append(
                _panel(found, p, n, most, scale, edges).properties(title=panel_title(f"{name}: mean {mean:.2g}"))
            )
        rows.append(alt.hconcat(*row, spacing=16))
    title = heading(
        "Attention that tokens get",
        found.trace_name,
        "full cache; logarithmic scale above 0.001; dashed: attention spread evenly over all positions",
    )
    chart: alt.VConcatChart = alt.vconcat(*rows, title=title, spacing=14)
    return chart.properties(description="Attention that tokens get from heads. " + "; ".join(told))


def _panel(
    found: TokenUtility, p: int, n: int, most: int, scale: alt.Scale, edges: tuple[bool, bool]
) -> alt.LayerChart:
    lowest, leftmost = edges
    steps = np.arange(1, found.received.shape[2] + 1)
    rows, size = thinned(steps, found.received[p, n], most)
    even, _ = thinned(steps, found.even, most)
    level = {row["step"]: row["value"] for row in even}
    points = [{"step": row["step"], "value": row["value"], "even": level[row["step"]]} for row in rows]
    name = "decode step t" + (f" (means of {size} steps)" if size > 1 else "")
    limits = alt.Scale(domain=[1, max(2, int(steps[-1]))], nice=False)
    x = alt.X(**number("step", name if lowest else None, scale=limits, format="d"))
    y = alt.Y(
        **number(
            "value",
            "share of the attention" if leftmost else None,
            scale=scale,
            format="~g",
            values=TICKS,
            labelOverlap=False,
        )
    )
    tips = [alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title="share", format=".3g")]
    base = alt.Chart(embed(points)).encode(x=x, y=y, tooltip=tips)
    area = base.mark_area(color=PARTS[1], opacity=0.55)
    line = base.mark_line(
        color=PARTS[0], point=alt.OverlayMarkDef(color=PARTS[0], size=10) if len(points) < 60 else False
    )
    spread = base.mark_line(color=GREY, strokeDash=[5, 4]).encode(y="even:Q")
    return layered(area, line, spread, width=WIDTH / max(1, min(2, len(found.positions))), height=110)
