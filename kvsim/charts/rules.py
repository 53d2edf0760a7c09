"""Charts of how linear rules rank: their memory, and two tokens at the boundary."""

from collections.abc import Sequence

import altair as alt
import numpy as np

from kvsim.charts.intake import Rows, rows_of, with_values
from kvsim.charts.lines import step_chart
from kvsim.charts.style import (
    COLOURS,
    GREY,
    MAX_ROWS,
    WIDTH,
    Row,
    distinct,
    embed,
    heading,
    layered,
    number,
    panel_title,
    stacked,
)
from kvsim.errors import KvsimError
from kvsim.head import LinearRule
from kvsim.memory import memory
from kvsim.policy import Policy, parse

__all__ = ["memory_weights", "two_tokens"]


def memory_weights(policies: Sequence[Policy | str], layers: int, *, steps: int = 32) -> alt.VConcatChart:
    """Draw where the weight of a linear rule's state comes from: earlier steps, and the layers of a step.

    Parameters
    ----------
    policies : sequence of Policy or str
        `single`, `cumulative`, `ema`, or presets that stand for one of them.
    layers : int
        Eligible layers of the model.
    steps : int
        Scored steps so far; `cumulative` gives each the same weight.

    Raises
    ------
    KvsimError
        If a policy is not a linear rule, or a number is out of range.
    """
    if not policies:
        raise KvsimError("name at least one policy")
    back, within = {}, {}
    for one in dict.fromkeys(str(parse(p) if isinstance(p, str) else p) for p in policies):
        depth = memory(one, layers, steps=steps).layers
        head = parse(one).expand().head
        assert isinstance(head, LinearRule)
        rule = head.coefficients(depth)
        shares = rule.step_decay ** np.arange(steps, dtype=np.float64)
        back[one] = np.arange(steps), shares / shares.sum()
        weights = rule.layer_weights
        within[one] = np.arange(1, depth + 1), weights / weights.sum()
    share = "share of the state's weight"
    zero = alt.Scale(zero=True, nice=True)
    title = heading("Where the weight of the state comes from", f"{layers} layers, {steps} scored steps")
    x = "scored steps back (0: the latest)"
    panels = [
        step_chart(back, panel_title("over steps"), share, scale=zero, x=x, height=180),
        step_chart(within, panel_title("over layers"), "share of a step's weight", scale=zero, x="layer", height=180),
    ]
    return stacked(panels, title, "color", "shape", "strokeDash")


def two_tokens(rows: Rows) -> alt.VConcatChart:
    """Draw two tokens near rank B: their raw scores above, a rule's state of them below, and where they flip (Fig. 4).

    A token is in the top-B where it is not below the threshold; a ring marks a step at which that has changed.

    Parameters
    ----------
    rows : rows
        One a token and step: ``step``, ``token`` (its name), ``raw`` (or ``score``), ``state``, and the thresholds of
        the step, ``raw_threshold`` (or ``score_threshold``) and ``state_threshold``, or one ``threshold`` for both;
        optional ``position``. As `kvsim.twotokens` gives (its results are taken too).

    Raises
    ------
    KvsimError
        If a column is missing, or there are more than eight tokens.
    """
    table = rows_of(rows, "step", "token", "state")
    tokens = list(dict.fromkeys(_token(row) for row in table))
    if len(tokens) > len(COLOURS):
        raise KvsimError(f"at most {len(COLOURS)} tokens, got {len(tokens)}")
    if len(table) + len({row["step"] for row in table}) > MAX_ROWS // 2:
        raise KvsimError(f"{len(table)} rows are too many for this chart; give fewer steps")
    labels = [str(row[name]) for row in table for name in ("trace", "policy") if row.get(name)]
    raw = "raw" if "raw" in table[0] else "score"
    panels = []
    for column, name in ((raw, "raw scores"), ("state", "state of the rule")):
        threshold = f"{column}_threshold" if f"{column}_threshold" in table[0] else "threshold"
        own = with_values(rows_of(table, column, threshold), column, threshold)
        panels.append(_tokens_panel(own, column, threshold, tokens, name, column == "state"))
    how = "; ".join([*dict.fromkeys(labels), "shadow mode: nothing is evicted"])
    title = heading(
        "Two tokens at the boundary", how, "dashed: threshold of rank B; ring: the token has just crossed it"
    )
    return stacked(panels, title, "color", "shape", "strokeDash")


def _token(row: Row) -> str:
    return f"{row['token']}: position {row['position']}" if "position" in row else str(row["token"])


def _tokens_panel(
    rows: list[Row], column: str, threshold: str, tokens: list[str], name: str, last: bool
) -> alt.LayerChart:
    points: list[Row] = []
    flips = 0
    for token in tokens:
        own = sorted((row for row in rows if _token(row) == token), key=lambda row: row["step"])
        above: bool | None = None
        for row in own:
            now = bool(row[column] >= row[threshold])
            flip = above is not None and now != above
            above, flips = now, flips + flip
            values = {"value": float(row[column]), "threshold": float(row[threshold])}
            points.append({"series": token, "step": row["step"], **values, "flip": flip})
    encodings = distinct(tokens, "token")
    x = alt.X(**number("step", "decode step t" if last else None, format="d"))
    y = number("value", name)
    base = alt.Chart(embed(points)).encode(x=x, y=alt.Y(**y))
    tips = [alt.Tooltip("series:N", title="token"), "step:Q", alt.Tooltip("value:Q", format=".4g")]
    tips.append(alt.Tooltip("threshold:Q", format=".4g"))
    step_rows = {row["step"]: row for row in points}
    line = alt.Chart(embed({"step": s, "threshold": step_rows[s]["threshold"]} for s in sorted(step_rows)))
    rule = line.mark_line(color=GREY, strokeDash=[6, 4], strokeWidth=1.5).encode(
        x=x, y=alt.Y("threshold:Q", title=name)
    )
    lines = base.mark_line().encode(color=encodings["color"], strokeDash=encodings["strokeDash"])
    marks = base.mark_point(filled=True, size=45, opacity=1)
    marks = marks.encode(color=encodings["color"], shape=encodings["shape"], tooltip=tips)
    rings = base.transform_filter("datum.flip").mark_point(size=170, color="black", strokeWidth=1.5, filled=False)
    title = panel_title(f"{name}: {flips} flip{'s' * (flips != 1)}")
    return layered(rule, lines, marks, rings, width=WIDTH, height=170, title=title)
