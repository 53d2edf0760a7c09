"""Policies that admit and select, on every page."""

import pytest
from exploring import errors, open_page
from kvsim_explorer.pages import PAGES

POLICY = "ema:0.8/admit=random:0.3,window=16/select=topk:32"


@pytest.mark.parametrize("page", list(PAGES))
def test_every_page_shows_a_policy_that_admits(page):
    app = open_page(page, policy=POLICY, others="full/admit=local:window=64,sink=8")
    assert not errors(app)
    assert app.header


def test_the_map_has_no_shadow_panel_for_it():
    app = open_page("map", policy="ema:0.8")
    assert "shadow" in app.pills(key="panels").value
    app.text_input(key="policy").set_value(POLICY).run()
    assert not errors(app)
    assert "shadow" not in app.pills(key="panels").options


def test_shadow_mode_says_that_it_is_left_out():
    app = open_page("trace", policy=POLICY, shadow="true")
    assert any("admission has no meaning there" in one for one in errors(app))
