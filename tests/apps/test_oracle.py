"""The page of the oracle: gaps and floors of the library, and what has no gap said by name."""

import pytest
from exploring import LONG, NEEDLE, errors, open_page, said
from kvsim_explorer import size, work

import kvsim
from kvsim import optima
from kvsim.floor import random_floor

POLICIES = ["ema:0.8", "tova", "recency"]


def test_the_table_is_the_librarys():
    app = open_page("oracle", trace=NEEDLE, policy="ema:0.8", others="tova\nrecency", budget="90%")
    assert not errors(app)
    trace = kvsim.open_trace(NEEDLE)
    results = kvsim.replay_many(trace, POLICIES, budget="90%", shadow_churn=False)
    beside, floors = optima.beside_optimum(results, trace), random_floor(results, trace)
    table = app.dataframe[-1].value
    assert table["policy"].tolist() == POLICIES
    assert table["best"].tolist() == [one.best for one in beside]
    assert set(table["best is"]) == {"exact optimum"}
    assert table["gap %"].tolist() == [100 * one.gap for one in beside]
    assert table["random, mean"].tolist() == [one.random_mean for one in floors]
    assert [one.below for one in floors] == [False, False, True]
    assert [mark.startswith("▼") for mark in table["below random"]] == [False, False, True]
    (warning,) = [one.value for one in app.warning]
    assert warning.startswith(f"recency keeps {floors[2].kept_mass:.3f}, less than the mean")
    worst = max(one.gap for one in beside)
    assert any(f"recency {worst:.2%}." in text for text in said(app))
    assert any("compare gaps within equal groups" in text for text in said(app))


def test_what_cannot_be_compared_is_named():
    app = open_page("oracle", trace=NEEDLE, policy="snapkv:16", others="full\nh2o:2\nvnorm\ncumulative", shadow="true")
    assert "h2o" in errors(app)[0]
    assert any("this page evicts for good" in one.value for one in app.info)
    warnings = [one.value for one in app.warning]
    assert "full is left out: it has no budget, so there is nothing to choose." in warnings
    assert any(text.startswith("snapkv:16 has no gap: when=prefill lets the cache grow") for text in warnings)
    table = app.dataframe[-1].value
    assert table["policy"].tolist() == ["snapkv:16", "cumulative"]
    assert table["gap %"].isna().tolist() == [True, False]
    chart, analysis = app.code[0].value.splitlines()[:2]
    assert "snapkv" not in chart
    assert "snapkv" in analysis


def test_a_bound_is_called_one(monkeypatch):
    monkeypatch.setattr(optima, "QUICK", -1)
    work._outcomes().clear()
    monkeypatch.setattr(kvsim.oracle, "_known", type(kvsim.oracle._known)())
    app = open_page("oracle", trace=LONG, policy="cumulative", others="")
    assert app.dataframe[-1].value["best is"].tolist() == ["certified upper bound"]
    assert any("the table's gap is to the bound" in text for text in said(app))
    work._outcomes().clear()


@pytest.mark.parametrize("page", ["oracle", "heads", "alpha", "scorers"])
def test_large_recordings_wait_for_a_click(monkeypatch, page):
    monkeypatch.setattr(size, "LARGE", 1000)
    app = open_page(page, trace=LONG, policy="ema:0.31", others="", budget="9")
    assert not errors(app)
    waiting = [one for one in app.button if one.label == "Start"]
    assert len(waiting) == (2 if page == "alpha" else 1)
    assert any("this takes a while" in one.value for one in app.info)
    waiting[0].click().run()
    assert not errors(app)
    assert len([one for one in app.button if one.label == "Start"]) == len(waiting) - 1
