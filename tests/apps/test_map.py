"""The map: what is drawn is the library's map of the window in the URL, whatever the policy and its groups."""

import json
import shlex

import pytest
from exploring import LONG, MULTI, drawn, errors, open_page, said
from kvsim_explorer.pages import map as page
from specs import views
from typer.testing import CliRunner

import kvsim
from kvsim import charts
from kvsim.cli import app as cli

ALL_PANELS = [("ema:0,over=step", True), ("ema:0.8", False), ("ema:0.8", True)]


def cells_of(spec):
    """The tables of kept fractions of a chart, in the order they are drawn."""
    tables = [spec["datasets"][view["data"]["name"]] for view in views(spec)]
    return [table for table in tables if "kept" in table[0]]


def replays(panels, **settings):
    return [kvsim.replay(MULTI, policy, shadow=shadow, **settings) for policy, shadow in panels]


def test_the_whole_map_is_that_of_the_library():
    app = open_page("map", trace=MULTI, policy="ema:0.8")
    assert not errors(app)
    results = replays(ALL_PANELS)
    assert cells_of(drawn(app)[0]) == cells_of(charts.retention_overview(results[1]).to_dict())
    assert cells_of(drawn(app)[1]) == cells_of(charts.retention(results).to_dict())
    shares = charts.retained_shares(results)
    (summary,) = [text for text in said(app) if text.startswith("What is retained of positions 0 to 278")]
    assert all(f": {share:.1%}" in summary for share in shares)


def test_a_url_restores_the_window_the_order_the_group_and_the_panels():
    app = open_page(
        "map",
        trace=MULTI,
        policy="tova",
        budget="12",
        positions=["20", "90"],
        steps=["3", "9"],
        sort="utility",
        group="layer 4",
        panels=["irreversible"],
    )
    assert not errors(app)
    utility = charts.reference_utility(kvsim.open_trace(MULTI))
    result = kvsim.replay(MULTI, "tova", budget=12)
    part = {"sort": "utility", "utility": utility, "group": 4, "positions": (20, 90), "steps": (3, 9)}
    assert cells_of(drawn(app)[1]) == cells_of(charts.retention(result, **part).to_dict())
    frame = cells_of(drawn(app)[0])[0][-1]
    assert frame == {"x": 20, "x2": 90, "y": 3, "y2": 10, "kept": -1}
    app.button[0].click().run()
    assert app.slider(key="positions").value == (0, 279)
    assert app.slider(key="steps").value == (1, 24)
    assert min(row["kept"] for row in cells_of(drawn(app)[0])[0]) >= 0
    assert not errors(app)


def test_sliders_choose_the_window():
    app = open_page("map", trace=MULTI, policy="ema:0.8", panels=["raw"])
    app.slider(key="positions").set_value((200, 279)).run()
    app.slider(key="steps").set_value((7, 7)).run()
    results = replays(ALL_PANELS[:1])
    wanted = charts.retention(results, positions=(200, 279), steps=(7, 7)).to_dict()
    assert cells_of(drawn(app)[1]) == cells_of(wanted)
    app.slider(key="positions").set_value((90, 90)).run()
    wanted = charts.retention(results, positions=(89, 90), steps=(7, 7)).to_dict()
    assert cells_of(drawn(app)[1]) == cells_of(wanted)


@pytest.mark.parametrize("panels", [["raw"], ["shadow"], ["raw", "irreversible"], ["irreversible", "shadow"]])
def test_the_command_draws_the_same(panels):
    words = {"positions": ["200", "279"], "steps": ["5", "20"], "panels": panels}
    app = open_page("map", trace=MULTI, policy="tova/budget=9", **words)
    commands = [shlex.split(block.value)[1:] for block in app.code if block.value.startswith("kvsim chart")]
    (command,) = [[*words[: words.index("--out")], "--json"] for words in commands]
    printed = json.loads(CliRunner().invoke(cli, command).stdout)
    assert cells_of(printed) == cells_of(drawn(app)[1])
    (python,) = [block.value for block in app.code if block.value.startswith("import")]
    made = {}
    exec(python.replace("kvsim.charts.retention(", "made = kvsim.charts.retention("), made)
    assert cells_of(made["made"].to_dict()) == cells_of(drawn(app)[1])


def test_what_cannot_be_shown_is_said():
    app = open_page("map", trace=LONG, policy="ema:0.8/group=head")
    assert ["group=head needs attention of single heads" in message for message in errors(app)] == [True]
    app = open_page("map", trace=MULTI, policy="ema:0.8", panels=["nothing"])
    assert not errors(app)
    app.button_group(key="panels").set_value([]).run()
    assert [info.value for info in app.info] == [
        "Choose what is drawn: the raw top-B, the policy, or the policy in shadow mode."
    ]


class Selected:
    def __init__(self, **window):
        self.selection = {"window": window}


def test_a_brush_sets_the_sliders_to_whole_columns_and_steps(monkeypatch):
    trace = kvsim.open_trace(MULTI)
    state = {"chart overview 2": Selected(x=[90.2, 20.7], y=[3.9, 9.1]), page.MOVES: 2}
    monkeypatch.setattr(page.st, "session_state", state)
    page._brushed(trace, 2)
    assert (state["positions"], state["steps"]) == ((20, 91), (3, 9))
    state["chart overview 2"] = Selected(x=[-5, 400], y=[0.5, 40])
    page._brushed(trace, 2)
    assert (state["positions"], state["steps"]) == ((0, 279), (1, 24))
    state["chart overview 2"] = Selected()
    page._brushed(trace, 2)
    assert state["positions"] == (0, 279)
    state["chart overview 1"] = Selected(x=[90, 100], y=[3, 9])
    page._brushed(trace, 1)
    assert state["positions"] == (0, 279), "an overview that is gone"
