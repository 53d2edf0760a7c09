"""Charts of who was kept when: the retention map and the histogram of evictions."""

from collections.abc import Sequence
from typing import Literal

import altair as alt
import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.charts.intake import Results, notes_of, results_of, series_of
from kvsim.charts.rectangles import Rectangle, rectangles
from kvsim.charts.style import GREY, WIDTH, Row, embed, heading, layered, number, panel_title, shades, stacked
from kvsim.errors import KvsimError, unknown_name
from kvsim.plan import FloatArray
from kvsim.policies.ema import Ema
from kvsim.policy import Policy, parse
from kvsim.result import Result

__all__ = ["MAX_CELLS", "evictions", "reference_utility", "retention"]

MAP_ROWS = 4800
"""Rectangles of all panels of a map together; the rest of what a chart embeds is for its lines."""

MAX_CELLS = 60_000

MEANING = "attention to a position, mean over layers, heads and the steps at which it is there (full cache)"
"""What `reference_utility` gives."""

ORDERS = ("position", "utility")
BARS = 60
PROMPT_FILL, GENERATED_FILL = "#1f3b63", "#a9bedb"


def reference_utility(trace: Trace) -> FloatArray:
    """Average the full cache's attention to each position over layers, heads and the steps at which it is cached.

    Returns
    -------
    array
        [L0 + T].
    """
    prompt, steps = trace.prompt_length, trace.num_steps
    total = np.zeros(trace.num_positions)
    for step in range(1, steps + 1):
        rows = trace.score_rows(step, list(trace.eligible_layers))
        total[: prompt + step] += rows.mean(axis=0, dtype=np.float64)
    seen = steps - np.maximum(0, np.arange(trace.num_positions) - prompt)
    mean: FloatArray = total / seen
    return mean


def retention(
    results: Results,
    *,
    sort: Literal["position", "utility"] = "position",
    utility: npt.ArrayLike | None = None,
    meaning: str = MEANING,
    cells: int = MAP_ROWS,
) -> alt.VConcatChart:
    """Draw which positions are retained after each step, one panel a result (Fig. 1).

    A cell is the mean over its positions, its steps and the retention groups, of what exists by then. For the raw
    top-B give a shadow result of ``ema:0,over=step``, which ranks by the current step's layer mean alone.

    Parameters
    ----------
    results : Result or sequence of Result
        Irreversible or shadow results of one recording.
    sort : {"position", "utility"}
        Order of the columns. By position: the dashed line is where the B newest positions begin, the dotted one where
        the prompt ends. By utility, highest first: the dashed line is the budget: a cache of the highest
        utilities would end there.
    utility : array_like, optional
        [L0 + T] reference utility of each position; `reference_utility` gives the usual one.
    meaning : str
        What `utility` is, below the title.
    cells : int
        The most cells, over all panels; at most 60,000. Neighbours of equal value are one row of the chart's data, and
        where they are more than 4,800 all the same, bins are coarser than this asks; the axes name the bins.

    Raises
    ------
    KvsimError
        If `cells` is out of range, the results are of several recordings, or `utility` is missing or has another
        length.
    """
    found = results_of(results)
    if sort not in ORDERS:
        raise unknown_name("sort", sort, ORDERS)
    first = found[0]
    if len({result.trace_hash for result in found}) > 1:
        raise KvsimError("a retention map shows one recording; the results are of several")
    positions = first.prompt_length + first.num_steps
    order = np.arange(positions)
    if sort == "utility":
        order = _by_utility(utility, positions)
    if not 1 <= cells <= MAX_CELLS:
        raise KvsimError(f"cells must be from 1 to {MAX_CELLS:,}, over all panels, got {cells:,}")
    grids, wide, tall = _fitting(found, order, cells)
    panels = []
    x_name = "position" if sort == "position" else "position, by reference utility (high → low)"
    x_name += f"; bins of {wide}" if wide > 1 else ""
    y_name = "decode step t" + (f"; bins of {tall}" if tall > 1 else "")
    height = 240 if len(found) == 1 else 130
    for result, name, covered in zip(found, _panel_names(found), grids, strict=True):
        rows = _rows(covered, (positions, result.num_steps), (wide, tall))
        # Only the lowest panel names the axis that all have in common.
        own_name = x_name if result is found[-1] else None
        panel = _panel(rows, (positions, result.num_steps), wide, (own_name, y_name), sort)
        panels.append(layered(panel, _lines(result, sort), width=WIDTH, height=height, title=panel_title(name)))
    several_modes = len({result.mode for result in found}) > 1
    about = f"reference utility: {meaning}" if sort == "utility" else ""
    young = "white: positions that are not there yet"
    title = heading("Retained positions", *notes_of(found, modes=not several_modes), f"{_key(sort)}; {young}", about)
    return stacked(panels, title, "fill", "stroke")


def _fitting(
    found: Sequence[Result], order: npt.NDArray[np.intp], cells: int
) -> tuple[list[list[Rectangle]], int, int]:
    """Cover the panels with rectangles, of the finest bins that one chart can embed; give the bins too."""
    while True:
        room = cells // len(found)
        if room < 4:
            raise KvsimError(f"a retention map of {cells:,} cells holds {cells // 4} panels, got {len(found)}")
        wide, tall = _bins(order.size, found[0].num_steps, room)
        covered = [rectangles(_grid(result, order, wide, tall)) for result in found]
        if sum(map(len, covered)) <= MAP_ROWS:
            return covered, wide, tall
        cells = max(MAP_ROWS, cells * 3 // 4)


def _panel_names(found: Sequence[Result]) -> list[str]:
    """Name panels by policy, the raw sets as such, and by mode where there are both."""
    modes = {"shadow": ", shadow mode: nothing is evicted", "irreversible": ", irreversible"}
    several = len({result.mode for result in found}) > 1
    return [
        ("raw top-B: " if _is_raw(result) else "")
        + name.removesuffix(" (shadow)" if several else "")
        + modes[result.mode] * several
        for result, name in zip(found, series_of(found), strict=True)
    ]


def _is_raw(result: Result) -> bool:
    """Whether the sets are the raw top-B sets: a shadow result that ranks by the step's own layer mean."""
    policy = parse(result.policy)
    raw = Policy(Ema(0, over="step"), group=policy.group, budget=policy.budget)
    return result.mode == "shadow" and policy.expand() == raw


def _key(sort: str) -> str:
    if sort == "position":
        return "dashed: the B newest positions begin here; dotted: end of the prompt"
    return "dashed: the budget B"


def _by_utility(utility: npt.ArrayLike | None, positions: int) -> npt.NDArray[np.intp]:
    if utility is None:
        raise KvsimError("sort='utility' needs utility=, such as kvsim.charts.reference_utility(trace)")
    given = np.asarray(utility, dtype=np.float64)
    if given.shape != (positions,) or np.isnan(given).any():
        raise KvsimError(f"utility must be {positions} numbers, one a position, got shape {list(given.shape)}")
    return np.argsort(-given, kind="stable")


def _bins(positions: int, steps: int, cells: int) -> tuple[int, int]:
    """Choose bin sizes, so that there are at most so many cells, about 2.5 times as many across as down."""
    if positions * steps <= cells:
        return 1, 1
    tall = -(-steps // max(1, int((cells / 2.5) ** 0.5)))
    while True:
        down = -(-steps // tall)
        across = cells // down
        if across >= 1:
            wide = _round(-(-positions // across))
            if -(-positions // wide) * down <= cells:
                return wide, tall
        tall += 1


def _round(size: int) -> int:
    """Give the next size of 1, 2, 4, 5 or 8 times a power of ten."""
    base = 1
    while True:
        for factor in (1, 2, 4, 5, 8):
            if factor * base >= size:
                return factor * base
        base *= 10


def _grid(result: Result, order: npt.NDArray[np.intp], wide: int, tall: int) -> FloatArray:
    """Give the kept fraction of every cell, [down, across]; NaN where no position of a cell exists yet."""
    positions, steps = order.size, result.num_steps
    born = np.maximum(1, order - result.prompt_length + 1)
    edges = np.arange(0, positions, wide)
    starts = range(1, steps + 1, tall)
    grid = np.full((len(starts), edges.size), np.nan)
    for row, start in zip(grid, starts, strict=True):
        end = min(start + tall - 1, steps)
        exist = np.maximum(0, end - np.maximum(start, born) + 1)
        there = np.add.reduceat(exist, edges)
        held = np.add.reduceat(_kept_steps(result, order, born, start, end), edges)
        np.divide(held, there, out=row, where=there > 0)
    return grid


def _rows(covered: Sequence[Rectangle], extent: tuple[int, int], size: tuple[int, int]) -> list[Row]:
    """Give rectangles in positions and steps, ends excluded."""
    (positions, steps), (wide, tall) = extent, size
    return [
        {
            "x": x0 * wide,
            "x2": min(x1 * wide, positions),
            "y": y0 * tall + 1,
            "y2": min(y1 * tall, steps) + 1,
            "kept": kept,
        }
        for x0, x1, y0, y1, kept in covered
    ]


def _kept_steps(
    result: Result, order: npt.NDArray[np.intp], born: npt.NDArray[np.intp], start: int, end: int
) -> FloatArray:
    """Count the steps from `start` to `end` after which each position is retained, averaged over groups."""
    if result.outcome.retained is not None:
        sets = result.outcome.retained[start - 1 : end]
        total: FloatArray = sets.mean(axis=1)[:, order].sum(axis=0)
        return total
    gone = result.evicted_at[:, order]
    last = np.where(gone < 0, result.num_steps, gone - 1)
    spans = np.maximum(0, np.minimum(end, last) - np.maximum(start, born) + 1)
    mean: FloatArray = spans.mean(axis=0)
    return mean


def _panel(rows: list[Row], extent: tuple[int, int], wide: int, names: tuple[str | None, str], sort: str) -> alt.Chart:
    (positions, steps), (x_name, y_name) = extent, names
    seam = min(0.7, 0.4 * WIDTH * wide / positions)
    x = number("x", x_name, scale=alt.Scale(domain=[0, positions], nice=False), format="d")
    y = number("y", y_name, scale=alt.Scale(domain=[1, steps + 1], reverse=True, nice=False), format="d", tickCount=5)
    x["axis"]["grid"] = y["axis"]["grid"] = False
    tips = [
        alt.Tooltip("x:Q", title=f"from {'position' if sort == 'position' else 'rank'}"),
        alt.Tooltip("x2:Q", title="to before"),
        alt.Tooltip("y:Q", title="from step"),
        alt.Tooltip("y2:Q", title="to before"),
        alt.Tooltip("kept:Q", title="kept fraction", format=".3f"),
    ]
    # With coarse bins most fractions are near the budget's share; a root spreads the low ones out.
    colour = shades("kept fraction", [0, 1], kind="sqrt", values=[0, 0.1, 0.25, 0.5, 1], format=".2f")
    chart: alt.Chart = (
        alt.Chart(embed(rows))
        .mark_rect(strokeWidth=seam)
        .encode(
            x=alt.X(**x),
            x2="x2:Q",
            y=alt.Y(**y),
            y2="y2:Q",
            fill=alt.Fill("kept:Q", **colour),
            # Hides the seams between cells without hiding thin ones.
            stroke=alt.Stroke("kept:Q", scale=colour["scale"], legend=None),
            tooltip=tips,
        )
    )
    return chart


def _lines(result: Result, sort: str) -> alt.LayerChart:
    budget, prompt, steps = float(result.budget), result.prompt_length, result.num_steps
    if sort == "utility":
        ends: list[Row] = [{"x": budget, "y": 1}, {"x": budget, "y": steps + 1}]
        return layered(_path(ends, [5, 3]))
    newest = [{"x": max(0.0, prompt + step - 1 - budget), "y": step} for step in (1, steps + 1)]
    prompt_end: list[Row] = [{"x": prompt, "y": 1}, {"x": prompt, "y": steps + 1}]
    return layered(_path(newest, [5, 3]), _path(prompt_end, [1, 3]))


def _path(rows: Sequence[Row], dash: list[int]) -> alt.LayerChart:
    """Draw a line that can be seen on dark cells as well as on light ones."""
    base = alt.Chart(embed(rows)).encode(x="x:Q", y="y:Q")
    under = base.mark_line(color="white", strokeWidth=3, opacity=0.75)
    return layered(under, base.mark_line(color="black", strokeDash=dash, strokeWidth=1.2))


def evictions(results: Results) -> alt.VConcatChart:
    """Draw when tokens were evicted, one panel a result: of the prompt upwards, generated ones downwards.

    Numbers of tokens in a bin of steps, averaged over the retention groups, on a scale that is linear below 1 and
    logarithmic above, because the first eviction takes most of the prompt at once.

    Parameters
    ----------
    results : Result or sequence of Result
        Irreversible results.

    Raises
    ------
    KvsimError
        On a shadow result, which evicts nothing, or if nothing was evicted.
    """
    found = results_of(results)
    if any(result.mode == "shadow" for result in found):
        raise KvsimError("a shadow result evicts nothing; give irreversible ones")
    steps = max(result.num_steps for result in found)
    size = -(-(steps + 1) // BARS)
    bins = -(-(steps + 1) // size)
    counts = [_counts(result, size, bins) for result in found]
    most = max(float(count.max()) for count in counts)
    if most == 0:
        raise KvsimError("nothing was evicted")
    if sum(np.count_nonzero(count) for count in counts) > MAP_ROWS:
        raise KvsimError(f"{len(found)} results are too many for one chart of evictions")
    panels = []
    for last, name, count in zip(range(len(found) - 1, -1, -1), series_of(found), counts, strict=True):
        rows = [
            {"step": bin_ * size, "of": of, "level": sign * value, "tokens": value}
            for bin_, pair in enumerate(count.T.tolist())
            for of, sign, value in zip(("prompt", "generated"), (1, -1), pair, strict=True)
            if value
        ] or [{"step": 0, "of": "prompt", "level": 0, "tokens": 0}]
        x_name = None if last else "decode step t"
        panels.append(_bars(rows, size, bins * size, most, x_name).properties(title=panel_title(name)))
    notes = [*notes_of(found), "above: tokens of the prompt; below: generated tokens; step 0: before the first step"]
    return stacked(panels, heading("Evicted tokens", *notes))


def _counts(result: Result, size: int, bins: int) -> FloatArray:
    """Count evicted tokens, [2, bins]: of the prompt and generated, averaged over groups."""
    gone = result.evicted_at
    found = np.zeros((2, bins))
    for row, part in enumerate((gone[:, : result.prompt_length], gone[:, result.prompt_length :])):
        found[row] = np.bincount(part[part >= 0] // size, minlength=bins)
    found /= gone.shape[0]
    return found


def _bars(rows: list[Row], size: int, end: int, most: float, x_name: str | None) -> alt.LayerChart:
    scale = alt.Scale(type="symlog", constant=1, domain=[-most, most], nice=False)
    ticks = [sign * 10**power for power in range(1, 7) for sign in (-1, 1) if 10**power <= most] + [0]
    y = number("level", "tokens evicted" + (f" in {size} steps" if size > 1 else ""), scale=scale, values=sorted(ticks))
    y["axis"]["labelExpr"] = "abs(datum.value)"
    x = number("start", x_name, scale=alt.Scale(domain=[-0.5, end - 0.5], nice=False), format="d")
    fill = alt.Scale(domain=["prompt", "generated"], range=[PROMPT_FILL, GENERATED_FILL])
    bars = (
        alt.Chart(embed(rows))
        .transform_calculate(start="datum.step - 0.5", end=f"datum.step + {size - 0.5}")
        .mark_bar(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X(**x),
            x2="end:Q",
            y=alt.Y(**y),
            y2=alt.datum(0),
            color=alt.Color("of:N", scale=fill, legend=alt.Legend(title="evicted tokens of the")),
            tooltip=[
                alt.Tooltip("step:Q", title="step" if size == 1 else f"first of {size} steps"),
                alt.Tooltip("of:N", title="of the"),
                alt.Tooltip("tokens:Q", title="tokens, mean over groups", format=".4g"),
            ],
        )
    )
    zero = alt.Chart(embed([{"level": 0}])).mark_rule(color=GREY).encode(y="level:Q")
    return layered(bars, zero, width=WIDTH, height=110)
