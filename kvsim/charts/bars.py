"""Charts of parts that add up: the trade-off of a rule, and the time of a decode step."""

from collections.abc import Sequence

import altair as alt

from kvsim.charts.intake import Rows, policy_labels, rows_of, with_values
from kvsim.charts.style import PARTS as FILLS
from kvsim.charts.style import WIDTH, Row, embed, heading, layered, number, panel_title, stacked
from kvsim.errors import KvsimError

__all__ = ["decode_composition", "tradeoff"]

TRADE = {
    "layer": "layer: wrong layers trusted",
    "lag": "lag: stale because of memory",
    "boundary": "boundary: flips caused by noise",
}
BAR = 22


def tradeoff(rows: Rows, h: int | None = 8) -> alt.VConcatChart:
    """Draw what linear rules lose, split into layer, lag and boundary; one panel a recording (Eq. 5 measured).

    A negative part is drawn to the left of zero. The diamond is the total, the sum of the three, with its interval
    where the rows have one.

    Parameters
    ----------
    rows : rows
        `kvsim.tradeoff.TradeOff` results, their summaries, or means from `kvsim.intervals.over_traces`: ``policy``,
        ``h``, ``layer``, ``lag``, ``boundary``, ``total``; optional ``trace``, ``total_low`` and ``total_high``.
    h : int or None
        Which half width of the moving average to draw, where the rows have several.

    Raises
    ------
    KvsimError
        If the rows have no such h, or a policy occurs twice for a recording.
    """
    table = rows_of(rows, "policy", *TRADE)
    widths = list(dict.fromkeys(row.get("h") for row in table))
    if len(widths) > 1 and h not in widths:
        raise KvsimError(f"h is one of {', '.join(map(str, widths))}, got {h}")
    chosen = h if h in widths else widths[0]
    table = [row for row in with_values(table, *TRADE) if row.get("h") == chosen]
    labels = policy_labels(row["policy"] for row in table)
    traces = list(dict.fromkeys(str(row.get("trace", "")) for row in table))
    panels = []
    for trace in traces:
        own = [row for row in table if str(row.get("trace", "")) == trace]
        order = [labels[row["policy"]] for row in own]
        if len(set(order)) < len(order):
            raise KvsimError("a policy occurs twice for one recording")
        panel = _trade_panel(own, labels, order, trace == traces[-1])
        panels.append(panel.properties(title=panel_title(trace)) if len(traces) > 1 else panel)
    how = "true utilities" if chosen is None else f"scores averaged over h = {chosen} steps to either side"
    key = "diamond: total, the sum of the parts"
    if any(row.get("total_low") is not None for row in table):
        key += "; line: its interval over recordings"
    notes = (traces[0] if len(traces) == 1 else "", f"shadow mode: nothing is evicted; {how}", key)
    return stacked(panels, heading("What a rule loses, and to what", *notes), "x", "fill")


def _trade_panel(rows: list[Row], labels: dict[str, str], order: list[str], last: bool) -> alt.LayerChart:
    parts: list[Row] = []
    totals: list[Row] = []
    for row in rows:
        policy = labels[row["policy"]]
        total = sum(row[part] for part in TRADE)
        values = [(name, row[part]) for part, name in TRADE.items()]
        # Where each segment lies: from 0 to the right for gains in loss, to the left for negative parts.
        right = left = 0.0
        for name, value in values:
            start = right if value >= 0 else left
            parts.append({"policy": policy, "part": name, "loss": value, "start": start, "end": start + value})
            right, left = (start + value, left) if value >= 0 else (right, start + value)
        low, high = row.get("total_low"), row.get("total_high")
        bounds = {} if low is None or high is None else {"low": low, "high": high}
        totals.append({"policy": policy, "total": total, **bounds})
    y = alt.Y("policy:N", sort=order, title=None, axis=alt.Axis(labelLimit=0), scale=alt.Scale(paddingInner=0.3))
    x = number("start", "loss of local utility (share of the best set's)" if last else None, format="~r", tickCount=8)
    fill = alt.Fill(
        "part:N",
        sort=list(TRADE.values()),
        scale=alt.Scale(domain=list(TRADE.values()), range=list(FILLS[:3])),
        legend=alt.Legend(title="part", labelLimit=0, orient="bottom", direction="vertical"),
    )
    bars = alt.Chart(embed(parts)).mark_bar(stroke="#333333", strokeWidth=0.6)
    bars = bars.encode(
        x=alt.X(**x),
        x2="end:Q",
        y=y,
        fill=fill,
        tooltip=["policy:N", "part:N", alt.Tooltip("loss:Q", format=".4f")],
    )
    base = alt.Chart(embed(totals)).encode(y=y)
    layers: list[alt.Chart] = [bars]
    layers.append(alt.Chart(embed([{"zero": 0}])).mark_rule(color="black").encode(x="zero:Q"))
    if all("low" in row for row in totals):
        layers += [
            base.mark_rule(color=ink, strokeWidth=width).encode(x="low:Q", x2="high:Q")
            for ink, width in (("white", 4), ("black", 1.5))
        ]
    point = base.mark_point(
        shape="diamond", filled=True, fill="white", stroke="black", strokeWidth=1.2, size=70, opacity=1
    )
    tips = [alt.Tooltip("policy:N"), alt.Tooltip("total:Q", format=".4f")]
    layers.append(point.encode(x="total:Q", tooltip=tips))
    return layered(*layers, width=WIDTH, height=BAR * len(order))


def decode_composition(rows: Rows) -> alt.LayerChart:
    """Draw what the time of a decode step is made of, one bar a setting (Fig. 3).

    Parameters
    ----------
    rows : rows
        ``label`` (the bar), ``part``, ``milliseconds``; the order of appearance is kept.

    Raises
    ------
    KvsimError
        If a time is negative, or a part occurs twice in a bar.
    """
    table = with_values(rows_of(rows, "label", "part", "milliseconds"), "milliseconds")
    labels = list(dict.fromkeys(str(row["label"]) for row in table))
    parts = list(dict.fromkeys(str(row["part"]) for row in table))
    if len(parts) > len(FILLS):
        raise KvsimError(f"a bar has at most {len(FILLS)} parts, got {len(parts)}: {', '.join(parts)}")
    if any(row["milliseconds"] < 0 for row in table):
        raise KvsimError("a part cannot take less than no time")
    if len({(row["label"], row["part"]) for row in table}) < len(table):
        raise KvsimError("a part occurs twice in one bar")
    segments, totals = _segments(table, labels, parts)
    y = alt.Y("label:N", sort=labels, title=None, axis=alt.Axis(labelLimit=0), scale=alt.Scale(paddingInner=0.35))
    most = max(total["total"] for total in totals)
    x = number("start", "time (ms a token)", scale=alt.Scale(domain=[0, most * 1.12 or 1], nice=False))
    legend = alt.Legend(title="part", labelLimit=0, orient="bottom", columns=3)
    fill = alt.Fill("part:N", sort=parts, scale=alt.Scale(domain=parts, range=list(FILLS[: len(parts)])), legend=legend)
    base = alt.Chart(embed(segments)).encode(y=y)
    tips = [
        alt.Tooltip("label:N"),
        alt.Tooltip("part:N"),
        alt.Tooltip("milliseconds:Q", format=".3f"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    bars = base.mark_bar(stroke="#333333", strokeWidth=0.6).encode(x=alt.X(**x), x2="end:Q", fill=fill, tooltip=tips)
    shares = base.transform_filter("datum.width >= 0.05").transform_calculate(middle="(datum.start + datum.end) / 2")
    ink = alt.condition(alt.datum.dark, alt.value("white"), alt.value("black"))
    text = shares.mark_text(fontSize=10).encode(x="middle:Q", text=alt.Text("share:Q", format=".0%"), color=ink)
    total = alt.Chart(embed(totals)).mark_text(align="left", dx=4, fontSize=10)
    total = total.encode(x="total:Q", y=y, text=alt.Text("total:Q", format=".3~g"))
    title = heading("Time of a decode step", "numbers in bars: share of the step; beside them: ms a token")
    return layered(bars, text, total, title=title, width=WIDTH, height=30 * len(labels))


def _segments(table: Sequence[Row], labels: list[str], parts: list[str]) -> tuple[list[Row], list[Row]]:
    times = {(str(row["label"]), str(row["part"])): float(row["milliseconds"]) for row in table}
    totals = {label: sum(times.get((label, part), 0.0) for part in parts) for label in labels}
    most = max(totals.values()) or 1.0
    segments: list[Row] = []
    for label in labels:
        start = 0.0
        for index, part in enumerate(parts):
            if (value := times.get((label, part))) is not None:
                share = value / totals[label] if totals[label] else 0.0
                row = {"label": label, "part": part, "milliseconds": value, "share": share}
                ends = {"start": start, "end": start + value, "width": value / most, "dark": _is_dark(FILLS[index])}
                segments.append(row | ends)
                start += value
    return segments, [{"label": label, "total": total} for label, total in totals.items()]


def _is_dark(colour: str) -> bool:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140
