"""Charts of who was kept when: the retention map and the histogram of evictions."""

from collections.abc import Sequence
from typing import Literal

import altair as alt
import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.charts.cells import Range, Window, choose_bins, kept_fractions, window_of
from kvsim.charts.intake import Results, notes_of, results_of, series_of
from kvsim.charts.rectangles import Rectangle, rectangles
from kvsim.charts.style import GREY, WIDTH, Row, embed, heading, layered, number, panel_title, shades, stacked
from kvsim.errors import KvsimError, unknown_name
from kvsim.plan import FloatArray
from kvsim.policies.ema import Ema
from kvsim.policy import Policy, parse
from kvsim.result import Result

__all__ = [
    "MAX_CELLS",
    "evictions",
    "reference_utility",
    "retained_shares",
    "retention",
    "retention_overview",
    "retention_rows",
]

MAP_ROWS = 4800
"""Rectangles of all panels of a map together; the rest of what a chart embeds is for its lines."""

MAX_CELLS = 60_000
OVERVIEW_CELLS = 1500

FRAME = -1
"""In the place of a kept fraction: the row is the frame of a window."""

MEANING = "attention to a position, mean over layers, heads and the steps at which it is there (full cache)"
"""What `reference_utility` gives."""

Sort = Literal["position", "utility"]
ORDERS = ("position", "utility")
BARS = 60
PROMPT_FILL, GENERATED_FILL = "#1f3b63", "#a9bedb"
DASHES_OF = {"budget": [5, 3], "newest": [5, 3], "prompt": [1, 3]}


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
    sort: Sort = "position",
    utility: npt.ArrayLike | None = None,
    meaning: str = MEANING,
    cells: int = MAP_ROWS,
    positions: Range | None = None,
    steps: Range | None = None,
    group: int | None = None,
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
    positions : (first, end), optional
        The columns shown, the end excluded; numbers of columns by utility where they are sorted so. All by default.
    steps : (first, last), optional
        The steps shown, both included. All by default.
    group : int, optional
        The one retention group shown, 0 to G - 1, and its budget; the mean over all groups by default.

    Raises
    ------
    KvsimError
        If `cells` is out of range, the results are of several recordings, `utility` is missing or has another
        length, or what should be shown does not exist.
    """
    found, window = _shown(results, sort, utility, positions, steps, group)
    if not 1 <= cells <= MAX_CELLS:
        raise KvsimError(f"cells must be from 1 to {MAX_CELLS:,}, over all panels, got {cells:,}")
    grids, wide, tall = _fitting(found, window, cells)
    panels = []
    height = 240 if len(found) == 1 else 150
    for result, name, covered in zip(found, _panel_names(found), grids, strict=True):
        panel = _panel(_rows(covered, window, wide, tall), window, wide, tall, sort)
        if result is not found[-1]:
            # Only the lowest panel names the axis that all have in common.
            panel.encoding.x.title = None
        lines = _lines(result, window, sort)
        panels.append(layered(panel, *lines, width=WIDTH, height=height, title=panel_title(name)))
    several_modes = len({result.mode for result in found}) > 1
    about = f"reference utility: {meaning}" if sort == "utility" else ""
    notes = [*notes_of(found, modes=not several_modes), _key(sort), _part(found, window, sort), about]
    return stacked(panels, heading("Retained positions", *notes), "fill", "stroke")


def retention_overview(
    result: Result,
    *,
    sort: Sort = "position",
    utility: npt.ArrayLike | None = None,
    group: int | None = None,
    window: tuple[Range, Range] | None = None,
) -> alt.Chart:
    """Draw the whole map of one result in at most 1,500 cells, to choose a window of `retention` in by brushing.

    Parameters
    ----------
    result : Result
        Irreversible or shadow.
    sort, utility, group
        As for `retention`.
    window : (positions, steps), optional
        Ranges, as for `retention`, that are framed.

    Returns
    -------
    Chart
        A single view; its parameter ``window`` is an interval of columns ``x`` and steps ``y``.

    Raises
    ------
    KvsimError
        As `retention`.
    """
    found, whole = _shown(result, sort, utility, None, None, group)
    wide, tall = choose_bins(whole.columns.size, whole.down, OVERVIEW_CELLS)
    rows = _rows(rectangles(kept_fractions(result, whole, wide, tall)), whole, wide, tall)
    if window is not None:
        part = _shown(result, sort, utility, *window, group)[1]
        rows.append({"x": part.x, "x2": part.end, "y": part.first, "y2": part.last + 1, "kept": FRAME})
    chart = _panel(rows, whole, wide, tall, sort)
    if window is not None:
        # A rectangle without a fill, last of all. A brush with a value would be sent back as if it had been drawn.
        of_frame = f"datum.kept == {FRAME}"
        chart.encoding.fill["condition"] = {"test": of_frame, "value": None}
        chart.encoding.stroke["condition"] = {"test": of_frame, "value": "black"}
        width = {"condition": {"test": of_frame, "value": 2}, "value": chart.mark.strokeWidth}
        chart = chart.encode(strokeWidth=alt.StrokeWidthValue(**width))
    mark = alt.BrushConfig(fill="black", fillOpacity=0.08, stroke="black", strokeWidth=2)
    brush = alt.selection_interval(name="window", encodings=["x", "y"], mark=mark)
    name = panel_title(f"overview: {_panel_names(found)[0]}, {result.mode}")
    return chart.properties(width=WIDTH, height=140, title=name).add_params(brush)


def retention_rows(
    results: Results,
    *,
    sort: Sort = "position",
    utility: npt.ArrayLike | None = None,
    positions: Range | None = None,
    steps: Range | None = None,
    group: int | None = None,
) -> list[Row]:
    """Give the cells of `retention` in its default bins as rows, one a cell; parameters and errors are its own.

    Returns
    -------
    list of dict
        ``policy``, ``mode``, ``first_position`` and ``last_position`` (by utility ``first_rank`` and ``last_rank``,
        from 0, and where a bin is one column its ``position``), ``first_step``, ``last_step``, ``kept`` (fraction);
        none for a cell without a position that exists yet.
    """
    found, window = _shown(results, sort, utility, positions, steps, group)
    wide, tall = choose_bins(window.columns.size, window.down, MAP_ROWS // len(found))
    across, down = window.edges(wide, tall)
    what = "position" if sort == "position" else "rank"
    rows: list[Row] = []
    for result in found:
        grid = kept_fractions(result, window, wide, tall)
        for y, x in np.argwhere(~np.isnan(grid)).tolist():
            row: Row = {"policy": result.policy, "mode": result.mode}
            row |= {f"first_{what}": across[x], f"last_{what}": across[x + 1] - 1}
            if wide == 1 and sort == "utility":
                row["position"] = int(window.columns[x])
            rows.append(row | {"first_step": down[y], "last_step": down[y + 1] - 1, "kept": float(grid[y, x])})
    return rows


def retained_shares(
    results: Results,
    *,
    sort: Sort = "position",
    utility: npt.ArrayLike | None = None,
    positions: Range | None = None,
    steps: Range | None = None,
    group: int | None = None,
) -> list[float | None]:
    """Give for each result the kept fraction of all that `retention` shows; its parameters and errors.

    Returns
    -------
    list
        One a result, each once; None where no position exists yet.
    """
    found, window = _shown(results, sort, utility, positions, steps, group)
    whole = [float(kept_fractions(result, window, window.columns.size, window.down)[0, 0]) for result in found]
    return [None if np.isnan(share) else share for share in whole]


def _shown(
    results: Results,
    sort: str,
    utility: npt.ArrayLike | None,
    positions: Range | None,
    steps: Range | None,
    group: int | None,
) -> tuple[list[Result], Window]:
    found = results_of(results)
    if sort not in ORDERS:
        raise unknown_name("sort", sort, ORDERS)
    if len({result.trace_hash for result in found}) > 1:
        raise KvsimError("a retention map shows one recording; the results are of several")
    total = found[0].prompt_length + found[0].num_steps
    order = np.arange(total) if sort == "position" else _by_utility(utility, total)
    return found, window_of(found, order, positions, steps, group)


def _fitting(found: Sequence[Result], window: Window, cells: int) -> tuple[list[list[Rectangle]], int, int]:
    """Cover the panels with rectangles, of the finest bins that one chart can embed; give the bins too."""
    while True:
        room = cells // len(found)
        if room < 4:
            raise KvsimError(f"a retention map of {cells:,} cells holds {cells // 4} panels, got {len(found)}")
        wide, tall = choose_bins(window.columns.size, window.down, room)
        covered = [rectangles(kept_fractions(result, window, wide, tall)) for result in found]
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
    lines = "dashed: the budget B"
    if sort == "position":
        lines = "dashed: the B newest positions begin here; dotted: end of the prompt"
    return f"{lines}; white: positions that are not there yet"


def _part(found: Sequence[Result], window: Window, sort: str) -> str:
    """Say which groups and which part of the recording a map shows, where that is not plain."""
    said = []
    counts = {result.plan.groups.count for result in found}
    if window.group is not None:
        names = dict.fromkeys(result.plan.groups.label(window.group) for result in found)
        budgets = dict.fromkeys(f"{_budget(result, window):g}" for result in found)
        said.append(f"{' and '.join(names)} alone, with B = {' and '.join(budgets)}")
    elif counts != {1}:
        said.append(f"mean over {' and '.join(map(str, sorted(counts)))} groups")
    steps = found[0].num_steps
    total = found[0].prompt_length + steps
    if window.columns.size < total:
        name = "positions" if sort == "position" else "ranks"
        said.append(f"{name} {window.x} to {window.end - 1} of {total}")
    if window.down < steps:
        said.append(f"steps {window.first} to {window.last} of {steps}")
    return "; ".join(said)


def _budget(result: Result, window: Window) -> float:
    return float(result.budget if window.group is None else result.plan.budgets[window.group])


def _by_utility(utility: npt.ArrayLike | None, positions: int) -> npt.NDArray[np.intp]:
    if utility is None:
        raise KvsimError("sort='utility' needs utility=, such as kvsim.charts.reference_utility(trace)")
    given = np.asarray(utility, dtype=np.float64)
    if given.shape != (positions,) or np.isnan(given).any():
        raise KvsimError(f"utility must be {positions} numbers, one a position, got shape {list(given.shape)}")
    return np.argsort(-given, kind="stable")


def _rows(covered: Sequence[Rectangle], window: Window, wide: int, tall: int) -> list[Row]:
    """Give rectangles in columns and steps, ends excluded."""
    across, down = window.edges(wide, tall)
    return [
        {"x": across[x0], "x2": across[x1], "y": down[y0], "y2": down[y1], "kept": kept}
        for x0, x1, y0, y1, kept in covered
    ]


def _panel(rows: list[Row], window: Window, wide: int, tall: int, sort: str) -> alt.Chart:
    x_name = "position" if sort == "position" else "position, by reference utility (high → low)"
    x_name += f"; bins of {wide}" if wide > 1 else ""
    y_name = "decode step t" + (f"; bins of {tall}" if tall > 1 else "")
    seam = min(0.7, 0.4 * WIDTH * wide / window.columns.size)
    x = number("x", x_name, scale=alt.Scale(domain=[window.x, window.end], nice=False), format="d")
    y_scale = alt.Scale(domain=[window.first, window.last + 1], reverse=True, nice=False)
    y = number("y", y_name, scale=y_scale, format="d", tickCount=5)
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
            x2=alt.X2("x2:Q"),
            y=alt.Y(**y),
            y2=alt.Y2("y2:Q"),
            fill=alt.Fill("kept:Q", **colour),
            # Hides the seams between cells without hiding thin ones.
            stroke=alt.Stroke("kept:Q", **colour),
            tooltip=tips,
        )
    )
    return chart


def _lines(result: Result, window: Window, sort: str) -> list[alt.Chart]:
    """Draw the budget, or the newest B positions and the end of the prompt, where the window has them.

    The lines have a light edge, to be seen on dark cells as well as on light ones.
    """
    budget, prompt = _budget(result, window), float(result.prompt_length)
    ends = window.first, window.last + 1
    paths = {"budget": [budget, budget]}
    if sort == "position":
        paths = {"newest": [max(0.0, prompt + step - 1 - budget) for step in ends], "prompt": [prompt, prompt]}
    rows = [
        {"line": name, "x": x, "y": y}
        for name, xs in paths.items()
        if max(xs) >= window.x and min(xs) <= window.end
        for x, y in zip(xs, ends, strict=True)
    ]
    if not rows:
        return []
    # All lines are one layer: Altair copies every layer of a chart many times.
    base = alt.Chart(embed(rows)).encode(alt.X("x:Q"), alt.Y("y:Q"), alt.Detail("line:N"))
    dashes = alt.Scale(domain=list(DASHES_OF), range=list(DASHES_OF.values()))
    return [
        base.mark_line(color="white", strokeWidth=3, opacity=0.75, clip=True),
        base.mark_line(color="black", strokeWidth=1.2, clip=True).encode(
            strokeDash=alt.StrokeDash("line:N", scale=dashes, legend=None)
        ),
    ]


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
