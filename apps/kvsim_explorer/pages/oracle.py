"""Oracle: how far policies are from the best that could have been kept, and from random eviction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import streamlit as st

from kvsim import Policy, charts, parse
from kvsim.cli.analyze.floor import verdict
from kvsim.floor import SEEDS, Floor, random_floor
from kvsim.optima import Beside, beside_optimum
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import replayed
from kvsim_explorer.reproduce import command, policy_options, reproduce
from kvsim_explorer.show import frame_of, show_chart, show_table
from kvsim_explorer.size import is_large
from kvsim_explorer.view import View
from kvsim_explorer.work import worked

__all__ = ["TITLE", "show"]

TITLE = "Oracle"

IS = {"exact": "exact optimum", "bound": "certified upper bound", None: None}


@dataclass(frozen=True)
class Found:
    """Policies between random eviction and the optimum, and those that cannot run, with the reason."""

    floors: list[Floor]
    beside: list[Beside]
    failed: list[tuple[Policy, str]]


def show(view: View) -> None:
    """Show the gap to the offline optimum over time, and the table with the random floor."""
    trace = view.trace
    st.header("How far from the best")
    st.caption(
        "The offline optimum knows the whole recording: no policy with the same groups and budget can keep more mass. "
        "Exact where that is quick, else a certified upper bound. It is the best over all steps together, so a policy "
        "may be ahead of it early on: a gap below 0. Irreversible; open loop."
    )
    if view.shadow:
        st.info("Shadow sets can return, the optimum's cannot: this page evicts for good, whatever the switch says.")
    kept = [policy for policy in view.policies if policy.budget is not None]
    for policy in view.policies:
        if policy.budget is None:
            st.warning(f"{view.text_of(policy)} is left out: it has no budget, so there is nothing to choose.")
    if not kept:
        return
    key = "oracle", trace.hash, tuple(map(str, kept))
    label = "Replaying, drawing at random and working out the optimum, in percent"
    found = worked(key, label, lambda tell: _work(view, kept, tell), ask=is_large(trace))
    if found is None:
        return
    for policy, why in found.failed:
        st.error(literal(f"{view.text_of(policy)} is left out: {why}"))
    if found.beside:
        _gap(view, found.beside)
        _table(view, found)
        left = {policy for policy, _ in found.failed}
        _reproduce(view, [policy for policy in kept if policy not in left], found.beside)


def _work(view: View, policies: list[Policy], tell: Callable[[int, int], None]) -> Found:
    results, failed = replayed(view, policies, shadow=False)
    floors = random_floor(results, view.trace, progress=lambda done, total: tell(50 * done // total, 100))
    beside = beside_optimum(results, view.trace, progress=lambda done, total: tell(50 + 50 * done // total, 100))
    return Found(floors, beside, failed)


def _gap(view: View, found: list[Beside]) -> None:
    compared = [one for one in found if one.gap is not None]
    for one in found:
        if one.why_not:
            st.warning(f"{_name(view, one.policy)} has no gap: {one.why_not}.")
    if not compared:
        return
    rows = [row for one in compared for row in one.step_rows()]
    least, most = (pick(compared, key=lambda one: one.gap or 0.0) for pick in (min, max))
    summary = (
        f"Gap to the optimum up to each of {view.trace.num_steps} steps, {len(compared)} policies. Over all steps "
        f"{_name(view, least.policy)} misses {least.gap:.2%}"
        + (f" and {_name(view, most.policy)} {most.gap:.2%}." if most is not least else ".")
    )
    show_chart(charts.oracle_gap(rows), "oracle-gap", summary, frame_of(rows))
    if len({one.group for one in compared}) > 1:
        st.caption(
            "Each policy is measured against the optimum of its own groups: the optimum with a set for each layer or "
            "head keeps more than that of a shared set, so compare gaps within equal groups."
        )
    if any(one.method == "bound" for one in compared):
        st.caption(
            "The line is the gap to a schedule close to the optimum; the table's gap is to the bound, so it is never "
            "too small."
        )


def _table(view: View, found: Found) -> None:
    st.subheader("Between the optimum and random eviction")
    below = [one for one in found.floors if one.below]
    for one in below:
        how = "every draw" if one.below_all else "the mean of the draws"
        st.warning(
            f"{_name(view, one.policy)} keeps {one.kept_mass:.3f}, less than {how} of random eviction "
            f"({one.random_min if one.below_all else one.random_mean:.3f})."
        )
    rows = []
    for one, best in zip(found.floors, found.beside, strict=True):
        row: dict[str, Any] = {
            "policy": _name(view, one.policy),
            "group": one.group,
            "B": one.budget,
            "kept mass": one.kept_mass,
        }
        row["below random"] = _mark(one)
        row |= {"best": best.best, "best is": IS[best.method], "gap %": _percent(best.gap)}
        row |= {"random, mean": one.random_mean, "random, least": one.random_min, "random, most": one.random_max}
        rows.append(row | {"draws below %": _percent(one.percentile)})
    precise = ("kept mass", "best", "random, mean", "random, least", "random, most")
    formats: dict[str, Any] = {name: st.column_config.NumberColumn(format="%.3f") for name in precise}
    formats |= {"gap %": st.column_config.NumberColumn(format="%.2f")}
    formats |= {"draws below %": st.column_config.NumberColumn(format="%.0f")}
    show_table(frame_of(rows), "oracle", column_config=formats)
    st.caption(
        f"Random: {SEEDS} draws of a fixed order for each position, at the policy's groups and budget. Random is no "
        "floor: a draw that happens to keep an attention sink keeps much more than others."
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _mark(one: Floor) -> str:
    return f"▼ below {verdict(one)}" if one.below else "no"


def _name(view: View, policy: str) -> str:
    return view.text_of(parse(policy))


def _reproduce(view: View, policies: list[Policy], found: list[Beside]) -> None:
    place = ["--trace", view.location]
    unlike = {one.policy for one in found if one.why_not}
    drawn = [policy for policy in policies if str(policy) not in unlike]
    gap = command("chart", "oracle-gap", *place, *policy_options(view, drawn)) + " --out oracle-gap.html"
    reproduce(
        *[gap] * bool(drawn),
        command("analyze", "oracle", *place, *policy_options(view, policies), "--method", "auto", "--no-pooled"),
        command("analyze", "floor", *place, *policy_options(view, policies)),
        python=f"""
import kvsim, kvsim.charts
from kvsim.floor import random_floor
from kvsim.optima import beside_optimum

trace = kvsim.open_trace({view.location!r})
results = kvsim.replay_many(trace, {[str(policy) for policy in policies]!r}, shadow_churn=False)
beside = beside_optimum(results, trace)
kvsim.charts.oracle_gap([row for one in beside for row in one.step_rows()])
random_floor(results, trace)
""",
    )
