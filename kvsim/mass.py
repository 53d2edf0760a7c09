"""What a recording's queries give to each position, as a retention group sees it."""

from collections.abc import Sequence

import numpy as np
from kvsim_traces import Trace

from kvsim.plan import FloatArray, Groups

__all__ = ["group_rows"]


def group_rows(trace: Trace, groups: Groups, step: int, which: Sequence[int] | None = None) -> FloatArray:
    """Give a step's full-cache attention, averaged over each group's layers and heads.

    Parameters
    ----------
    trace : Trace
        The recording.
    groups : Groups
        The retention groups.
    step : int
        Step t, from 1.
    which : sequence of int, optional
        The groups wanted, ascending; all by default. Layers that they do not have are not read.

    Returns
    -------
    array
        [G, L0 + t]; a `scores` capture has no heads to choose from and gives its head means.
    """
    heads_known = trace.capture != "scores"
    spans = [groups.members(g) for g in (range(groups.count) if which is None else which)]
    low = min(layers.start or 0 for layers, _, _ in spans)
    high = max(len(groups.layers) if layers.stop is None else layers.stop for layers, _, _ in spans)
    read = trace.attention_rows if heads_known else trace.score_rows
    rows = read(step, list(groups.layers[low:high])).astype(np.float64)
    means = np.empty((len(spans), rows.shape[-1]))
    for mean, (layers, heads, _) in zip(means, spans, strict=True):
        own = rows if layers.start is None else rows[layers.start - low : layers.stop - low]
        mean[:] = (own[:, heads].mean(axis=1) if heads_known else own).mean(axis=0)
    return means
