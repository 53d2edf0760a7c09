"""Scorers: how far each one's ranking is from attention's, layer by layer."""

from typing import Any

import streamlit as st

from kvsim import Trace, charts
from kvsim.spectrum import READINGS, Spectrum, half_depth, spectrum
from kvsim_explorer.reproduce import command, reproduce
from kvsim_explorer.show import frame_of, show_chart, show_table
from kvsim_explorer.size import is_large
from kvsim_explorer.view import View
from kvsim_explorer.work import worked

__all__ = ["TITLE", "show"]

TITLE = "Scorers"

HEADS = {
    "spearman_mean_of_layers": "rho, mean of layers",
    "spearman_layer_mean": "rho, layer mean",
    "spearman_layer": "rho, layer {layer}",
    "spearman_min": "rho, least layer",
    "spearman_max": "rho, most layer",
    "top_jaccard_mean_of_layers": "Jaccard, mean of layers",
    "top_jaccard_layer_mean": "Jaccard, layer mean",
    "top_jaccard_layer": "Jaccard, layer {layer}",
    "top_jaccard_min": "Jaccard, least layer",
    "top_jaccard_max": "Jaccard, most layer",
}


def show(view: View) -> None:
    """Show the spectrum of scorers, and its table."""
    trace = view.trace
    st.header("How far scorers are from attention")
    st.caption(
        "Spearman's rho, and the Jaccard index of the top-B sets, of each scorer with attention over all positions "
        "that a step can see, layer by layer. Nothing is evicted; the sidebar's policies do not count here."
    )
    every = _every(trace)
    steps = range(1, trace.num_steps + 1, every)

    def measure(tell: Any) -> Spectrum:
        return spectrum(trace, budget=str(view.budget), steps=steps, progress=tell)

    key = "spectrum", trace.hash, str(view.budget), every
    found = worked(key, "Correlating scorers, over steps", measure, ask=is_large(trace, 1 / every))
    if found is not None:
        _body(view, found, every)


def _every(trace: Trace) -> int:
    chosen: int = st.number_input(
        "Every so many steps",
        1,
        trace.num_steps,
        1,
        key="every",
        bind="query-params",
        width=220,
        help="Measure every N-th step, from the first; 1 is all of them.",
    )
    return chosen


@st.fragment
def _body(view: View, found: Spectrum, every: int) -> None:
    known = list(dict.fromkeys(row["scorer"] for row in found.rows))
    chosen = st.multiselect("Scorers", known, known, key="scorers", bind="query-params")
    if found.left_out:
        with st.expander(f"Left out: {', '.join(found.left_out)}"):
            st.dataframe(
                frame_of([{"scorer": name, "why": why} for name, why in found.left_out.items()]), hide_index=True
            )
    if not chosen:
        st.info("Choose at least one scorer.")
        return
    place = found.layers.index(half_depth(found.layers))
    layer: int = st.selectbox(
        "Layer in the table", found.layers, place, key="scorers_layer", bind="query-params", width=220
    )
    rows = [row for row in found.rows if row["scorer"] in chosen]
    overview = [row for row in found.overview(layer) if row["scorer"] in chosen]
    show_chart(charts.scorer_spectrum(rows), "spectrum", _summary(overview, found), frame_of(rows))
    heads = {name: head.format(layer=layer) for name, head in HEADS.items()}
    frame = frame_of([{"scorer": row["scorer"], **{heads[name]: row[name] for name in HEADS}} for row in overview])
    formats = {head: st.column_config.NumberColumn(format="%.3f") for head in heads.values()}
    show_table(frame, "scorers", column_config=formats)
    st.caption(
        f"Mean of layers: {READINGS['mean_of_layers']}. Layer mean: {READINGS['layer_mean']}. "
        f"{len(found.layers)} layers, {len(found.steps)} steps, B = {found.budget}; equal scores keep the newest."
    )
    _reproduce(view, chosen, known, layer, every)


def _summary(overview: list[dict[str, Any]], found: Spectrum) -> str:
    known = [row for row in overview if row["spearman_mean_of_layers"] is not None]
    if not known:
        return f"{len(overview)} scorers over {len(found.layers)} layers; none has a rank correlation."
    first, last = known[0], known[-1]
    parts = [f"{row['scorer']} {row['spearman_mean_of_layers']:.3f}" for row in (first, last)]
    return (
        f"Rank correlation and top-B overlap with attention, {len(overview)} scorers, {len(found.layers)} layers. "
        f"Mean rho over layers is highest for {parts[0]}" + (f" and lowest for {parts[1]}." if len(known) > 1 else ".")
    )


def _reproduce(view: View, chosen: list[str], known: list[str], layer: int, every: int) -> None:
    budget = str(view.budget)
    place = ["--trace", view.location, "--budget", budget]
    named = [] if chosen == known else [word for scorer in chosen for word in ("--scorer", scorer)]
    pace = [] if every == 1 else ["--every", str(every)]
    given = None if chosen == known else chosen
    reproduce(
        *[command("chart", "spectrum", *place, *named) + " --out spectrum.html"] * (every == 1),
        command("analyze", "scorers", *place, *named, *pace, "--layer", str(layer)),
        python=f"""
import kvsim, kvsim.charts
from kvsim.spectrum import spectrum

trace = kvsim.open_trace({view.location!r})
found = spectrum(trace, {given!r}, budget={budget!r}, steps=range(1, trace.num_steps + 1, {every}))
kvsim.charts.scorer_spectrum(found)
found.overview({layer})
""",
    )
