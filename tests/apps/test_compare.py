"""Comparing: every number is the library's, policies that fail or cannot be compared do not stop the others."""

import json
import shlex

import numpy as np
import pytest
from exploring import LONG, MULTI, drawn, errors, open_page, said
from kvsim_traces import import_npz
from specs import views
from typer.testing import CliRunner

import kvsim
from kvsim import charts
from kvsim.anatomy import dissect
from kvsim.cli import app as cli

THREE = {"policy": "ema:0.8", "others": "cumulative\nema:0.8,over=step"}
NAMES = ["ema:0.8", "cumulative", "ema:0.8,over=step"]


def lines_of(spec):
    """The points of a chart's lines: series, step and value."""
    rows = [row for view in views(spec) for row in spec["datasets"][view["data"]["name"]] if "series" in row]
    return {(row["series"], row["step"]): row["value"] for row in rows}


@pytest.fixture(scope="module")
def page():
    return open_page("compare", trace=MULTI, **THREE)


@pytest.fixture(scope="module")
def results():
    return kvsim.replay_many(MULTI, NAMES)


def test_the_table_is_that_of_the_results(page, results):
    assert not errors(page)
    trace = kvsim.open_trace(MULTI)
    table = page.dataframe[0].value.to_dict("list")
    assert table["policy"] == [one.policy for one in results]
    for column, name in (
        ("kept mass", "kept_mass"),
        ("shadow churn", "shadow_churn"),
        ("raw agreement", "raw_agreement"),
    ):
        assert table[column] == pytest.approx([one.summary()[name] for one in results])
    assert table["oracle gap"] == pytest.approx([kvsim.oracle.gap(one, trace, "exact") for one in results])
    found = dissect(results, trace)
    assert table["Jaccard"][1:] == pytest.approx([pair.jaccard.mean() for pair in found.pairs])
    assert table["equal steps"][1:] == pytest.approx([pair.equal.mean() for pair in found.pairs])


def test_the_charts_are_those_of_the_library(page, results):
    trace = kvsim.open_trace(MULTI)
    shadows = kvsim.replay_many(MULTI, NAMES, shadow=True)
    oracle = kvsim.replay(MULTI, "oracle:exact")
    wanted = [
        charts.jaccard(dissect(results, trace)),
        charts.kept_mass(results),
        charts.churn(shadows),
        charts.oracle_gap([oracle, *results]),
    ]
    for spec, chart in zip(drawn(page), wanted, strict=True):
        assert lines_of(spec) == pytest.approx(lines_of(chart.to_dict()), rel=1e-5, abs=1e-12)


def test_the_commands_draw_the_same(page):
    runner = CliRunner()
    specs = iter(drawn(page))
    for command in [line for block in page.code for line in block.value.splitlines() if line.startswith("kvsim chart")]:
        words = shlex.split(command)[1:]
        printed = json.loads(runner.invoke(cli, [*words[: words.index("--out")], "--json"]).stdout)
        assert lines_of(printed) == pytest.approx(lines_of(next(specs)), rel=1e-5, abs=1e-12)
    with pytest.raises(StopIteration):
        next(specs)


def test_a_url_restores_the_pair_and_its_tokens(results):
    app = open_page("compare", trace=MULTI, **THREE, a="cumulative", b="ema:0.8,over=step", rows="7")
    assert not errors(app)
    (pair,) = dissect(results[1:], kvsim.open_trace(MULTI)).pairs
    shown = app.dataframe[len(app.dataframe) - 1].value.to_dict("records")
    worst = pair.worst(7)
    assert [row["position"] for row in shown] == [one.position for one in worst]
    assert [row["token"] for row in shown] == [repr(one.token) for one in worst]
    assert [row["kept by"] for row in shown] == [one.kept_by for one in worst]
    assert [row["gained"] for row in shown] == pytest.approx([one.mass_gained for one in worst])
    (command,) = [block.value for block in app.code if "analyze diff" in block.value]
    printed = json.loads(CliRunner().invoke(cli, [*shlex.split(command)[1:], "--json"]).stdout)
    assert [row["position"] for row in printed["results"][0]["pairs"][0]["worst"]] == [one.position for one in worst]


def test_tokens_are_summed_over_groups_or_listed_by_group():
    app = open_page("compare", trace=MULTI, policy="tova", others="tova/protect=sink:4", rows="5")
    pair = dissect(kvsim.replay_many(MULTI, ["tova", "tova/protect=sink:4"]), kvsim.open_trace(MULTI)).pairs[0]
    shown = app.dataframe[len(app.dataframe) - 1].value.to_dict("records")
    assert [(row["position"], row["gained by"]) for row in shown] == [(t.position, t.gained_by) for t in pair.tokens(5)]
    app.button_group(key="by").set_value("group").run()
    shown = app.dataframe[len(app.dataframe) - 1].value.to_dict("records")
    assert [(row["position"], row["group"]) for row in shown] == [(one.position, one.group) for one in pair.worst(5)]


def test_other_groups_are_said_and_compared_pair_by_pair():
    app = open_page("compare", trace=MULTI, policy="ema:0.8", others="tova\nema:0.9/group=layer\ncumulative")
    assert not errors(app)
    (info,) = [one.value for one in app.info]
    assert "tova/budget=10%` (group=layer), `ema:0.9/group=layer/budget=10%` (group=layer)" in info
    assert app.dataframe[0].value["Jaccard"].notna().tolist() == [False, False, False, True]
    app.selectbox(key="b").set_value("tova").run()
    (message,) = errors(app)
    assert "has group=shared and tova/budget=10% group=layer" in message
    app.selectbox(key="a").set_value("ema:0.9/group=layer").run()
    assert not errors(app)
    assert any("partings" in text for text in said(app))


def test_what_fails_is_named_and_the_rest_goes_on():
    app = open_page("compare", trace=LONG, policy="ema:0.8", others="h2o\ncumulative")
    (message,) = errors(app)
    assert message.startswith("h2o/budget=10%: group=head needs attention of single heads")
    assert app.dataframe[0].value["policy"].tolist() == ["ema:0.8/budget=10%", "cumulative/budget=10%"]
    app = open_page("compare", trace=LONG, policy="ema:0.8", others="h2o")
    assert any("name more under" in one.value for one in app.info)


def test_shadow_mode_has_no_optimum_and_a_full_cache_no_gap():
    app = open_page("compare", trace=MULTI, policy="ema:0.8", others="full")
    assert not errors(app)
    assert app.dataframe[0].value["oracle gap"].notna().tolist() == [True, False]
    assert any("`full`: it has no budget" in text for text in said(app))
    app = open_page("compare", trace=MULTI, **THREE, shadow="true")
    assert not errors(app)
    assert "oracle gap" not in app.dataframe[0].value.columns
    assert len(drawn(app)) == 3
    app = open_page("compare", trace=MULTI, policy="ema:0.8", others="ema:0.8,over=layer")
    assert any("same sets after every step" in one.value for one in app.info)


def test_one_step_of_head_means_without_texts(tmp_path):
    scores = np.random.default_rng(0).random((1, 2, 12), dtype=np.float32)
    np.savez(tmp_path / "one.npz", scores=scores / scores.sum(axis=2, keepdims=True), prompt_length=11)
    import_npz(tmp_path / "one.npz", tmp_path / "one")
    app = open_page("compare", trace=str(tmp_path / "one"), policy="ema:0.8", others="single\nstreaming:1", budget="3")
    assert not errors(app)
    assert len(drawn(app)) == 3, "one step has no churn"
    shown = app.dataframe[len(app.dataframe) - 1].value
    assert "position" in shown.columns
    assert "token" not in shown.columns
