"""Every chart: a valid specification with few, finite rows that are what the replay computed."""

import itertools
import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from cases import SAMPLES
from making import Recording
from specs import checked, rows_of_chart, series, views

import kvsim
from kvsim import charts
from kvsim.charts import style
from kvsim.errors import KvsimError
from kvsim.intervals import over_traces
from kvsim.synth import Synthetic, write_synthetic
from kvsim.tradeoff import decompose

NEEDLE, MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("needle-512", "multineedle-256", "long-64"))
POLICIES = ["ema:0.8", "ema:0.95,over=step", "tova", "snapkv:16", "random:7"]


@pytest.fixture(scope="module")
def results():
    return kvsim.replay_many(MULTI, POLICIES)


@pytest.fixture(scope="module")
def shadows():
    return kvsim.replay_many(MULTI, ["ema:0,over=step", "ema:0.8", "tova"], shadow=True)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    out = tmp_path_factory.mktemp("charts") / "large"
    return write_synthetic(Synthetic(prompt=4096, steps=512, layers=2, heads=1), out)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    return kvsim.open_trace(Recording(steps=1).write(tmp_path_factory.mktemp("charts") / "one", "qkv"))


def six(values):
    """As a chart rounds."""
    return [float(f"{value:.6g}") for value in values]


# --- style ------------------------------------------------------------------------------------------------------------


def lightness(colour):
    """CIE L* of an sRGB colour."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    ]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16 if y > 0.008856 else 903.3 * y


def test_numbers_are_readable_in_grey():
    steps = np.diff([lightness(colour) for colour in style.SEQUENTIAL])
    assert (steps < -9).all()


def test_parts_differ_in_lightness_from_their_neighbours():
    steps = np.abs(np.diff([lightness(colour) for colour in style.PARTS]))
    assert (steps > 15).all()


def test_lines_differ_without_hue():
    for length in (2, len(style.SHAPES), 60):
        drawn = [
            style.distinct([str(i) for i in range(length)], "policy")[name].to_dict()
            for name in ("shape", "strokeDash")
        ]
        looks = list(
            zip(*(json.dumps(one["scale"]["range"]) and map(str, one["scale"]["range"]) for one in drawn), strict=True)
        )
        assert len(set(looks)) == length
    assert len(set(style.SHAPES)) == len(style.SHAPES)
    assert all(lightness(colour) < 75 for colour in style.COLOURS)


def test_every_chart_of_lines_uses_dash_and_shape(results):
    for chart in (charts.kept_mass(results), charts.alpha_sensitivity(results), charts.budget_curves(results)):
        channels = {name for view in views(chart.to_dict()) for name in view.get("encoding", {})}
        assert {"color", "strokeDash", "shape", "tooltip"} <= channels


def test_embedding_refuses_what_cannot_be_drawn():
    with pytest.raises(KvsimError, match="'x': nan"):
        style.embed([{"x": float("nan")}])
    with pytest.raises(KvsimError, match="'x': None"):
        style.embed([{"x": None}])
    with pytest.raises(KvsimError, match="5000 rows, got 5001"):
        style.embed([{"x": 1}] * 5001)
    with pytest.raises(KvsimError, match="nothing to draw"):
        style.embed([])


def test_altair_stays_out_until_a_chart_is_wanted():
    code = "import sys, kvsim, kvsim.cli; print(sorted({'altair', 'polars'} & set(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


# --- lines over steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric", ["kept_mass", "raw_agreement", "raw_top_evicted", "output_error", "ties", "retained"]
)
def test_a_timeline_is_the_metric(results, metric):
    chart = charts.timeline(results, metric)
    checked(chart)
    drawn = series(chart, "value")
    assert list(drawn) == POLICIES
    for result, values in zip(results, drawn.values(), strict=True):
        own = result.outcome.metrics[metric]
        assert values == six(own[~np.isnan(own)])


def test_every_metric_of_a_replay_has_a_chart(results):
    from kvsim.engines.outcome import METRICS

    for metric in METRICS:
        checked(charts.timeline(results, metric))
    with pytest.raises(KvsimError, match=r"unknown metric 'mass'.*kept_mass"):
        charts.timeline(results, "mass")


def test_output_error_says_what_it_needs():
    with pytest.raises(KvsimError, match="needs a recording with values"):
        charts.timeline(kvsim.replay(NEEDLE, "tova"), "output_error")


def test_churn_stands_beside_raw_churn_and_the_bound(results, shadows):
    chart = charts.churn([results[0], shadows[1]])
    checked(chart)
    drawn = series(chart, "value")
    assert list(drawn) == ["ema:0.8", "ema:0.8 (shadow)", "raw top-B"]
    assert drawn["raw top-B"] == six(results[0].outcome.metrics["raw_churn"][1:])
    assert drawn["ema:0.8 (shadow)"] == six(shadows[1].outcome.metrics["churn"][1:])
    levels = [row["level"] for row in checked(chart) if "level" in row]
    assert levels == six([2 / 26])


def test_churn_names_raw_sets_of_other_groups_apart(results):
    drawn = series(charts.churn(results[:1] + results[2:3]), "value")
    assert list(drawn) == ["ema:0.8", "tova", "raw top-B of ema:0.8", "raw top-B of tova"]
    uneven = kvsim.replay_many(MULTI, ["full", "tova", "pyramidkv:16"])
    drawn = series(charts.churn(uneven), "value")
    assert list(drawn)[3:] == ["raw top-B of tova", "raw top-B of pyramidkv:16"]
    for result, name in zip(uneven[1:], list(drawn)[3:], strict=True):
        assert drawn[name] == six(result.outcome.metrics["raw_churn"][1:])


def test_attended_pairs_count_what_each_step_saw(results):
    chart = charts.attended_pairs(results)
    checked(chart)
    drawn = series(chart, "value")
    for result, name in zip(results, POLICIES, strict=True):
        groups = result.plan.groups
        share = 30 * 3 // groups.count
        seen, total = [], 0
        for step in range(1, result.num_steps + 1):
            total += sum(result.retained(step - 1, g).size + 1 for g in range(groups.count)) * share
            seen.append(total)
        assert drawn[name] == six(seen)
    length = results[0].prompt_length
    assert drawn["full cache"] == six(np.cumsum([90 * (length + t) for t in range(1, results[0].num_steps + 1)]))


def test_a_long_line_is_thinned_to_means_and_ranges():
    from kvsim.charts.intake import thinned

    values = np.arange(10.0)
    values[4:6] = np.nan
    rows, size = thinned(np.arange(1, 11), values, 5)
    assert size == 2
    assert [row["step"] for row in rows] == [1.5, 3.5, 7.5, 9.5]
    assert (rows[0]["low"], rows[0]["value"], rows[0]["high"]) == (0, 0.5, 1)
    rows, size = thinned(np.arange(1, 11), values, 10)
    assert size == 1
    assert len(rows) == 8
    assert "low" not in rows[0]


# --- settings and costs -----------------------------------------------------------------------------------------------


def test_alpha_sensitivity_has_a_line_for_each_rule():
    policies = [f"ema:{alpha}{over}" for alpha in (0.9, 0.3) for over in ("", ",over=step")] + ["cumulative"]
    rows = [result.summary() for trace in (MULTI, LONG) for result in kvsim.replay_many(trace, policies)]
    chart = charts.alpha_sensitivity(rows, "raw_agreement")
    checked(chart)
    tables = rows_of_chart(chart)[::2]
    for trace, table in zip((MULTI, LONG), tables, strict=True):
        own = {row["policy"]: row["raw_agreement"] for row in rows if row["trace"] == trace.name}
        drawn = {(row["series"], row["x"]): row["y"] for row in table}
        expected = {("cumulative", x): own["cumulative/budget=10%"] for x in (0.3, 0.9)}
        for over in ("", ",over=step"):
            expected |= {(f"ema:alpha{over}", x): own[f"ema:{x}{over}/budget=10%"] for x in (0.3, 0.9)}
        assert drawn == {key: six([value])[0] for key, value in expected.items()}
    best = series(charts.alpha_sensitivity(rows, "raw_agreement", normalise=True), "y")
    assert max(best["ema:alpha"]) == 1
    with pytest.raises(KvsimError, match="no policy has an alpha"):
        charts.alpha_sensitivity([row for row in rows if row["policy"].startswith("cumulative")])
    with pytest.raises(KvsimError, match="unknown column 'mass'"):
        charts.alpha_sensitivity(rows, "mass")


def test_budget_and_cost_curves_join_the_budgets_of_a_policy():
    frame = kvsim.sweep(MULTI, ["ema:0.8", "streaming:4"], {"compression_ratio": [0.5, 0.9]})
    assert isinstance(frame, pl.DataFrame)
    chart = charts.budget_curves(frame)
    checked(chart)
    kept = dict(frame.select("policy", "kept_mass").iter_rows())
    expected = six([kept["ema:0.8/budget=10%"], kept["ema:0.8/budget=50%"]])
    assert series(chart, "y")["ema:0.8"] == expected
    assert series(chart, "x")["ema:0.8"] == [0.1, 0.5]
    tokens = charts.budget_curves([kvsim.replay(MULTI, "ema:0.8", budget=budget) for budget in (51, 17)])
    assert series(tokens, "x")["ema:0.8"] == six([17 / 255, 51 / 255])
    cost = charts.quality_cost(frame)
    checked(cost)
    assert series(cost, "y")["ema:0.8"] == expected
    assert series(cost, "x")["ema:0.8"] == six(sorted(frame["kv_bytes"].unique().to_list()))


def test_the_trade_off_is_stacked_with_its_signs():
    rows = [row for trace in (MULTI, NEEDLE) for row in decompose(trace, ["ema:0.8", "cumulative"], h=[4, 8])]
    chart = charts.tradeoff(rows)
    checked(chart)
    parts = [table for table in rows_of_chart(chart) if "part" in table[0]]
    totals = [table for table in rows_of_chart(chart) if "total" in table[0]]
    wanted = [row for row in rows if row.h == 8]
    assert any(row.boundary < 0 for row in wanted)
    for index, row in enumerate(wanted):
        own = [one for one in parts[index // 2] if one["policy"] == row.policy.removesuffix("/budget=10%")]
        values = [row.layer, row.lag, row.boundary]
        assert [one["loss"] for one in own] == six(values)
        assert [one["end"] - one["start"] for one in own] == pytest.approx(values, rel=1e-4, abs=1e-9)
        assert all((one["end"] <= 0 and one["start"] <= 0) == (one["loss"] < 0) or one["loss"] == 0 for one in own)
        for left, right in itertools.combinations(own, 2):
            assert (
                max(left["start"], left["end"]) <= min(right["start"], right["end"]) + 1e-6
                or min(left["start"], left["end"]) >= max(right["start"], right["end"]) - 1e-6
            )
        assert six([row.total])[0] in [one["total"] for one in totals[index // 2]]


def test_means_of_the_trade_off_have_intervals():
    rows = [row for trace in (MULTI, NEEDLE) for row in decompose(trace, ["ema:0.8", "single"], h=4)]
    drawn = checked(charts.tradeoff(over_traces(rows)))
    assert [row for row in drawn if "low" in row]
    assert all(row["low"] <= row["total"] <= row["high"] for row in drawn if "low" in row)
    with pytest.raises(KvsimError, match="h is one of 4, 8, got 7"):
        charts.tradeoff(decompose(MULTI, ["single"], h=[4, 8]), h=7)


def test_decode_time_adds_up():
    times = {"Full": (8.6, 12.2, 4.8), "Lazy4": (8.6, 3, 9.2)}
    parts = ("attention", "score", "rest")
    rows = [
        {"label": label, "part": part, "milliseconds": value}
        for label, values in times.items()
        for part, value in zip(parts, values, strict=True)
    ]
    drawn = checked(charts.decode_composition(rows))
    for label, values in times.items():
        own = [row for row in drawn if row["label"] == label and "part" in row]
        assert [row["start"] for row in own] == six([0, values[0], values[0] + values[1]])
        assert sum(row["share"] for row in own) == pytest.approx(1)
        assert {row["total"] for row in drawn if row["label"] == label and "total" in row} == {round(sum(values), 4)}
    with pytest.raises(KvsimError, match="less than no time"):
        charts.decode_composition([rows[0] | {"milliseconds": -1}])
    with pytest.raises(KvsimError, match="twice"):
        charts.decode_composition([rows[0], rows[0]])


def test_a_needle_grid_averages_samples():
    rows = [
        {"policy": policy, "length": length, "depth": depth, "score": float(policy == "full" or index)}
        for policy in ("full", "tova")
        for length in (512, 1024)
        for depth in (0, 0.5, 1)
        for index in range(2)
    ]
    drawn = checked(charts.needle_grid(rows))
    assert len(drawn) == 12
    assert {row["depth"] for row in drawn} == {"0%", "50%", "100%"}
    assert {row["score"] for row in drawn} == {0.5, 1}
    assert {row["samples"] for row in drawn} == {2}
    cells = [{"length": 512, "depth": 50, "rouge_l_f": value, "samples": count} for value, count in ((1, 3), (0, 1))]
    (row,) = checked(charts.needle_grid(cells, "rouge_l_f"))
    assert (row["score"], row["samples"], row["depth"]) == (0.75, 4, "50%")


# --- rankings ---------------------------------------------------------------------------------------------------------


def test_the_optimum_looks_like_no_policy(results):
    oracle = kvsim.replay(MULTI, "oracle:bound")
    for chart in (charts.oracle_gap([*results[:2], oracle]), charts.churn(results)):
        (rule,) = (view for view in views(chart.to_dict()) if view["mark"]["type"] == "rule")
        assert rule["mark"]["strokeWidth"] > 3
        assert rule["mark"]["color"] not in style.COLOURS
        assert "strokeDash" not in rule["mark"]
        assert any("thick grey: " in note for note in chart.to_dict()["title"]["subtitle"])


def test_the_oracle_gap_ends_where_the_gap_is():
    trace = kvsim.open_trace(MULTI)
    results = kvsim.replay_many(trace, ["oracle:exact", "ema:0.8", "oracle:future"], shadow_churn=False)
    chart = charts.oracle_gap(results)
    checked(chart)
    drawn = series(chart, "value")
    assert list(drawn) == ["ema:0.8", "oracle:future"]
    for result, values in zip(results[1:], drawn.values(), strict=True):
        assert values[-1] == pytest.approx(kvsim.oracle.gap(result, trace, "exact"), rel=1e-5)
    rows = charts.oracle_gap_rows(results)
    assert series(charts.oracle_gap(rows), "value") == drawn
    assert series(charts.oracle_gap(pl.DataFrame(rows)), "value") == drawn
    with pytest.raises(KvsimError, match=r"tova.*no oracle with its groups"):
        charts.oracle_gap([*results, kvsim.replay(trace, "tova")])
    with pytest.raises(KvsimError, match="only the optimum itself"):
        charts.oracle_gap(results[0])


def test_memory_weights_are_the_rule_run_on_ones():
    policies = ["ema:0.8", "ema:0.8,over=step", "cumulative", "single", "ema:0.9/group=layer"]
    chart = charts.memory_weights(policies, 4, steps=6)
    checked(chart)
    tables = rows_of_chart(chart)
    steps = [row for row in tables[0] if row["series"] == "ema:0.8"]
    decay = 0.8**4
    assert [row["value"] for row in steps] == six([decay**k * (1 - decay) / (1 - decay**6) for k in range(6)])
    assert {row["value"] for row in tables[0] if row["series"] == "cumulative"} == set(six([1 / 6]))
    layers = [row["value"] for row in tables[-1] if row["series"] == "ema:0.8"]
    assert layers == six(np.array([0.512, 0.64, 0.8, 1]) / 2.952)
    assert [row["value"] for row in tables[-1] if row["series"] == "ema:0.9/group=layer"] == [1]
    with pytest.raises(KvsimError, match="not a linear rule"):
        charts.memory_weights(["snapkv:16"], 4)


def test_two_tokens_flip_where_they_cross_the_threshold():
    raw = [[1, 3, 1, 3], [2.5, 2.5, 2.5, 2.5]]
    rows = [
        {
            "step": step,
            "token": name,
            "raw": raw[index][step - 1],
            "state": index,
            "raw_threshold": 2,
            "state_threshold": 0.5,
        }
        for index, name in enumerate(("a", "b"))
        for step in range(1, 5)
    ]
    chart = charts.two_tokens(rows)
    drawn = checked(chart)
    assert [row["step"] for row in drawn if row.get("flip")] == [2, 3, 4]
    titles = [panel["title"]["text"] for panel in chart.to_dict()["vconcat"]]
    assert titles == ["raw scores: 3 flips", "state of the rule: 0 flips"]
    shared = [{key: value for key, value in row.items() if "threshold" not in key} | {"threshold": 2} for row in rows]
    checked(charts.two_tokens(shared))


def test_rank_stability_marks_the_violated_pairs():
    rows = [
        {"policy": policy, "misranked": wrong, "finite": bound}
        for policy in ("ema:0.8", "ema:0.9")
        for wrong, bound in ((0.5, 0.2), (0, 0.01), (0.1, 40), (0, 0), (None, None))
    ]
    chart = charts.rank_stability(rows)
    checked(chart)
    drawn = [row for table in rows_of_chart(chart) for row in table if "state" in row]
    assert [row["state"] for row in drawn if row["misranked"] == 0.5] == ["violated", "violated"]
    assert all(row["state"] == "holds" for row in drawn if row["misranked"] != 0.5)
    assert all(row["x"] > 0 and row["y"] > 0 for row in drawn)
    assert {row["y"] for row in drawn if row["misranked"] == 0} == {0.05}
    title = chart.to_dict()["vconcat"][0]["title"]["text"]
    assert title == "ema:0.8: violated by 1 of 4 pairs; the bound is below 1 for 3"


def test_many_pairs_are_thinned_and_say_so():
    rng = np.random.default_rng(0)
    rows = [{"misranked": float(wrong), "bound": float(bound)} for wrong, bound in rng.random((20000, 2))]
    chart = charts.rank_stability(rows)
    drawn = [row for row in checked(chart) if "state" in row]
    share = np.mean([row["state"] == "violated" for row in drawn])
    assert share == pytest.approx(0.5, abs=0.05)
    assert f"{len(drawn)} drawn" in chart.to_dict()["vconcat"][0]["title"]["text"]


def test_the_spectrum_has_layers_and_an_average():
    rows = [
        {"trace": "one", "scorer": scorer, "layer": layer, "spearman": rho, "top_jaccard": 0.5}
        for scorer, rho in (("knorm", -0.5), ("keydiff", None))
        for layer in (0, 1, 2, None)
    ]
    chart = charts.scorer_spectrum(rows)
    drawn = checked(chart)
    assert {row["layer"] for row in drawn} == {"layer 0", "layer 1", "layer 2", "average"}
    assert {row["y"] for row in drawn if row["series"] == "keydiff"} == {0.5}
    assert len(drawn) == 4 + 8


# --- all of them ------------------------------------------------------------------------------------------------------


def test_a_large_recording_makes_small_charts(large):
    policies = ["ema:0.8", "ema:0.95,over=step", "tova", "streaming:4", "random:7"]
    results = kvsim.replay_many(large, policies, shadow_churn=False)
    shadows = kvsim.replay_many(large, ["ema:0,over=step", "ema:0.8"], shadow=True)
    utility = charts.reference_utility(large)
    for chart in (
        charts.retention([*results[:2], shadows[0]]),
        charts.retention(results[0], sort="utility", utility=utility),
        charts.evictions(results),
        charts.kept_mass(results),
        charts.churn([*results, *shadows]),
        charts.attended_pairs(results),
    ):
        rows = checked(chart)
        assert len(rows) > 100
    whole = results[0].outcome.metrics["kept_mass"]
    drawn = checked(charts.kept_mass(results[0]))
    assert min(row["low"] for row in drawn) == six([whole.min()])[0]
    assert max(row["high"] for row in drawn) == six([whole.max()])[0]


def test_one_step_and_one_policy(one_step):
    result = kvsim.replay(one_step, "ema:0.8", budget=3)
    shadow = kvsim.replay(one_step, "ema:0.8", budget=3, shadow=True)
    row = result.summary()
    oracle = kvsim.replay(one_step, "oracle:exact", budget=3)
    pair = {"misranked": 0.0, "finite": 0.0}
    for chart in (
        charts.retention(result),
        charts.retention(shadow, sort="utility", utility=charts.reference_utility(one_step)),
        charts.evictions(result),
        charts.kept_mass(result),
        charts.timeline(shadow, "output_error"),
        charts.attended_pairs(result),
        charts.alpha_sensitivity(row),
        charts.budget_curves([row]),
        charts.quality_cost(result),
        charts.tradeoff(decompose(one_step, ["ema:0.8"], budget=3)),
        charts.oracle_gap([result, oracle]),
        charts.memory_weights(["single"], 1, steps=1),
        charts.rank_stability([pair]),
        charts.decode_composition([{"label": "a", "part": "b", "milliseconds": 0}]),
        charts.needle_grid([{"length": 512, "depth": 0.5, "score": 0}]),
        charts.scorer_spectrum([{"scorer": "knorm", "layer": 0, "spearman": 0.0, "top_jaccard": 1.0}]),
        charts.two_tokens([{"step": 1, "token": "a", "raw": 1.0, "state": 1.0, "threshold": 0.0}]),
    ):
        checked(chart)
    with pytest.raises(KvsimError, match="only one step"):
        charts.churn(result)


def test_nothing_to_draw():
    for call in (charts.kept_mass, charts.retention, charts.tradeoff, charts.needle_grid, charts.oracle_gap):
        with pytest.raises(KvsimError, match="nothing to draw"):
            call([])


def test_results_are_drawn_once_and_recordings_told_apart(results):
    other = kvsim.replay(LONG, "ema:0.8")
    drawn = series(charts.kept_mass([results[0], results[0], other]), "value")
    assert list(drawn) == ["ema:0.8, smollm2-multineedle-256", "ema:0.8, smollm2-long-64"]


def test_equal_results_make_equal_charts():
    made = []
    for _ in range(2):
        results = kvsim.replay_many(LONG, ["ema:0.8", "ema:0.8,over=step"])
        rows = [result.summary() for result in results]
        drawn = (
            charts.retention(results),
            charts.churn(results),
            charts.evictions(results),
            charts.alpha_sensitivity(rows),
        )
        made.append([chart.to_json() for chart in drawn])
    assert made[0] == made[1]


def test_a_chart_is_written_as_a_picture(results, tmp_path):
    charts.kept_mass(results).save(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
