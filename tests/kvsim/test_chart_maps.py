"""Retention maps: every cell is what the replay retained, of the whole recording, of a window and of one group."""

import itertools

import numpy as np
import pytest
from cases import SAMPLES
from specs import checked, rows_of_chart

import kvsim
from kvsim import charts
from kvsim.charts.rectangles import rectangles
from kvsim.errors import KvsimError

NEEDLE, MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("needle-512", "multineedle-256", "long-64"))
POLICIES = ["ema:0.8", "ema:0.95,over=step", "tova", "snapkv:16", "random:7"]


@pytest.fixture(scope="module")
def results():
    return kvsim.replay_many(MULTI, POLICIES)


@pytest.fixture(scope="module")
def shadows():
    return kvsim.replay_many(MULTI, ["ema:0,over=step", "ema:0.8", "tova"], shadow=True)


def kept_fraction(result, order, x, y, wide, tall):
    """The mean over positions, steps and groups of one cell, counted one by one."""
    kept = exist = 0
    groups = result.plan.groups.count
    for step in range(y, min(y + tall, result.num_steps + 1)):
        sets = [set(result.retained(step, g).tolist()) for g in range(groups)]
        for position in order[x : x + wide].tolist():
            if position < result.prompt_length + step:
                exist += groups
                kept += sum(position in one for one in sets)
    return kept / exist if exist else None


@pytest.mark.parametrize("sort", ["position", "utility"])
def test_a_retention_map_counts_what_is_kept(results, shadows, sort):
    trace = kvsim.open_trace(MULTI)
    utility = charts.reference_utility(trace)
    shown = [results[0], results[2], shadows[1]]
    chart = charts.retention(shown, sort=sort, utility=utility, cells=240)
    checked(chart)
    tables = [table for table in rows_of_chart(chart) if "kept" in table[0]]
    assert len(tables) == 3
    order = np.argsort(-utility, kind="stable") if sort == "utility" else np.arange(trace.num_positions)
    encoding = chart.to_dict()["vconcat"][-1]["layer"][0]["encoding"]
    assert "bins of 20" in encoding["x"]["title"]
    tall = int(encoding["y"]["title"].rpartition(" ")[2])
    for result, table in zip(shown, tables, strict=True):
        drawn = {}
        for row in table:
            for cell in itertools.product(range(row["x"], row["x2"], 20), range(row["y"], row["y2"], tall)):
                assert cell not in drawn
                drawn[cell] = row["kept"]
        for x, y in itertools.product(range(0, trace.num_positions, 20), range(1, 25, tall)):
            expected = kept_fraction(result, order, x, y, 20, tall)
            assert drawn.get((x, y)) == (None if expected is None else pytest.approx(expected, rel=1e-5))


def test_rectangles_cover_a_grid_exactly():
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (3, 7), (9, 4), (1, 12), (12, 1)):
        for levels in (1, 2, 5):
            grid = rng.integers(levels, size=shape) / 4
            grid[rng.random(shape) < 0.2] = np.nan
            again = np.full(shape, np.nan)
            for x0, x1, y0, y1, value in rectangles(grid):
                assert np.isnan(again[y0:y1, x0:x1]).all()
                again[y0:y1, x0:x1] = value
            np.testing.assert_array_equal(again, grid)
    assert rectangles(np.zeros((5, 8))) == [(0, 8, 0, 5, 0.0)]
    assert len(rectangles(np.tile([0.0, 1, 0, 1], (6, 1)))) == len(rectangles(np.tile([0.0, 1, 0, 1], (6, 1)).T)) == 4


def test_a_fine_retention_map_draws_every_token_and_step():
    trace = kvsim.open_trace(NEEDLE)
    result = kvsim.replay(trace, "ema:0.8")
    chart = charts.retention(result, cells=60_000)
    (table, *_) = (rows for rows in rows_of_chart(chart) if "kept" in rows[0])
    assert len(table) < trace.num_positions, "kept runs of a token, and joined ones of those evicted at once"
    encoding = chart.to_dict()["vconcat"][-1]["layer"][0]["encoding"]
    assert (encoding["x"]["title"], encoding["y"]["title"]) == ("position", "decode step t")
    for step in (1, 20, trace.num_steps):
        kept = [p for row in table if row["kept"] and row["y"] <= step < row["y2"] for p in range(row["x"], row["x2"])]
        assert sorted(kept) == result.retained(step).tolist()
    noisy = [kvsim.replay(trace, f"ema:{alpha},over=step", shadow=True) for alpha in (0, 0.3, 0.6)]
    checked(charts.retention(noisy, cells=60_000))
    for cells in (60_001, 0):
        with pytest.raises(KvsimError, match=f"cells must be from 1 to 60,000, over all panels, got {cells:,}"):
            charts.retention(result, cells=cells)


def test_reference_utility_is_the_mean_over_the_steps_a_position_has_seen():
    trace = kvsim.open_trace(LONG)
    utility = charts.reference_utility(trace)
    for position in (0, 30, trace.prompt_length, trace.num_positions - 1):
        own = [
            trace.score_rows(step)[:, position].mean()
            for step in range(1, trace.num_steps + 1)
            if position < trace.prompt_length + step
        ]
        assert utility[position] == pytest.approx(np.mean(own), rel=1e-6)


def test_the_raw_sets_are_a_shadow_of_the_layer_mean(results, shadows):
    np.testing.assert_array_equal(shadows[0].outcome.metrics["churn"], results[0].outcome.metrics["raw_churn"])
    titles = [panel["title"]["text"] for panel in charts.retention(shadows[:2]).to_dict()["vconcat"]]
    assert titles == ["raw top-B: ema:0,over=step", "ema:0.8"]
    both = charts.retention([shadows[0], results[0]]).to_dict()
    titles = [panel["title"]["text"] for panel in both["vconcat"]]
    assert titles == ["raw top-B: ema:0,over=step, shadow mode: nothing is evicted", "ema:0.8, irreversible"]
    small = both["title"]["subtitle"]
    assert small[1] == "open loop; B = 25 tokens"
    assert "white: positions that are not there yet" in small[2]


def test_small_print_says_what_a_number_depends_on(results):
    trace = kvsim.open_trace(MULTI)
    utility = charts.reference_utility(trace)
    sorted_ = charts.retention(results[0], sort="utility", utility=utility).to_dict()["title"]["subtitle"]
    assert sorted_[-1].startswith("reference utility: attention to a position, mean over layers")
    named = charts.retention(results[0], sort="utility", utility=utility, meaning="mine").to_dict()
    assert named["title"]["subtitle"][-1] == "reference utility: mine"
    rows = [result.summary() for result in results]
    small = charts.alpha_sensitivity(rows).to_dict()["title"]["subtitle"]
    assert small[1] == "irreversible; open loop; B = 10% of the prompt = 25 tokens"
    fixed = [{**row, "policy": row["policy"].replace("10%", "25")} for row in rows]
    assert "B = 25 tokens" in charts.alpha_sensitivity(fixed).to_dict()["title"]["subtitle"][1]
    mixed = charts.alpha_sensitivity([*rows, fixed[0] | {"budget": 9}]).to_dict()["title"]["subtitle"]
    assert "B =" not in mixed[1]


def test_a_retention_map_refuses_what_it_cannot_show(results):
    with pytest.raises(KvsimError, match="one recording"):
        charts.retention([results[0], kvsim.replay(LONG, "ema:0.8")])
    with pytest.raises(KvsimError, match="needs utility="):
        charts.retention(results, sort="utility")
    with pytest.raises(KvsimError, match=r"279 numbers.*\[3\]"):
        charts.retention(results, sort="utility", utility=[1, 2, 3])
    with pytest.raises(KvsimError, match="unknown sort 'age'"):
        charts.retention(results, sort="age")


def test_evictions_are_all_there(results):
    chart = charts.evictions(results)
    checked(chart)
    tables = [table for table in rows_of_chart(chart) if "of" in table[0]]
    for result, table in zip(results, tables, strict=True):
        gone = result.evicted_at
        assert sum(row["tokens"] for row in table) == pytest.approx((gone >= 0).sum() / gone.shape[0], rel=1e-5)
        first = {row["step"]: row["tokens"] for row in table if row["of"] == "prompt"}
        when = 0 if result.policy.startswith("snapkv") else 1
        assert first[when] == pytest.approx((gone[:, : result.prompt_length] == when).sum() / gone.shape[0], rel=1e-5)
        assert all(row["level"] == row["tokens"] * (1 if row["of"] == "prompt" else -1) for row in table)


def test_evictions_need_evictions(shadows):
    with pytest.raises(KvsimError, match="shadow"):
        charts.evictions(shadows)
    with pytest.raises(KvsimError, match="nothing was evicted"):
        charts.evictions(kvsim.replay(MULTI, "full"))
    both = charts.evictions(kvsim.replay_many(MULTI, ["full", "tova"]))
    checked(both)
    assert [panel["title"]["text"] for panel in both.to_dict()["vconcat"]] == ["full", "tova"]


def panel_of(chart, index=0):
    """A panel's rows of cells, and its layers."""
    panel = chart.to_dict()["vconcat"][index]
    table = [table for table in rows_of_chart(chart) if "kept" in table[0]][index]
    return table, panel["layer"]


def drawn_cells(table):
    """What is drawn at each column and step, one by one."""
    drawn = {}
    for row in table:
        for cell in itertools.product(range(row["x"], row["x2"]), range(row["y"], row["y2"])):
            assert cell not in drawn
            drawn[cell] = row["kept"]
    return drawn


@pytest.mark.parametrize("sort", ["position", "utility"])
def test_a_window_shows_its_own_columns_and_steps_alone(results, shadows, sort):
    trace = kvsim.open_trace(MULTI)
    utility = charts.reference_utility(trace)
    order = np.argsort(-utility, kind="stable") if sort == "utility" else np.arange(trace.num_positions)
    shown = [results[0], shadows[1]]
    chart = charts.retention(shown, sort=sort, utility=utility, positions=(210, 279), steps=(7, 19))
    checked(chart)
    for index, result in enumerate(shown):
        table, layers = panel_of(chart, index)
        x, y = (layers[0]["encoding"][name] for name in "xy")
        assert (x["scale"]["domain"], y["scale"]["domain"]) == ([210, 279], [7, 20])
        assert "bins" not in y["title"]
        drawn = drawn_cells(table)
        assert {(column, step) for column, step in drawn} <= set(itertools.product(range(210, 279), range(7, 20)))
        for column, step in itertools.product(range(210, 279), range(7, 20)):
            position = order[column]
            there = position < trace.prompt_length + step
            expected = float(position in result.retained(step)) if there else None
            assert drawn.get((column, step)) == expected
    notes = chart.to_dict()["title"]["subtitle"]
    name = "positions" if sort == "position" else "ranks"
    assert f"{name} 210 to 278 of 279; steps 7 to 19 of 24" in notes


def test_bins_of_a_window_start_at_its_edge(results):
    rows = charts.retention_rows(results[0], positions=(7, 250), steps=(3, 24))
    assert (rows[0]["first_position"], rows[0]["first_step"]) == (7, 3)
    wide = rows[0]["last_position"] - 6
    assert wide > 1, "the window is larger than its cells"
    assert max(row["last_position"] for row in rows) == 249
    order = np.arange(results[0].prompt_length + results[0].num_steps)
    for row in rows[::97]:
        size = row["last_position"] - row["first_position"] + 1, row["last_step"] - row["first_step"] + 1
        want = kept_fraction(
            results[0], order[: row["last_position"] + 1], row["first_position"], row["first_step"], *size
        )
        assert row["kept"] == pytest.approx(want)


def test_one_group_is_its_own_sets_with_its_own_budget(shadows):
    trace = kvsim.open_trace(MULTI)
    uneven = kvsim.replay(trace, "pyramidkv:16")
    group = 29
    budget = int(uneven.plan.budgets[group])
    assert budget != uneven.budget
    chart = charts.retention(uneven, positions=(200, 279), group=group)
    table, layers = panel_of(chart)
    drawn = drawn_cells(table)
    for step in range(1, trace.num_steps + 1):
        kept = [x for x in range(200, 279) if drawn.get((x, step))]
        assert kept == [p for p in uneven.retained(step, group).tolist() if p >= 200]
    dashed = chart.to_dict()["datasets"][layers[1]["data"]["name"]]
    assert dashed[0]["x"] == max(0, trace.prompt_length - budget)
    assert (
        f"{uneven.plan.groups.label(group)} alone, with B = {budget}; positions 200 to 278 of 279"
        in chart.to_dict()["title"]["subtitle"]
    )
    tova = shadows[2]
    (share,) = charts.retained_shares(tova, steps=(5, 5), group=2)
    assert share == pytest.approx(tova.retained(5, 2).size / (trace.prompt_length + 5))


def test_rows_are_the_cells(results, shadows):
    trace = kvsim.open_trace(MULTI)
    utility = charts.reference_utility(trace)
    shown = [results[2], shadows[2]]
    rows = charts.retention_rows(shown, sort="utility", utility=utility, positions=(0, 90), steps=(1, 24))
    assert {row["mode"] for row in rows} == {"irreversible", "shadow"}
    order = np.argsort(-utility, kind="stable")
    chart = charts.retention(shown, sort="utility", utility=utility, positions=(0, 90), steps=(1, 24))
    for index, result in enumerate(shown):
        own = [row for row in rows if row["mode"] == result.mode]
        assert all(row["position"] == order[row["first_rank"]] for row in own)
        listed = {(row["first_rank"], row["first_step"]): row["kept"] for row in own}
        assert listed == pytest.approx(drawn_cells(panel_of(chart, index)[0]), rel=1e-5)
    shares = charts.retained_shares(shown, positions=(0, 90), steps=(1, 24))
    whole = [row["kept"] for row in charts.retention_rows(results[2], positions=(0, 90))]
    assert shares[0] == pytest.approx(np.mean(whole))
    assert charts.retained_shares(shown, positions=(278, 279), steps=(1, 3)) == [None, None]


def test_an_overview_is_one_small_view_with_a_brush(results):
    whole = charts.retention_overview(results[0], window=((10, 60), (2, 9)))
    rows = checked(whole)
    assert len(rows) <= 1500
    spec = whole.to_dict()
    (brush,) = spec["params"]
    assert (brush["name"], brush["select"]["encodings"]) == ("window", ["x", "y"])
    assert rows[-1] == {"x": 10, "x2": 60, "y": 2, "y2": 10, "kept": -1}
    # A brush that begins somewhere is reported as if it had been drawn.
    assert "value" not in brush
    assert "layer" not in spec
    assert checked(charts.retention_overview(results[0])) == rows[:-1]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"positions": (5, 5)}, r"positions must be \(first, end\) with 0 <= first < end <= 279, got \(5, 5\)"),
        ({"positions": (0, 280)}, r"end <= 279, got \(0, 280\)"),
        ({"positions": (-1, 3)}, r"got \(-1, 3\)"),
        ({"positions": 7}, "end <= 279, got 7"),
        ({"steps": (0, 4)}, r"steps must be \(first, last\) with 1 <= first <= last <= 24, got \(0, 4\)"),
        ({"steps": (9, 8)}, r"got \(9, 8\)"),
        ({"steps": (1, 25)}, r"got \(1, 25\)"),
        ({"steps": (1.5, 2)}, r"got \(1.5, 2\)"),
        ({"group": 1}, r"ema:0.8/budget=10%: group must be in 0..0, got 1"),
    ],
)
def test_a_part_that_does_not_exist_is_refused(results, part, message):
    with pytest.raises(KvsimError, match=message):
        charts.retention(results[0], **part)
