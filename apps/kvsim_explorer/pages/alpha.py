"""Alpha: how much depends on it, what it trades against what, and which is best."""

from typing import Any

import streamlit as st

from kvsim import charts, replay_many
from kvsim.charts.naming import name_of
from kvsim.cli.analyze.best import EDGE, best_alpha
from kvsim.cli.options import without_budget
from kvsim.engines.outcome import METRICS
from kvsim.intervals import BETTER, best_alphas, best_alphas_by
from kvsim.synth import synthetic_of
from kvsim.tradeoff import DEFAULT_H, DEFAULT_POLICIES, PARTS, TradeOff, decompose
from kvsim_explorer.reproduce import command, reproduce
from kvsim_explorer.show import frame_of, show_chart, show_table
from kvsim_explorer.size import is_large
from kvsim_explorer.view import View
from kvsim_explorer.work import worked

__all__ = ["TITLE", "show"]

TITLE = "Alpha"

Rows = list[dict[str, Any]]


def show(view: View) -> None:
    """Show the sensitivity to alpha, and the trade-off behind it."""
    st.header("How much depends on alpha")
    st.caption(
        f"{view.trace.path.name}, budget {view.budget}: `ema` at eight alphas, layers and steps in one memory, "
        "steps alone (`over=step`), layers alone (`over=layer`), beside `cumulative`. The sidebar's policies "
        "do not count here."
    )
    rows, losses = _rows(view), _losses(view)
    _body(view, rows, losses)


def _rows(view: View) -> Rows | None:
    trace, budget = view.trace, str(view.budget)

    def play(tell: Any) -> Rows:
        played = replay_many(
            trace, DEFAULT_POLICIES, budget=budget, shadow=view.shadow, shadow_churn=False, progress=tell
        )
        return [result.summary() for result in played]

    key = "alpha", trace.hash, budget, view.shadow
    return worked(key, f"Replaying {len(DEFAULT_POLICIES)} rules", play, ask=is_large(trace))


def _losses(view: View) -> list[TradeOff] | None:
    trace, budget = view.trace, str(view.budget)
    spec = synthetic_of(trace)
    utility = None if spec is None else spec.utilities

    def split(tell: Any) -> list[TradeOff]:
        return decompose(trace, DEFAULT_POLICIES, budget=budget, h=DEFAULT_H, utility=utility, progress=tell)

    return worked(("tradeoff", trace.hash, budget), "Splitting their losses", split, ask=is_large(trace))


@st.fragment
def _body(view: View, rows: Rows | None, losses: list[TradeOff] | None) -> None:
    metric = "kept_mass" if rows is None else _sensitivity(view, rows)
    h = DEFAULT_H[1] if losses is None else _tradeoff(view, losses)
    _reproduce(view, metric, h)


def _sensitivity(view: View, rows: Rows) -> str:
    known = [metric for metric in METRICS if any(row[metric] is not None for row in rows)]
    metric: str = st.selectbox("Metric", known, key="alpha_metric", bind="query-params", width=320)
    st.caption(f"{metric}: {METRICS[metric]}.")
    drawn = [row for row in rows if row[metric] is not None]
    least, most = (pick(drawn, key=lambda row: row[metric]) for pick in (min, max))
    summary = (
        f"{name_of(metric)[0]} of {len(drawn)} rules, from {least[metric]:.3f} "
        f"({without_budget(least['policy'], view.budget)}) to {most[metric]:.3f} "
        f"({without_budget(most['policy'], view.budget)})."
    )
    table = frame_of([{name: row[name] for name in ("policy", "budget", *known)} for row in rows])
    show_chart(charts.alpha_sensitivity(rows, metric), "alpha", summary, table)
    if metric not in BETTER:
        st.caption("Neither more nor less of this is better.")
        return metric
    best = best_alphas_by(rows, metric)
    lines = [
        f"- `{without_budget(row['policy'], view.budget)}`: **{best_alpha(row['best'], row['alphas'])}**, "
        f"with {row['value']:.3f}"
        for row in best
    ]
    st.markdown("\n".join([f"Best alpha, where {BETTER[metric]} is better:", "", *lines]))
    if any(row["at_edge"] for row in best):
        st.caption(EDGE)
    return metric


def _tradeoff(view: View, losses: list[TradeOff]) -> int | None:
    st.subheader("What aggregation trades against what")
    h: int | None = None
    if losses[0].h is not None:
        chosen = st.segmented_control(
            "Utility: scores averaged over so many steps to either side, h",
            [str(width) for width in DEFAULT_H],
            default=str(DEFAULT_H[1]),
            required=True,
            key="h",
            bind="query-params",
            help="The boundary part holds the bias of that average, so look at several.",
        )
        h = int(chosen or DEFAULT_H[1])
    rows = [row.summary() for row in losses if row.h == h]
    least = min(rows, key=lambda row: row["total"])
    parts = ", ".join(f"{part} {least[part]:.4f}" for part in PARTS[:-1])
    summary = (
        f"What {len(rows)} rules lose without eviction, as layer, lag and boundary; the least total is "
        f"{least['total']:.4f}, of {without_budget(least['policy'], view.budget)}: {parts}."
    )
    table = frame_of([{name: row[name] for name in ("policy", "h", *PARTS)} for row in rows])
    show_chart(charts.tradeoff(rows, h=h), "tradeoff", summary, table)
    best = [row for row in best_alphas(losses) if row["h"] == h]
    st.markdown("Alpha with the smallest part:")
    cells = [
        {"policy": without_budget(row["policy"], view.budget)}
        | {part: best_alpha(row[part], row["alphas"]) for part in PARTS}
        for row in best
    ]
    show_table(frame_of(cells), "best-alpha")
    if any(edge for row in best for edge in row["at_edge"].values()):
        st.caption(EDGE)
    return h


def _reproduce(view: View, metric: str, h: int | None) -> None:
    budget = str(view.budget)
    place = ["--trace", view.location, "--budget", budget]
    shadow, width = ["--shadow"] * view.shadow, [] if h is None else ["--h", str(h)]
    rules = [word for policy in DEFAULT_POLICIES for word in ("--policy", policy)]
    best = f"\nbest_alphas_by([one.summary() for one in results], {metric!r})" if metric in BETTER else ""
    utility = "kvsim.synth.synthetic_of(trace).utilities" if h is None else "None"
    reproduce(
        command("chart", "alpha", *place, "--metric", metric, *shadow) + " --out alpha.html",
        command("chart", "tradeoff", *place, *width, *rules) + " --out tradeoff.html",
        command("analyze", "alpha", *place, *width),
        python=f"""
import kvsim, kvsim.charts, kvsim.synth
from kvsim.intervals import best_alphas, best_alphas_by
from kvsim.tradeoff import DEFAULT_H, DEFAULT_POLICIES, decompose

trace = kvsim.open_trace({view.location!r})
results = kvsim.replay_many(trace, DEFAULT_POLICIES, budget={budget!r}, shadow={view.shadow}, shadow_churn=False)
kvsim.charts.alpha_sensitivity(results, {metric!r}){best}
losses = decompose(trace, DEFAULT_POLICIES, budget={budget!r}, h=DEFAULT_H, utility={utility})
kvsim.charts.tradeoff(losses, h={h})
best_alphas(losses)
""",
    )
