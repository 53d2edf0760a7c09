"""Charts of memory: what they draw is what the footprints say."""

import numpy as np
import pytest
from cases import SAMPLES
from specs import checked, rows_of_chart

import kvsim
from kvsim import charts
from kvsim.charts.families import families_of
from kvsim.errors import KvsimError
from kvsim.footprint import footprint
from kvsim.heads import kept_fraction, size_rows
from kvsim.utility import read_head, token_utility

MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("multineedle-256", "long-64"))
POLICIES = ["full", "ema:0.8/budget=20/when=overflow:20%", "tova/budget=20"]


@pytest.fixture(scope="module")
def found():
    return [footprint(result) for result in kvsim.replay_many(LONG, POLICIES, shadow_churn=False, raw=False)]


def tables(chart, *columns):
    return [table for table in rows_of_chart(chart) if set(columns) <= set(table[0])]


def test_growth_draws_what_each_step_sees(found):
    chart = charts.cache_growth(found)
    checked(chart)
    curves = list({id(table): table for table in tables(chart, "full")}.values())
    assert len(curves) == 3
    for one, table in zip(found, curves, strict=True):
        assert [row["value"] for row in table] == pytest.approx((one.attended[1:] / 90).tolist(), rel=1e-5)
        assert [row["full"] for row in table] == list(range(61, 221))
    marks = [table for table in rows_of_chart(chart) if set(table[0]) == {"step", "value"}]
    assert [[row["step"] for row in table] for table in marks] == [
        np.flatnonzero(one.triggered).tolist() for one in found[1:]
    ]
    text = chart.to_dict()["description"]
    assert "full: never evicts, 100.0% of the full cache's attended pairs" in text
    assert f"evicts in {found[1].triggers} steps" in text


def test_long_runs_are_drawn_as_means(found):
    chart = charts.cache_growth(found * 5)
    rows = checked(chart)
    assert len(rows) <= 5000
    assert "means of 2 steps" in str(chart.to_dict())
    with pytest.raises(KvsimError, match="the growth of 166 runs, got 201"):
        charts.cache_growth(found * 67)
    with pytest.raises(KvsimError, match="nothing to draw"):
        charts.cache_growth([])


def test_triggers_are_counted_by_setting(found):
    chart = charts.eviction_triggers([one.summary() for one in found])
    checked(chart)
    rows = tables(chart, "triggers")[0]
    assert [row["series"] for row in rows] == [policy.replace("/budget=20", "") for policy in POLICIES]
    assert [row["triggers"] for row in rows] == [one.triggers for one in found]
    assert rows[0]["peak_tokens_of_a_head"] == 220
    policies = [f"ema:0.8/budget=20/when=overflow:{share}%" for share in (5, 20, 40)]
    swept = [footprint(one).summary() for one in kvsim.replay_many(LONG, policies, shadow_churn=False, raw=False)]
    chart = charts.eviction_triggers(swept)
    assert [row["series"] for row in tables(chart, "triggers")[0]] == ["5%", "20%", "40%"]
    assert "ema:0.8/budget=20/when=overflow:…" in chart.to_dict()["title"]["subtitle"]
    with pytest.raises(KvsimError, match="holds 40 policies, got 41"):
        charts.eviction_triggers([swept[0] | {"policy": f"random:{seed}"} for seed in range(41)])


def test_quality_by_size_joins_a_family():
    policies = ["tova/budget=10%", "tova/budget=50%", "full/admit=local:window=8,sink=2"]
    policies += [policies[2].replace("8", "32"), "full"]
    results = kvsim.replay_many(MULTI, policies, shadow_churn=False, raw=False)
    chart = charts.quality_by_size(results)
    rows = checked(chart)
    assert {row["series"] for row in rows} == {"tova", "full/admit=local:sink=2,…", "full"}
    assert [row["x"] for row in rows if row["series"] == "full"] == [1]
    want = sorted((result.cache_size, result.summary()["kept_mass"]) for result in results[:2])
    got = [(row["x"], row["y"]) for row in rows if row["series"] == "tova"]
    assert np.array(got) == pytest.approx(np.array(want), rel=1e-5)
    assert "full: 1 at 1" in chart.to_dict()["description"]


def test_families_differ_in_numbers_of_sizes_alone():
    gates = [
        f"full/admit=wgkv:g/{name}" for name in ("a-0.1.safetensors", "a-0.2.safetensors,tau=0.3", "b.safetensors")
    ]
    assert families_of(gates) == {
        gates[0]: ("full/admit=wgkv:…", "g/a-0.1.safetensors, default"),
        gates[1]: ("full/admit=wgkv:…", "g/a-0.2.safetensors, tau=0.3"),
        gates[2]: (gates[2], ""),
    }
    assert families_of(["ema:0.8", "ema:0.9", "no policy"]) == {
        name: (name, "") for name in ("ema:0.8", "ema:0.9", "no policy")
    }
    kept = ["h2o/protect=sink:4+recent:8/budget=51", "h2o/protect=sink:4+recent:9/budget=10%"]
    assert families_of(kept)[kept[1]] == ("h2o/protect=sink:4+recent:…", "9, 10%")


def test_head_sizes_of_several_recordings():
    results = [
        kvsim.replay(trace, "h2o", budget=9, shadow_churn=False) for trace in (MULTI, SAMPLES / "smollm2-needle-512")
    ]
    rows = [row for result in results for row in size_rows(result)]
    assert [row["kept_fraction"] for row in rows[:90]] == pytest.approx(kept_fraction(results[0]).mean(axis=0).ravel())
    assert size_rows(results[0], 3)[4]["kept_fraction"] == kept_fraction(results[0])[2, 1, 1]
    chart = charts.kept_by_head(rows)
    assert len(checked(chart)) == 180
    panels = [panel["title"]["text"] for panel in chart.to_dict()["vconcat"]]
    assert panels == ["h2o, smollm2-multineedle-256", "h2o, smollm2-needle-512"]
    with pytest.raises(KvsimError, match="step must be from 1 to 24, got 25"):
        size_rows(results[0], 25)
    with pytest.raises(KvsimError, match="equal layers"):
        charts.kept_by_head(rows[:-3])


def test_utility_is_the_recorded_attention():
    trace = kvsim.open_trace(MULTI)
    found = token_utility(trace, [3, 260], [(2, 5), (9, 0)])
    assert found.received[1, 0, 6] == trace.attention_rows(7, [9])[0, 0, 3]
    assert np.isnan(found.received[:, 1, :5]).all()
    assert found.received[0, 1, 5] == trace.attention_rows(6, [2])[0, 5, 260]
    assert found.even.tolist() == [1 / (255 + t) for t in range(1, 25)]
    chart = charts.utility_of_tokens(found, trace)
    checked(chart)
    curves = list({id(table): table for table in rows_of_chart(chart)}.values())
    assert [len(table) for table in curves] == [24, 19, 24, 19]
    assert [row["value"] for row in curves[2]] == pytest.approx(found.received[1, 0].tolist(), rel=1e-5)
    assert "layer 2 head 5, token 3 ‘" in chart.to_dict()["description"]


@pytest.mark.parametrize(
    ("positions", "heads", "message"),
    [
        ([279], [(0, 0)], r"position must be in 0..278, got 279"),
        ([0], [(30, 0)], r"layer must be in 0..29, got 30"),
        ([0], [(0, 9)], r"head must be in 0..8, got 9"),
        ([], [(0, 0)], "name a position"),
        ([0], [], "and a head, such as 10.19"),
    ],
)
def test_utility_of_what_is_not_there(positions, heads, message):
    with pytest.raises(KvsimError, match=message):
        token_utility(kvsim.open_trace(MULTI), positions, heads)


def test_utility_needs_single_heads():
    with pytest.raises(KvsimError, match="holds head means"):
        token_utility(kvsim.open_trace(LONG), [0], [(0, 0)])
    with pytest.raises(KvsimError, match=r"LAYER\.HEAD, such as 10\.19, got '3'"):
        read_head("3")
    trace = kvsim.open_trace(MULTI)
    with pytest.raises(KvsimError, match="holds 36 panels, got 1 heads x 37 tokens"):
        charts.utility_of_tokens(token_utility(trace, range(37), [(0, 0)]), trace)
