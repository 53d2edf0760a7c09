"""Charts of how a cache grows, and of how often it must be cut."""

from collections.abc import Iterable, Sequence

import altair as alt
import numpy as np

from kvsim.charts.families import families_of
from kvsim.charts.intake import Rows, policy_labels, rows_of, thinned, told_apart, with_values
from kvsim.charts.style import (
    COLOURS,
    GREY,
    MAX_ROWS,
    PARTS,
    WIDTH,
    Row,
    embed,
    heading,
    layered,
    number,
    panel_title,
    stacked,
)
from kvsim.errors import KvsimError
from kvsim.footprint import Footprint

__all__ = ["cache_growth", "eviction_triggers"]

MOST_POINTS = 200
MOST_BARS = 40


def cache_growth(footprints: Footprint | Sequence[Footprint]) -> alt.VConcatChart:
    """Draw what each step's query sees, one panel a policy: the area is the attended pairs (WG-KV Fig. 2b).

    Triangles mark the steps after which anything was evicted; the dashed line is the cache that keeps everything. Of
    long runs bins of steps are drawn, with their means; a bin with a trigger is marked once.

    Parameters
    ----------
    footprints : Footprint or sequence of Footprint
        From `kvsim.footprint.footprint`.

    Raises
    ------
    KvsimError
        If there is none, one has no step, or there are too many.
    """
    many = [footprints] if isinstance(footprints, Footprint) else list(footprints)
    if not many or not all(one.num_steps for one in many):
        raise KvsimError("nothing to draw: the growth of a cache needs a run of at least one step")
    most = min(MOST_POINTS, MAX_ROWS // (3 * len(many)))
    if most < 10:
        raise KvsimError(f"a chart holds the growth of {MAX_ROWS // 30} runs, got {len(many)}")
    labels = policy_labels(one.policy for one in many)
    traces = told_apart({one.trace_hash: one.trace_name for one in many})
    size = max(-(-one.num_steps // most) for one in many)
    top = max(one.prompt_length + one.num_steps for one in many)
    panels, told = [], []
    for one in many:
        where = f", {traces[one.trace_hash]}" if len(traces) > 1 else ""
        counts = f"evicts in {one.triggers} step{'s' * (one.triggers != 1)}" if one.triggers else "never evicts"
        share = f"{one.attended_share:.1%} of the full cache's attended pairs"
        panels.append(
            _growth(one, most, top, size, one is many[-1]).properties(
                title=panel_title(f"{labels[one.policy]}{where}: {counts}; {share}")
            )
        )
        told.append(f"{labels[one.policy]}{where}: {counts}, {share}")
    names = list(traces.values())
    title = heading(
        "Growth of the cache",
        ", ".join(names) if len(names) < 4 else f"{len(names)} recordings",
        "area: attended pairs; triangles: steps that evict; dashed: the full cache",
        _how(one.loop for one in many),
    )
    chart = stacked(panels, title, "x", "y")
    return chart.properties(description="Tokens that each step's query sees. " + "; ".join(told))


def _growth(one: Footprint, most: int, top: int, size: int, last: bool) -> alt.LayerChart:
    steps = np.arange(1, one.num_steps + 1)
    seen, full = one.attended[1:] / one.heads, one.full[1:] / one.heads
    rows, _ = thinned(steps, seen, most)
    whole, width = thinned(steps, full, most)
    fired = np.add.reduceat(one.triggered[1:] > 0, np.arange(0, one.num_steps, width)) > 0
    marks = [{"step": row["step"], "value": row["value"]} for row, on in zip(rows, fired, strict=True) if on]
    lines = [
        {"step": row["step"], "value": row["value"], "full": full["value"]}
        for row, full in zip(rows, whole, strict=True)
    ]
    name = "decode step t" + (f" (means of {size} steps)" if size > 1 else "")
    x = alt.X(**number("step", name if last else None, scale=alt.Scale(zero=False, nice=False), format="d"))
    scale = alt.Scale(domain=[0, top * 1.04], nice=False)
    y = alt.Y(**number("value", "tokens seen, mean over heads", scale=scale, titleFontSize=10))
    tips = [alt.Tooltip("step:Q"), alt.Tooltip("value:Q", title="tokens seen", format=".5g")]
    base = alt.Chart(embed(lines)).encode(x=x, y=y, tooltip=tips)
    layers = [
        base.mark_area(color=PARTS[1], opacity=0.55),
        base.mark_line(color=PARTS[0], strokeWidth=1.8),
        base.mark_line(color=GREY, strokeDash=[6, 4], strokeWidth=1.2).encode(y="full:Q"),
    ]
    if marks:
        points = alt.Chart(embed(marks)).mark_point(
            filled=True, shape="triangle-down", size=34, color=COLOURS[2], opacity=1, yOffset=-6
        )
        layers.append(points.encode(x=x, y=y, tooltip=["step:Q"]))
    return layered(*layers, width=WIDTH, height=130)


def eviction_triggers(rows: Rows) -> alt.VConcatChart:
    """Draw cache size and number of eviction triggers, a bar a policy in the order given (WG-KV Fig. 16).

    Policies that differ in numbers of their axes alone are named by these; a tick shows the largest size.

    Parameters
    ----------
    rows : rows
        ``policy``, ``tokens_of_a_head`` and ``peak_tokens_of_a_head`` (mean over steps and largest, per layer and KV
        head), ``triggers``; as ``Footprint.summary()`` gives. Several recordings are averaged.

    Raises
    ------
    KvsimError
        If a column is missing, or there are more than 40 policies.
    """
    sizes = ("tokens_of_a_head", "peak_tokens_of_a_head")
    table = with_values(rows_of(rows, "policy", *sizes, "triggers"), *sizes, "triggers")
    policies = list(dict.fromkeys(row["policy"] for row in table))
    if len(policies) > MOST_BARS:
        raise KvsimError(f"a chart of triggers holds {MOST_BARS} policies, got {len(policies)}")
    names, family = _names(policies)
    parameter = "policy" if family is None else "setting"
    points: list[Row] = []
    for policy in policies:
        own = [row for row in table if row["policy"] == policy]
        values = {name: float(np.mean([row[name] for row in own])) for name in (*sizes, "triggers")}
        points.append({"series": names[policy], **values})
    order = [names[policy] for policy in policies]
    base = alt.Chart(embed(points))
    axis = alt.Axis(labelLimit=0, titleLimit=0, maxExtent=2000)
    y = alt.Y("series:N", sort=order, scale=alt.Scale(domain=order), title=parameter, axis=axis)
    bare = alt.Y("series:N", sort=order, scale=alt.Scale(domain=order), title=None, axis=alt.Axis(labels=False))
    size = number("tokens_of_a_head", "tokens of a head", scale=alt.Scale(zero=True), format="~s", tickCount=5)
    tips = [
        alt.Tooltip("series:N", title=parameter),
        alt.Tooltip("tokens_of_a_head:Q", title="mean", format=".5g"),
        alt.Tooltip("peak_tokens_of_a_head:Q", title="largest", format=".5g"),
        alt.Tooltip("triggers:Q", format=".4g"),
    ]
    bars = base.mark_bar(color=PARTS[1]).encode(y=y, x=alt.X(**size), tooltip=tips)
    largest = alt.X("peak_tokens_of_a_head:Q", title="tokens of a head")
    ticks = base.mark_tick(color=PARTS[0], thickness=2.5, size=14).encode(y=y, x=largest, tooltip=tips)
    count = number("triggers", "steps that evict", scale=alt.Scale(zero=True), tickMinStep=1, tickCount=5)
    fired = base.mark_bar(color=PARTS[3]).encode(y=bare, x=alt.X(**count), tooltip=tips)
    written = base.mark_text(dx=4, align="left", fontSize=10)
    written = written.encode(y=bare, x=alt.X("triggers:Q"), text=alt.Text("triggers:Q", format=".4~g"))
    height = 22 * len(order)
    left = layered(bars, ticks, width=WIDTH // 2, height=height, title=panel_title("Cache size; tick: the largest"))
    right = layered(fired, written, width=WIDTH // 2, height=height, title=panel_title("Eviction triggers"))
    traces = list(dict.fromkeys(str(row.get("trace", "")) for row in table))
    note = traces[0] if len(traces) == 1 else f"mean of {len(traces)} recordings"
    title = heading(
        "Cache size and eviction triggers", note, family or "", _how(str(row.get("loop", "open")) for row in table)
    )
    told = "; ".join(f"{p['series']}: {p['tokens_of_a_head']:.4g} tokens, {p['triggers']:.3g} triggers" for p in points)
    chart = stacked([alt.hconcat(left, right, spacing=24)], title)
    return chart.properties(description=f"Cache size and eviction triggers. {family or 'Policies'}: {told}")


def _how(loops: Iterable[str]) -> str:
    return "irreversible; " + " and ".join(
        "live" if loop == "live" else f"{loop} loop" for loop in dict.fromkeys(loops)
    )


def _names(policies: Sequence[str]) -> tuple[dict[str, str], str | None]:
    """Name policies of one family by the numbers in which they differ, others by themselves; and give the family."""
    families = families_of(policies)
    if len(policies) > 1 and len({family for family, _ in families.values()}) == 1:
        return {policy: values for policy, (_, values) in families.items()}, next(iter(families.values()))[0]
    return policy_labels(policies), None
