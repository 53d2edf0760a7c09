"""Who is retained when: a map of positions and steps, and a window of it in finer bins."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import streamlit as st
from altair.utils import schemapi

from kvsim import Result, Trace, charts
from kvsim_explorer.replays import raw_policy, result_of
from kvsim_explorer.reproduce import command, policy_options, reproduce
from kvsim_explorer.show import frame_of, show_chart
from kvsim_explorer.view import View

__all__ = ["TITLE", "show"]

TITLE = "Map"

PANELS = {"raw": "the raw top-B", "irreversible": "the policy", "shadow": "the policy in shadow mode"}
ORDERS = "position", "utility"
ALL_GROUPS = "all, averaged"
DRAWN, MOVES = "map drawn", "map moves"
"""The window that the overview is drawn with, and how often sliders or the button set it: brushing must not redraw the
overview, and after a move the old brush must be gone."""

Range = tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """What the map shows.

    Attributes
    ----------
    panels : list of str
        Of `PANELS`, in that order.
    sort : {"position", "utility"}
        Order of the columns.
    group : int or None
        One retention group, or the mean over all.
    positions, steps : (int, int)
        As `kvsim.charts.retention` takes them.
    """

    panels: list[str]
    sort: Literal["position", "utility"]
    group: int | None
    positions: Range
    steps: Range


def show(view: View) -> None:
    """Show the overview of the chosen policy, and the window chosen in it."""
    st.header("Which positions are retained")
    st.caption(
        f"`{view.text_of(view.policy)}` beside the raw top-B: what the full cache attends to most at each step. "
        "Drag over the overview, or move the sliders, to see a part in finer bins."
    )
    _body(view, result_of(view))


@st.fragment
def _body(view: View, own: Result) -> None:
    trace = view.trace
    panels, sort, group = _choose(own, [name for name in PANELS if name != "shadow" or not view.policy.admits])
    place = st.container()
    positions, steps = _sliders(trace)
    choice = Choice(panels, sort, group, positions, steps)
    utility = _utility(trace, trace.hash) if sort == "utility" else None
    order: dict[str, Any] = {"sort": sort, "utility": utility, "group": group}
    if panels:
        _show_window(view, choice, order)
    else:
        st.info("Choose what is drawn: the raw top-B, the policy, or the policy in shadow mode.")
    # Last, because whoever moves a slider looks at the window.
    with place:
        _show_overview(view, own, order)


def _show_window(view: View, choice: Choice, order: dict[str, Any]) -> None:
    results = [_result(view, panel) for panel in choice.panels]
    part = {**order, "positions": choice.positions, "steps": choice.steps}
    summary = _summary(choice, [charts.retained_shares(one, **part)[0] for one in results])
    # Altair checks each part of a chart against its schema, which takes longer than to make it.
    with schemapi.debug_mode(False):
        drawn = charts.retention(results, **part)
    show_chart(drawn, "retention", summary, lambda: frame_of(charts.retention_rows(results, **part)))
    _reproduce(view, results, choice)


def _choose(own: Result, offered: list[str]) -> tuple[list[str], Literal["position", "utility"], int | None]:
    groups, group = own.plan.groups, None
    with st.container(horizontal=True):
        chosen = st.pills(
            "Drawn",
            offered,
            selection_mode="multi",
            default=offered,
            key="panels",
            bind="query-params",
            help=f"raw: {PANELS['raw']}; irreversible: {PANELS['irreversible']}; shadow: {PANELS['shadow']}.",
        )
        sort = st.segmented_control(
            "Columns by",
            ORDERS,
            default="position",
            required=True,
            key="sort",
            bind="query-params",
            help="By position, or by utility: the full cache's attention to it, averaged over layers, heads and steps.",
        )
        if groups.count > 1:
            labels = [groups.label(index) for index in range(groups.count)]
            label = st.selectbox("Groups", [ALL_GROUPS, *labels], key="group", bind="query-params", width=220)
            group = labels.index(label) if label in labels else None
    return [name for name in offered if name in chosen], "utility" if sort == "utility" else "position", group


def _sliders(trace: Trace) -> tuple[Range, Range]:
    """Show the window; the position slider's values are edges of columns, those of the other are steps."""
    whole = (0, trace.num_positions), (1, trace.num_steps)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        first, end = st.slider(
            "Columns, from and to before",
            *whole[0],
            whole[0],
            key="positions",
            bind="query-params",
            on_change=_moved,
            width=420,
        )
        steps = whole[1]
        if trace.num_steps > 1:
            steps = st.slider(
                "Steps, from and to", *whole[1], whole[1], key="steps", bind="query-params", on_change=_moved, width=320
            )
        st.button("Whole map", on_click=_reset, args=whole)
    first = min(first, end - 1) if end else 0
    window = (first, max(end, first + 1)), steps
    if st.session_state.get(DRAWN, ())[:1] != (st.session_state.get(MOVES, 0),):
        st.session_state[DRAWN] = st.session_state.get(MOVES, 0), None if window == whole else window
    return window


def _moved() -> None:
    st.session_state[MOVES] = st.session_state.get(MOVES, 0) + 1


def _reset(positions: Range, steps: Range) -> None:
    st.session_state["positions"] = positions
    if "steps" in st.session_state:
        st.session_state["steps"] = steps
    _moved()


def _show_overview(view: View, own: Result, order: dict[str, Any]) -> None:
    share = charts.retained_shares(own, **order)[0]
    kept = "" if share is None else f", {share:.1%} of all"
    summary = f"The whole map of {view.text_of(view.policy)}, {own.mode}{kept}, in coarse bins."
    moves, window = st.session_state[DRAWN]
    with schemapi.debug_mode(False):
        drawn = charts.retention_overview(own, window=window, **order)
    show_chart(drawn, "overview", summary, on_select=lambda: _brushed(view.trace, moves), key=_key(moves))


def _key(moves: int) -> str:
    return f"chart overview {moves}"


def _brushed(trace: Trace, moves: int) -> None:
    """Set the sliders to what was brushed; what brushes nothing, or comes from an overview that is gone, does not."""
    brushed = st.session_state[_key(moves)].selection.get("window") or {}
    if moves != st.session_state.get(MOVES, 0) or not {"x", "y"} <= brushed.keys():
        return
    x, y = sorted(brushed["x"]), sorted(brushed["y"])
    first = max(0, min(math.floor(x[0]), trace.num_positions - 1))
    st.session_state["positions"] = first, max(first + 1, min(math.ceil(x[1]), trace.num_positions))
    if trace.num_steps > 1:
        start = max(1, min(math.floor(y[0]), trace.num_steps))
        st.session_state["steps"] = start, max(start, min(math.ceil(y[1]) - 1, trace.num_steps))


@st.cache_resource(max_entries=8, show_spinner="Averaging the full cache's attention")
def _utility(_trace: Trace, trace_hash: str) -> Any:
    return charts.reference_utility(_trace)


def _result(view: View, panel: str) -> Result:
    if panel == "raw":
        return result_of(view, raw_policy(view.policy).with_budget(view.budget), shadow=True)
    return result_of(view, shadow=panel == "shadow")


def _summary(choice: Choice, shares: list[float | None]) -> str:
    told = [
        f"{PANELS[panel]}: " + ("nothing is there yet" if share is None else f"{share:.1%}")
        for panel, share in zip(choice.panels, shares, strict=True)
    ]
    first, end = choice.positions
    columns = "positions" if choice.sort == "position" else "ranks by reference utility"
    return (
        f"What is retained of {columns} {first:,} to {end - 1:,} after steps {choice.steps[0]:,} to "
        f"{choice.steps[1]:,}: {'; '.join(told)}."
    )


def _reproduce(view: View, results: list[Result], choice: Choice) -> None:
    raw, own = "raw" in choice.panels, [name for name in choice.panels if name != "raw"]
    policies, modes = [view.policy], ["--raw"] * raw
    if not own:
        policies, modes = [raw_policy(view.policy).with_budget(view.budget)], ["--shadow"]
    elif len(own) == 2:
        modes.append("--both")
    elif own == ["shadow"]:
        modes.append("--shadow")
    (first, end), (start, last) = choice.positions, choice.steps
    words = ["--trace", view.location, *policy_options(view, policies), *modes]
    words += ["--sort", choice.sort, "--positions", f"{first}-{end - 1}", "--steps", f"{start}-{last}"]
    words += [] if choice.group is None else ["--group", str(choice.group)]
    replays = "\n".join(f"    kvsim.replay(trace, {one.policy!r}, shadow={one.mode == 'shadow'})," for one in results)
    by = ', sort="utility", utility=kvsim.charts.reference_utility(trace)' if choice.sort == "utility" else ""
    by += "" if choice.group is None else f", group={choice.group}"
    reproduce(
        command("chart", "retention", *words, "--out", "map.html"),
        python=f"""
import kvsim, kvsim.charts

trace = kvsim.open_trace({view.location!r})
results = [
{replays}
]
kvsim.charts.retention(results, positions=({first}, {end}), steps=({start}, {last}){by})
""",
    )
