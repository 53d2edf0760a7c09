"""Heads: what each layer and KV head keeps and could still see, and where its attention goes."""

from typing import Any

import numpy as np
import streamlit as st

from kvsim import Policy, Trace, charts, parse
from kvsim.heads import N_RECENT, N_SINK, PARTS, ByHead, by_head
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import replayed
from kvsim_explorer.reproduce import command, policy_options, reproduce
from kvsim_explorer.show import frame_of, show_chart
from kvsim_explorer.size import is_large
from kvsim_explorer.view import MOST_POLICIES, View
from kvsim_explorer.work import worked

__all__ = ["TITLE", "examples", "show"]

TITLE = "Heads"

LARGEST_WINDOW = 64


def show(view: View) -> None:
    """Show maps of what is kept and seen by layer and head, and the parts of the attention by layer."""
    trace = view.trace
    st.header("What layers and heads keep and see")
    mode = "shadow mode: nothing is evicted" if view.shadow else "irreversible; open loop"
    st.caption(
        f"{mode}. Kept fraction: retained positions over all positions so far (WG-KV Fig. 13). Kept mass: attention "
        "that the queries of a layer and head could still see."
    )
    if trace.capture == "scores":
        st.info("This recording holds head means: attention has one row a layer, the mean over heads.")

    def sum_up(tell: Any) -> tuple[ByHead | None, list[tuple[Policy, str]]]:
        results, failed = replayed(view, view.policies)
        return by_head(results, trace, progress=tell) if results else None, failed

    names = tuple(map(str, view.policies))
    outcome = worked(
        ("by head", trace.hash, names, view.shadow),
        "Going through the attention of all layers and heads, step by step",
        sum_up,
        ask=is_large(trace),
    )
    if outcome is None:
        return
    found, failed = outcome
    for policy, why in failed:
        st.error(literal(f"{view.text_of(policy)} is left out: {why}"))
    if found is not None:
        _about_flat_maps(view, found)
        _body(view, found)


def examples(trace: Trace, budget: int) -> list[str]:
    """Name policies with unequal budgets that the recording can serve.

    Parameters
    ----------
    trace : Trace
        The recording.
    budget : int
        Tokens kept; windows are smaller.
    """
    room = max(1, min(LARGEST_WINDOW, budget // 2))
    if trace.capture == "scores":
        return [f"pyramid:{room}/group=layer"]
    found = []
    if trace.has("keys") and trace.has("prompt_queries"):
        window = min(room, trace.stored("prompt_queries").layout.shape[2])
        found += [f"adakv:snapkv,window_size={window}", f"pyramidkv:{window}"]
    if trace.has("keys"):
        found.append("nonuniform/score=knorm/group=head")
    return found or [f"pyramid:{room}/group=head"]


def _about_flat_maps(view: View, found: ByHead) -> None:
    flat = [
        view.text_of(parse(policy))
        for policy, fraction in zip(found.policies, found.kept_fraction, strict=True)
        if (np.ptp(fraction, axis=(1, 2)) == 0).all()
    ]
    if not flat:
        return
    budget = view.budget.resolve(view.trace.prompt_length)
    offered = [
        text for text in examples(view.trace, budget) if parse(text).with_budget(view.budget) not in view.policies
    ]
    several = len(flat) > 1
    st.info(
        f"{', '.join(f'`{one}`' for one in flat)} {'keep' if several else 'keeps'} as much in every layer and head, so "
        f"{'their maps of the kept fraction are' if several else 'its map of the kept fraction is'} flat."
        + (" Policies that divide their budget unequally:" if offered else "")
    )
    with st.container(horizontal=True):
        for text in offered:
            st.button(f"Add {text}", key=f"add {text}", on_click=_add, args=(view, text))


def _add(view: View, text: str) -> None:
    """Compare with one more policy, in place of the last where there are as many as there may be."""
    lines = [view.text_of(policy) for policy in view.others[: MOST_POLICIES - 2]]
    st.session_state["others"] = "\n".join([*lines, text])


@st.fragment
def _body(view: View, found: ByHead) -> None:
    step = _step(view.trace)
    rows, parts = found.rows(step), found.part_rows(step)
    when = "averaged over steps" if step is None else f"at step {step}"
    table = frame_of(rows)
    show_chart(
        charts.kept_by_head(rows), "kept-fraction", _extremes(view, rows, "kept_fraction", "Kept fraction", when), table
    )
    show_chart(
        charts.kept_by_head(rows, "kept_mass"),
        "kept-mass-by-head",
        _extremes(view, rows, "kept_mass", "Kept mass", when),
    )
    show_chart(charts.mass_by_layer(rows, parts), "layers", _split(found, parts, when), frame_of(parts))
    _reproduce(view, found, step)


def _step(trace: Trace) -> int | None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        single = st.toggle("One step", key="one_step", bind="query-params", help="Off: the mean over all steps.")
        if not single or trace.num_steps == 1:
            return 1 if single else None
        chosen: int = st.slider("Decode step t", 1, trace.num_steps, 1, key="heads_step", bind="query-params")
    return chosen


def _extremes(view: View, rows: list[dict[str, Any]], column: str, title: str, when: str) -> str:
    least, most = (pick(rows, key=lambda row: row[column]) for pick in (min, max))
    policies = len({row["policy"] for row in rows})
    what = f"{title} of {policies} {'policy' if policies == 1 else 'policies'} by layer and KV head, {when}"
    if least[column] == most[column]:
        return f"{what}: {least[column]:.3f} everywhere."
    ends = [
        f"{row[column]:.3f} ({view.text_of(parse(row['policy']))}, layer {row['layer']}"
        + ("" if row["head"] is None else f" head {row['head']}")
        + ")"
        for row in (least, most)
    ]
    return f"{what}: from {ends[0]} to {ends[1]}."


def _split(found: ByHead, parts: list[dict[str, Any]], when: str) -> str:
    means = {part: np.mean([row["attention"] for row in parts if row["part"] == part]) for part in PARTS}
    most = max((row for row in parts if row["part"] == "sink"), key=lambda row: row["attention"])
    return (
        f"Kept mass by layer, and attention of {len(found.layers)} layers to parts of the context, {when}. Means: "
        f"first {N_SINK} positions {means['sink']:.3f}, last {N_RECENT} {means['recent']:.3f}, the prompt between them "
        f"{means['prompt']:.3f}, generated tokens between them {means['rest']:.3f}. Layer {most['layer']} gives the "
        f"first {N_SINK} most, {most['attention']:.3f}."
    )


def _reproduce(view: View, found: ByHead, step: int | None) -> None:
    policies: list[Policy] = [parse(policy) for policy in found.policies]
    words = ["--trace", view.location, *policy_options(view, policies), *["--shadow"] * view.shadow]
    words += [] if step is None else ["--step", str(step)]
    reproduce(
        command("chart", "heads", *words) + " --out heads.html",
        command("chart", "heads", *words, "--metric", "kept_mass") + " --out heads-mass.html",
        command("chart", "layers", *words) + " --out layers.html",
        python=f"""
import kvsim, kvsim.charts
from kvsim.heads import by_head

trace = kvsim.open_trace({view.location!r})
results = kvsim.replay_many(trace, {list(found.policies)!r}, shadow={view.shadow}, shadow_churn=False)
found = by_head(results, trace)
kvsim.charts.kept_by_head(found.rows({step}))
kvsim.charts.kept_by_head(found.rows({step}), "kept_mass")
kvsim.charts.mass_by_layer(found.rows({step}), found.part_rows({step}))
""",
    )
