"""The recording: where it came from, what it holds, and what the chosen policies keep of it."""

from collections.abc import Iterator
from typing import Any

import streamlit as st
from kvsim_traces import describe

from kvsim import charts
from kvsim.cli.output import preview
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import replayed
from kvsim_explorer.reproduce import command, policy_options, reproduce
from kvsim_explorer.show import frame_of, show_chart, show_table
from kvsim_explorer.view import View

__all__ = ["TITLE", "show"]

TITLE = "Recording"

COLUMNS = {
    "policy": "policy",
    "budget": "B",
    "retained": "held",
    "kept_mass": "kept mass",
    "churn": "churn",
    "shadow_churn": "shadow churn",
    "raw_churn": "raw churn",
    "raw_agreement": "raw agreement",
    "raw_top_evicted": "raw-top evicted",
    "output_error": "output error",
    "ties": "ties",
}


def show(view: View) -> None:
    """Show the manifest, and the table that ``kvsim replay`` prints."""
    trace = view.trace
    st.header(literal(trace.path.name))
    facts = describe(trace)
    with st.container(horizontal=True):
        for name, value in _figures(view):
            st.metric(name, value, border=True, width="content")
    for note in _warnings(view, facts):
        st.warning(literal(note))
    if said := preview(trace, 400):
        st.markdown("**What was generated**")
        st.text(said)
    with st.expander("Where it came from"):
        show_table(frame_of([{"what": name, "is": value} for name, value in _origin(facts)]), "origin")
    results, failed = replayed(view, view.policies)
    for policy, why in failed:
        st.error(literal(f"{view.text_of(policy)} is left out: {why}"))
    if not results:
        return
    ran = [policy for policy in view.policies if policy not in dict(failed)]
    rows = [result.summary() for result in results]
    st.subheader("What the policies keep")
    st.caption(_how(view))
    known = [name for name in COLUMNS if any(row[name] is not None for row in rows)]
    frame = frame_of([{COLUMNS[name]: row[name] for name in known} for row in rows])
    show_table(frame, "summary", column_config=_formats(frame.columns))
    best = max(rows, key=lambda row: row["kept_mass"] or 0)
    chart = charts.kept_mass(results)
    summary = (
        f"Kept mass over {trace.num_steps} steps for {len(results)} policies; the highest mean is "
        f"{best['kept_mass']:.3f}, of {best['policy']}."
    )
    show_chart(chart, "kept-mass", summary, _steps(results))
    shadow = ["--shadow"] * view.shadow
    reproduce(
        command("trace", "info", view.location),
        command("replay", "--trace", view.location, *policy_options(view, ran), *shadow),
        command("chart", "kept-mass", "--trace", view.location, *policy_options(view, ran), *shadow)
        + " --out kept-mass.html",
        python=f"""
import kvsim, kvsim.charts

trace = kvsim.open_trace({view.location!r})
results = kvsim.replay_many(trace, {[str(policy) for policy in ran]!r}, shadow={view.shadow})
kvsim.charts.kept_mass(results)
""",
    )


def _figures(view: View) -> Iterator[tuple[str, str]]:
    trace = view.trace
    yield "Prompt, L0", f"{trace.prompt_length:,}"
    yield "Decode steps, T", f"{trace.num_steps:,}"
    yield "Layers, eligible", f"{trace.num_layers}, {len(trace.eligible_layers)}"
    yield "Heads, KV heads", f"{trace.num_heads}, {trace.num_kv_heads}"
    yield "Capture", trace.capture


def _warnings(view: View, facts: dict[str, Any]) -> Iterator[str]:
    manifest = facts["manifest"]
    if not manifest["complete"]:
        yield f"The recording is incomplete: {manifest['committed_steps']} of {manifest['planned_steps']} steps."
    if view.trace.capture == "scores":
        yield (
            "This recording holds head means: scores are not renormalised over what is visible, so replays are "
            "approximate, and policies with group=head cannot run."
        )
    if len(view.trace.eligible_layers) < view.trace.num_layers:
        yield "Layers that attend within a sliding window are recorded, and left alone."
    if not view.trace.has("text"):
        yield "The recording has no text; tokens are shown by their ids or positions."
    yield from manifest["notes"]


def _origin(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    manifest = facts["manifest"]
    yield "hash", facts["hash"]
    yield "size", f"{facts['bytes'] / 1e6:.1f} MB"
    model, tokenizer, check = manifest["model"], manifest["tokenizer"], manifest["check"]
    if model is not None:
        yield "model", model["name"]
        yield "model's config hash", model["config_hash"] or "unknown"
        yield "model's weights hash", model["weights_hash"] or "unknown"
    if tokenizer is not None:
        yield "tokenizer", f"{tokenizer['name']} ({tokenizer['hash'] or 'unknown'})"
    yield "tokens", manifest["generation"]["mode"]
    if check is not None:
        yield "checked against", f"{check['against']}, largest error {check['max_abs_error']:.1e} as computed"
    for name, array in facts["arrays"].items():
        yield f"array {name}", f"{array['dtype']} {' x '.join(map(str, array['shape']))}"
    for name, version in manifest["environment"].items():
        yield name, str(version)
    yield "recorded", f"{manifest['created']} by kvsim {manifest['kvsim_version']}"


def _how(view: View) -> str:
    how = "shadow mode: nothing is evicted" if view.shadow else "irreversible"
    return f"{how}; open loop; budget of policies without their own: {view.budget}"


def _formats(columns: list[str]) -> dict[str, Any]:
    plain = ("policy", "B", "held", "ties")
    formats = {name: st.column_config.NumberColumn(format="%.3f") for name in columns if name not in plain}
    return formats | {"held": st.column_config.NumberColumn(format="%.0f")}


def _steps(results: list[Any]) -> Any:
    import polars as pl

    return pl.concat([one.steps.select(pl.lit(one.policy).alias("policy"), pl.all()) for one in results])
