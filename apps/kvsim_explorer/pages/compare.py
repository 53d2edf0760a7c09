"""Policies side by side: numbers, how much of their sets they share, and the tokens where two of them part."""

from typing import Any

import streamlit as st

from kvsim import KvsimError, Result, charts, parse
from kvsim.anatomy import Anatomy, Difference
from kvsim.optima import Beside
from kvsim_explorer.comparing import Runs, best_of, dissected, pair_of, run_all, say_failed
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import result_of
from kvsim_explorer.reproduce import command, policy_options, reproduce
from kvsim_explorer.show import frame_of, show_chart, show_table
from kvsim_explorer.view import View

__all__ = ["TITLE", "show"]

TITLE = "Compare"

COLUMNS = {
    "policy": "policy",
    "group": "groups",
    "budget": "B",
    "retained": "held",
    "kept_mass": "kept mass",
    "churn": "churn",
    "shadow_churn": "shadow churn",
    "raw_churn": "raw churn",
    "raw_agreement": "raw agreement",
    "raw_top_evicted": "raw-top evicted",
    "output_error": "output error",
}
MOST_ROWS = 500


def show(view: View) -> None:
    """Show the table, the charts over time, and the tokens of one pair."""
    st.header("Policies side by side")
    runs = run_all(view)
    say_failed(runs)
    if len(runs.results) < 2:
        st.info("Comparing takes two policies that run: name more under “Compare with” at the left, one a line.")
        return
    first = runs.results[0]
    alike = runs.alike()
    unlike = [one for one in runs.results if one.plan.groups.kind != first.plan.groups.kind]
    anatomy = dissected(view, alike) if len(alike) > 1 else None
    best = None if view.shadow else best_of(view, runs)
    show_table(_table(runs, anatomy, best), "comparison", column_config=_formats())
    how = "shadow mode: nothing is evicted" if view.shadow else "irreversible"
    st.caption(
        f"{how}; open loop; Jaccard and equal steps: with the sets of `{first.policy}`. {_about_gap(view, best)}"
    )
    if unlike:
        st.info(
            f"`{first.policy}` has group={first.plan.groups.kind}; sets of another kind cannot be compared with its "
            f"own: {', '.join(f'`{one.policy}` (group={one.plan.groups.kind})' for one in unlike)}. Give them the same "
            "group=, or choose two that are alike below."
        )
    if anatomy is not None:
        _show_overlap(anatomy)
    _show_steps(view, runs)
    if best is not None and any(one.method for one in best):
        _show_gap(view, [one for one in best if one.method])
    st.subheader("The tokens where two policies part")
    _show_pair(view, runs, anatomy)
    _reproduce(view, runs, alike, best)


def _table(runs: Runs, anatomy: Anatomy | None, best: list[Beside] | None) -> Any:
    beside = {} if anatomy is None else {pair.b: pair for pair in anatomy.pairs}
    gaps = {one.policy: one.gap for one in best or []}
    rows = []
    for result in runs.results:
        row = {COLUMNS[name]: value for name, value in result.summary().items() if name in COLUMNS}
        row = {name: row[name] for name in COLUMNS.values()}
        row["oracle gap"] = gaps.get(result.policy)
        pair = beside.get(result.policy)
        row["Jaccard"] = None if pair is None else float(pair.jaccard.mean())
        row["last Jaccard"] = None if pair is None else float(pair.jaccard[-1])
        row["equal steps"] = None if pair is None else float(pair.equal.mean())
        rows.append(row)
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return frame_of([{name: row[name] for name in known} for row in rows])


def _formats() -> dict[str, Any]:
    shares = dict.fromkeys(("oracle gap", "equal steps"), "percent")
    plain = [name for name in COLUMNS.values() if name not in ("policy", "groups", "B", "held")]
    shares["held"] = "%.0f"
    formats = {**dict.fromkeys([*plain, "Jaccard", "last Jaccard"], "%.3f"), **shares}
    return {name: st.column_config.NumberColumn(format=form) for name, form in formats.items()}


def _about_gap(view: View, best: list[Beside] | None) -> str:
    if view.shadow:
        return "Oracle gap: the optimum evicts for good, so there is none in shadow mode."
    if best is None:
        return ""
    left_out = "".join(f" `{one.policy}`: {one.why_not}." for one in best if one.why_not)
    left_out += "".join(f" `{policy}`: it has no budget." for policy in view.policies if policy.budget is None)
    return f"Oracle gap: 1 − kept mass / {_yardstick(best)} with the policy's own groups and budget.{left_out}"


def _yardstick(best: list[Beside]) -> str:
    """Say what gaps are to; the bound is never below the optimum."""
    methods = {one.method for one in best}
    if methods >= {"exact", "bound"}:
        return "the exact optimum or, where that takes long, a certified bound on it,"
    return "a certified bound on the optimum" if "bound" in methods else "the exact optimum"


def _show_overlap(anatomy: Anatomy) -> None:
    means = "; ".join(
        f"{pair.b} {pair.jaccard.mean():.3f}, at the end {pair.jaccard[-1]:.3f}" for pair in anatomy.pairs
    )
    summary = f"Jaccard of the retained sets with those of {anatomy.policies[0]}, on average: {means}."
    rows = [
        {"policy": pair.b, "step": step, "jaccard": value}
        for pair in anatomy.pairs
        for step, value in enumerate(pair.jaccard.tolist(), start=1)
    ]
    show_chart(charts.jaccard(anatomy), "jaccard", summary, frame_of(rows))


def _show_steps(view: View, runs: Runs) -> None:
    results = runs.results
    rows = [one.summary() for one in results]
    kept = "; ".join(f"{row['policy']} {row['kept_mass']:.3f}" for row in rows)
    show_chart(
        charts.kept_mass(results), "kept-mass", f"Kept mass over the steps, on average: {kept}.", _steps(results)
    )
    ranked = [result_of(view, policy, shadow=True) for policy in runs.policies if not policy.admits]
    if ranked and view.trace.num_steps > 1:
        summary = f"Churn of the ranking, with nothing evicted, on average: {_means(ranked, 'churn')}."
        if not view.shadow:
            summary += (
                f" With eviction it is at most 2 / (B + 1) where one token leaves a step: {_means(results, 'churn')}."
            )
        show_chart(charts.churn(ranked), "churn", summary, _steps(ranked))


def _means(results: list[Result], metric: str) -> str:
    rows = [one.summary() for one in results]
    return "; ".join(f"{row['policy']} {row[metric]:.3f}" for row in rows)


def _steps(results: list[Result]) -> Any:
    import polars as pl

    return pl.concat(
        [
            one.steps.select(pl.lit(one.policy).alias("policy"), pl.lit(one.mode).alias("mode"), pl.all())
            for one in results
        ]
    )


def _show_gap(view: View, best: list[Beside]) -> None:
    gaps = "; ".join(f"{view.text_of(parse(one.policy))} {one.gap:.2%}" for one in best)
    rows = [row for one in best for row in one.step_rows()]
    summary = f"Gap to {_yardstick(best)} over all steps: {gaps}."
    show_chart(charts.oracle_gap(rows), "oracle-gap", summary, frame_of(rows))


@st.fragment
def _show_pair(view: View, runs: Runs, anatomy: Anatomy | None) -> None:
    by_name = {view.text_of(policy): result for policy, result in zip(runs.policies, runs.results, strict=True)}
    names, kinds = list(by_name), [one.plan.groups.kind for one in by_name.values()]
    one = next((place for place, kind in enumerate(kinds) if kinds.count(kind) > 1), None)
    if one is None:
        st.info("Tokens of two policies can be compared where both have the same group=; here no two have.")
        return
    beside = kinds.index(kinds[one], one + 1)
    with st.container(horizontal=True):
        a = by_name[st.selectbox("One", names, index=one, key="a", bind="query-params", width=260)]
        b = by_name[st.selectbox("Other", names, index=beside, key="b", bind="query-params", width=260)]
        rows = st.number_input("Tokens", 1, MOST_ROWS, 10, key="rows", bind="query-params", width=120)
        by = "group"
        if a.plan.groups.count > 1:
            chosen = st.segmented_control(
                "Rows by", ("token", "group"), default="token", required=True, key="by", bind="query-params"
            )
            by = chosen or "token"
    if a is b:
        st.info("Choose two different policies.")
        return
    try:
        pair = pair_of(view, a, b, anatomy)
    except KvsimError as error:
        st.error(literal(str(error)))
        return
    if pair is None:
        return
    st.caption(
        f"Equal sets after {pair.equal.mean():.1%} of the steps; Jaccard {pair.jaccard.mean():.3f} on average, "
        f"{pair.jaccard[-1]:.3f} at the end; {pair.count:,} partings. Mass after: attention that the full cache gives "
        "the token at all steps after the parting; gained: the part of it that the keeper alone could see. "
        + ("Sums over the groups in which it parted the two." if by == "token" else "Lost by both at: none for never.")
    )
    if not pair.count:
        st.info("They retain the same sets after every step.")
        return
    show_table(
        frame_of(_tokens(pair, int(rows), view) if by == "token" else _partings(pair, int(rows), view)), "partings"
    )
    mode = ["--shadow"] * view.shadow
    texts = [name for name, result in by_name.items() if result in (a, b)]
    words = [*texts, "--trace", view.location, "--budget", str(view.budget), "--limit", str(rows), "--by", by, *mode]
    st.code(command("analyze", "diff", *words), language="bash")


def _tokens(pair: Difference, limit: int, view: View) -> list[dict[str, Any]]:
    return [
        {
            "position": one.position,
            **_text(one.token, view),
            "gained by": one.gained_by,
            "groups: gainer's": one.groups_gained_by,
            "groups: other's": one.groups_other,
            "first parted at step": one.parted,
            "mass after": one.mass_after,
            "gained": one.mass_gained,
        }
        for one in pair.tokens(limit)
    ]


def _partings(pair: Difference, limit: int, view: View) -> list[dict[str, Any]]:
    return [
        {
            "position": one.position,
            **_text(one.token, view),
            "group": one.group,
            "kept by": one.kept_by,
            "parted at step": one.parted,
            "lost by both at": one.held_until,
            "mass after": one.mass_after,
            "gained": one.mass_gained,
        }
        for one in pair.worst(limit)
    ]


def _text(token: str | None, view: View) -> dict[str, str]:
    return {"token": repr(token)} if token is not None and view.trace.has("text") else {}


def _reproduce(view: View, runs: Runs, alike: list[Result], best: list[Beside] | None) -> None:
    mode = ["--shadow"] * view.shadow
    named = ["--trace", view.location, *policy_options(view, runs.policies)]
    same = [p for p, one in zip(runs.policies, runs.results, strict=True) if one.plan.groups == alike[0].plan.groups]
    commands = [command("replay", *named, *mode)]
    if len(same) > 1:
        own = ["--trace", view.location, *policy_options(view, same), *mode]
        commands.append(command("chart", "jaccard", *own, "--out", "jaccard.html"))
    commands.append(command("chart", "kept-mass", *named, *mode, "--out", "kept-mass.html"))
    ranked = [policy for policy in runs.policies if not policy.admits]
    if ranked and view.trace.num_steps > 1:
        own = ["--trace", view.location, *policy_options(view, ranked)]
        commands.append(command("chart", "churn", *own, "--shadow", "--out", "churn.html"))
    if best is not None:
        compared = {one.policy for one in best if one.method}
        drawn = [policy for policy in runs.policies if str(policy) in compared]
        commands.append(command("analyze", "oracle", *named, "--method", "auto", "--no-pooled"))
        if drawn:
            own = ["--trace", view.location, *policy_options(view, drawn)]
            commands.append(command("chart", "oracle-gap", *own, "--out", "oracle-gap.html"))
    reproduce(
        *commands,
        python=f"""
import kvsim, kvsim.charts
from kvsim.anatomy import dissect

trace = kvsim.open_trace({view.location!r})
results = kvsim.replay_many(trace, {[one.policy for one in runs.results]!r}, shadow={view.shadow})
alike = [one for one in results if one.plan.groups.kind == {alike[0].plan.groups.kind!r}]
found = dissect(alike, trace)
kvsim.charts.jaccard(found)
found.pairs[0].worst(10)
""",
    )
