"""The chart of the attention that some tokens get together."""

import altair as alt
import numpy as np
from kvsim_traces import Trace

from kvsim.attending import Attended
from kvsim.charts.lines import step_chart
from kvsim.charts.style import heading
from kvsim.fates import Fates
from kvsim.ranges import write_positions

__all__ = ["attention_received"]

MOST_WRITTEN = 60


def attention_received(
    attended: Attended, trace: Trace, *, layer: int | None = None, fates: Fates | None = None
) -> alt.LayerChart:
    """Draw the attention that positions get together over the steps, and what of it a policy's cache still showed.

    Parameters
    ----------
    attended : Attended
        From `kvsim.attending.attention_on`.
    trace : Trace
        The recording.
    layer, fates
        As they were given there.
    """
    steps = np.arange(1, attended.full.size + 1)
    lines = {"full cache": (steps, attended.full)}
    whose = ""
    if attended.visible is not None and fates is not None:
        lines["visible to the policy"] = (steps, attended.visible)
        shadow = "; shadow mode: nothing is evicted" if fates.mode == "shadow" else ""
        whose = f"policy: {fates.policy}{shadow}"
    written = write_positions(attended.positions)
    if len(written) > MOST_WRITTEN:
        written = f"{written[:MOST_WRITTEN].rpartition(',')[0]},… ({len(attended.positions)} in all)"
    whole = "all layers" if fates is None else fates.label
    where = f"mean over the query heads of {whole if layer is None else f'layer {layer}'}"
    title = heading("Attention received by the chosen tokens", f"{trace.path.name}; positions {written}", where, whose)
    return step_chart(lines, title, "share of the step's attention", scale=alt.Scale(zero=True), legend="cache")
