"""How much of what one policy retains another retains too."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from kvsim.anatomy import Anatomy
from kvsim.charts.intake import policy_labels, told_apart
from kvsim.charts.lines import step_chart
from kvsim.charts.style import heading
from kvsim.errors import KvsimError

__all__ = ["jaccard"]


def jaccard(found: Anatomy | Sequence[Anatomy]) -> alt.LayerChart:
    """Draw the Jaccard index of each policy's retained sets with the first policy's, over the steps.

    Parameters
    ----------
    found : Anatomy or sequence of Anatomy
        From `kvsim.anatomy.dissect`; of several recordings, but with the same first policy.

    Raises
    ------
    KvsimError
        If there is none, or their first policies or modes differ.
    """
    many = [found] if isinstance(found, Anatomy) else list(found)
    if not many:
        raise KvsimError("nothing to draw: no comparison of policies")
    first, mode = many[0].policies[0], many[0].mode
    if any((one.policies[0], one.mode) != (first, mode) for one in many):
        raise KvsimError("one chart compares policies with one other, in one mode; these comparisons have several")
    labels = policy_labels(policy for one in many for policy in one.policies)
    traces = told_apart({one.trace_hash: one.trace_name for one in many})
    lines = {}
    for one in many:
        beside = f", {traces[one.trace_hash]}" if len(traces) > 1 else ""
        for pair in one.pairs:
            lines[labels[pair.b] + beside] = np.arange(1, pair.jaccard.size + 1), pair.jaccard
    loops = " and ".join("live" if loop == "live" else f"{loop} loop" for loop in many[0].loops)
    how = "irreversible" if mode == "irreversible" else "shadow mode: nothing is evicted"
    names = list(dict.fromkeys(one.trace_name for one in many))
    title = heading(
        f"Overlap with {first}",
        ", ".join(names) if len(names) < 4 else f"{len(names)} recordings",
        f"{how}; {loops}; mean over retention groups; 1: the same sets",
    )
    # The first policy's own look stays free, so that the others have theirs in charts of all of them.
    return step_chart(lines, title, "Jaccard of the retained sets", scale=alt.Scale(domain=[0, 1]), skip=1)
