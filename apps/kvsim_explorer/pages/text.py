"""The text: the prompt and the generation as tokens, coloured by what became of them or by attention."""

import operator
from functools import partial
from typing import Any

import streamlit as st
from kvsim_traces import Trace, TraceError

from kvsim import KvsimError, Result, charts
from kvsim.attending import Attended, Shading, attention_of, attention_on, shade
from kvsim.fates import Fates, Given, fates_of, given_to, table_of
from kvsim.plan import FloatArray
from kvsim.ranges import read_positions, write_positions
from kvsim.result import mean_of
from kvsim.states import states_after
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import result_of
from kvsim_explorer.reproduce import command, reproduce
from kvsim_explorer.show import show_chart, table_files
from kvsim_explorer.tokens.tokens import KEY, draw, live_data, static_data
from kvsim_explorer.view import View
from kvsim_explorer.work import worked

__all__ = ["TITLE", "show"]

TITLE = "Text"

KEPT, SHOWN = "text kept", "text shown"
MEAN = "of the group"
MOST_ROWS = 500
SECONDS = 1.5
STATE_FACTOR = 4
STORED_PER_SECOND, COMPUTED_PER_SECOND = 3e8, 2.5e7
"""Attention numbers read, and computed from queries and keys, in a second; the reference engine is slower."""


def show(view: View) -> None:
    """Show the tokens, what left at the step, and the attention on selected tokens."""
    st.header(literal(f"{view.trace.path.name}: {view.text_of(view.policy)}"))
    if not view.trace.has("text"):
        st.warning(f"The recording has no text; {'positions' if view.trace.tokens is None else 'ids'} are shown.")
    result = result_of(view)
    if result.plan.rescue is not None:
        st.info("Tokens that this policy rescues for good while it runs are shown as kept, not as protected.")
    how = "shadow mode: nothing is evicted, sets can return" if view.shadow else "irreversible; open loop"
    st.caption(f"{how}; kept mass, churn and tokens held are those of `kvsim replay`, step by step")
    _part(view, result)


@st.fragment
def _part(view: View, result: Result) -> None:
    try:
        _show(view, result)
    except (KvsimError, TraceError) as error:
        st.error(literal(str(error)))


def _show(view: View, result: Result) -> None:
    trace, groups = view.trace, result.plan.groups
    with st.container(horizontal=True, vertical_alignment="bottom"):
        group = 0
        if groups.count > 1:
            labels = [groups.label(one) for one in range(groups.count)]
            label = st.selectbox("Group", labels, key="group", bind="query-params", width=200)
            group = labels.index(label)
        colour = st.segmented_control(
            "Colour by",
            ["fate", "attention"],
            default="fate",
            required=True,
            key="colour",
            bind="query-params",
            help="What became of each token, or the attention of the selected ones, summed.",
        )
        with_states = st.toggle(
            "State m",
            key="state",
            bind="query-params",
            help="What the policy ranks by, after the step: the reference engine runs up to there.",
        )
        layers = [MEAN, *(f"of layer {one}" for one in range(trace.num_layers))]
        chosen = st.selectbox("Attention", layers, key="layer", bind="query-params", width=180)
    layer = None if chosen == MEAN else layers.index(chosen) - 1
    step, selected = _step(trace), _selected(trace)
    tokens, below = st.container(), st.container()
    with below:
        fates = _fates(result, result.key, group)
        given = _given(view, fates)
        values, shading = _shading(trace, fates, selected, layer, colour)
        states = _states(view, result, fates, step) if with_states else None
        _left(trace, fates, given, states, step)
        if selected:
            _received(view, fates, selected, layer)
        else:
            st.info("Select tokens above to see the attention that they get together, step by step.")
        _reproduce(view, fates, step, selected, layer, with_states=with_states)
    with tokens:
        static = _static(trace, result, fates, given, (*result.key.values(), group, given is not None))
        written = write_positions(selected)
        live = live_data(trace, step, written, colour, values=values, shading=shading, states=states)
        draw(static, live, partial(_moved, trace.num_steps), _chosen)


def _step(trace: Trace) -> int:
    """Give the step that the URL names, and else the last one."""
    text = _of_url("step")
    return min(int(text), trace.num_steps) if text.isdecimal() else trace.num_steps


def _selected(trace: Trace) -> list[int]:
    before = st.session_state.get(SHOWN)
    st.session_state[SHOWN] = trace.hash
    if before not in (None, trace.hash):
        _to_url("selected", "")
    try:
        return read_positions(_of_url("selected"), trace.num_positions)
    except KvsimError as error:
        st.error(literal(f"selected: {error}"))
        return []


def _of_url(name: str) -> str:
    """Give a parameter of the URL; one that a visit to another page has dropped is put back."""
    kept: dict[str, str] = st.session_state.setdefault(KEPT, {})
    if name in st.query_params:
        kept[name] = st.query_params[name]
    elif name in kept:
        st.query_params[name] = kept[name]
    return kept.get(name, "")


def _to_url(name: str, value: str) -> None:
    kept: dict[str, str] = st.session_state.setdefault(KEPT, {})
    if value:
        kept[name] = st.query_params[name] = value
    else:
        kept.pop(name, None)
        st.query_params.pop(name, None)


def _moved(last: int) -> None:
    step = st.session_state[KEY].get("step")
    _to_url("step", "" if step is None or step == last else str(operator.index(step)))


def _chosen() -> None:
    _to_url("selected", str(st.session_state[KEY].get("selected") or ""))


@st.cache_resource(max_entries=32, show_spinner=False)
def _fates(_result: Result, key: dict[str, str], group: int) -> Fates:
    return fates_of(_result, group)


@st.cache_resource(max_entries=8, show_spinner="Writing the tokens")
def _static(_trace: Trace, _result: Result, _fates: Fates, _given: Given | None, key: tuple[Any, ...]) -> bytes:
    return static_data(_trace, _result, _fates, _given)


def _given(view: View, fates: Fates) -> Given | None:
    trace = view.trace
    depth = fates.groups.depth
    key = "given", trace.hash, fates.policy, fates.mode, fates.group
    label = "Summing the attention that each token gets"
    return worked(key, label, lambda tell: given_to(fates, trace, progress=tell), ask=_seconds(trace, depth) > SECONDS)


def _seconds(trace: Trace, layers: int, steps: int | None = None) -> float:
    """Estimate how long it takes to read the attention of some layers and steps."""
    rate = COMPUTED_PER_SECOND if trace.capture in ("qk", "qkv") else STORED_PER_SECOND
    heads = 1 if trace.capture == "scores" else trace.num_heads
    return (steps or trace.num_steps) * layers * heads * trace.num_positions / rate


def _shading(
    trace: Trace, fates: Fates, selected: list[int], layer: int | None, colour: str
) -> tuple[FloatArray | None, Shading | None]:
    """Give the attention of the selected tokens that were generated."""
    if colour != "attention":
        return None, None
    asking = [position for position in selected if position >= trace.prompt_length]
    if not asking:
        st.info("Select generated tokens to colour by their attention; prompt tokens have no recorded queries.")
        return None, None
    depth = 1 if layer is not None else fates.groups.depth
    key = "attention of", trace.hash, fates.groups, fates.group, write_positions(asking), layer

    def work(tell: Any) -> FloatArray:
        return attention_of(trace, asking, layer, fates=fates)

    long = _seconds(trace, depth, len(asking)) > SECONDS
    values = worked(key, "Summing the attention of the selected tokens", work, ask=long)
    if len(asking) < len(selected):
        st.caption(f"{len(selected) - len(asking)} selected prompt tokens have no recorded queries and add nothing.")
    return (None, None) if values is None else (values, shade(values))


def _states(view: View, result: Result, fates: Fates, step: int) -> FloatArray | None:
    """Give the group's state after the step, NaN for tokens that the step did not see."""
    trace = view.trace
    key = "states", trace.hash, fates.policy, fates.mode, step
    long = _seconds(trace, len(trace.eligible_layers), step + 1) * STATE_FACTOR > SECONDS
    label = f"Running the reference engine to step {step}"
    states = worked(key, label, lambda tell: states_after(result, trace, step, progress=tell), ask=long)
    return None if states is None else states[fates.group]


def _left(trace: Trace, fates: Fates, given: Given | None, states: FloatArray | None, step: int) -> None:
    import polars as pl

    frame = _table(trace, fates, given, (trace.hash, fates.policy, fates.mode, fates.group, given is not None))
    out = frame[fates.left(step)]
    if given is not None:
        out = out.sort("mass_later", descending=True, maintain_order=True)
    what = "Evicted" if fates.mode == "irreversible" else "Left the set"
    st.subheader(f"{what} at step {step}: {out.height:,} {'token' if out.height == 1 else 'tokens'}", anchor=False)
    st.caption(
        f"{fates.label}; mass: full-cache attention over all steps; mass_later: the part of it from queries that could "
        "not see the token any more, by which the rows are sorted."
        + (f" The first {MOST_ROWS} rows; the files of the group hold all." if out.height > MOST_ROWS else "")
    )
    if states is not None:
        out = out.with_columns(m=pl.Series(states[out["position"].to_numpy()]).fill_nan(None))
    # A newline on its own, or blanks, cannot be seen in a cell.
    seen = [pl.col("token").map_elements(repr, pl.String)] if "token" in out.columns else []
    st.dataframe(out.head(MOST_ROWS).with_columns(seen), key="table left", hide_index=True)
    for name, table, about in (("left", out, "These tokens"), ("tokens", frame, "All tokens of the group")):
        with st.container(horizontal=True, vertical_alignment="center", key=f"files {name}"):
            st.caption(about, width=180)
            table_files(table, name)


@st.cache_resource(max_entries=8, show_spinner=False)
def _table(_trace: Trace, _fates: Fates, _given: Given | None, key: tuple[Any, ...]) -> Any:
    return table_of(_fates, _trace, _given)


def _received(view: View, fates: Fates, selected: list[int], layer: int | None) -> None:
    import polars as pl

    trace = view.trace
    depth = 1 if layer is not None else fates.groups.depth
    key = "attention on", trace.hash, fates.policy, fates.mode, fates.group, write_positions(selected), layer

    def work(tell: Any) -> Attended:
        return attention_on(trace, selected, layer, fates=fates, progress=tell)

    found = worked(key, "Summing the attention on the selected tokens", work, ask=_seconds(trace, depth) > SECONDS)
    if found is None:
        return
    table = pl.DataFrame({"step": range(1, trace.num_steps + 1), "full": found.full})
    summary = (
        f"The {len(selected)} selected tokens get {mean_of(found.full) or 0:.4f} of a step's attention with the full "
        "cache, on average over the steps at which any is there"
    )
    if found.visible is not None:
        table = table.with_columns(visible=pl.Series(found.visible))
        summary += f"; under the policy ({fates.label}) queries still see {mean_of(found.visible) or 0:.4f} of it"
    chart = charts.attention_received(found, trace, layer=layer, fates=fates)
    show_chart(chart, "received", f"{summary}.", table.fill_nan(None))


def _reproduce(
    view: View, fates: Fates, step: int, selected: list[int], layer: int | None, *, with_states: bool
) -> None:
    policy, written = view.text_of(view.policy), write_positions(selected)
    own = ["--budget", str(view.budget), *["--shadow"] * view.shadow]
    group = ["--group", str(fates.group)]
    words = [
        command("replay", "--trace", view.location, "--policy", policy, *own, "--out", "replayed"),
        command("analyze", "tokens", policy, "--trace", view.location, *group, "--step", str(step), *own),
    ]
    lines = f"""
import kvsim
from kvsim.fates import fates_of, given_to, table_of

trace = kvsim.open_trace({view.location!r})
result = kvsim.replay(trace, {str(view.policy)!r}, shadow={view.shadow})
fates = fates_of(result, {fates.group})
table = table_of(fates, trace, given_to(fates, trace))
result.steps[{max(0, step - 1)}], table[fates.left({step})]
"""
    if with_states:
        lines += f"""
from kvsim.states import states_after

states_after(result, trace, {step})[{fates.group}]
"""
    if selected:
        at = [] if layer is None else ["--layer", str(layer)]
        of = ["--positions", written, *at, "--policy", policy, *group]
        words.append(command("chart", "received", "--trace", view.location, *of, *own, "--out", "received.html"))
        lines += f"""
import kvsim.charts
from kvsim.attending import attention_of, attention_on, shade
from kvsim.ranges import read_positions

positions = read_positions({written!r}, trace.num_positions)
shade(attention_of(trace, positions, {layer}, fates=fates))
kvsim.charts.attention_received(attention_on(trace, positions, {layer}, fates=fates), trace, layer={layer}, fates=fates)
"""
    reproduce(*words, python=lines)
