"""Every page in a real browser: it opens, answers a slider, follows a shared URL, and agrees with the library."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browsing import Tab, csv_of, tab
from exploring import LONG, MULTI, NEEDLE, replayed
from kvsim_explorer.pages import PAGES
from kvsim_traces import import_npz
from playwright.sync_api import Browser

import kvsim

# A browser on a busy machine can miss a moment; what is wrong fails three times.
pytestmark = [pytest.mark.slow, pytest.mark.flaky(reruns=2)]

BAD = '[data-testid="stException"]'
ALERTS = '[data-testid="stAlertContentError"]'


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A synthetic recording of 65,536 prompt tokens."""
    rng = np.random.default_rng(0)
    prompt, steps, layers = 65_536, 16, 2
    base = rng.gamma(0.05, 1, size=(layers, prompt + steps)).astype(np.float32)
    scores = np.zeros((steps, layers, prompt + steps), np.float32)
    for step in range(steps):
        row = base * rng.gamma(2, 0.5, size=base.shape).astype(np.float32)
        row[:, prompt + step + 1 :] = 0
        scores[step] = row / row.sum(axis=-1, keepdims=True)
    folder = tmp_path_factory.mktemp("large")
    np.savez(folder / "scores.npz", scores=scores, prompt_length=prompt)
    import_npz(folder / "scores.npz", folder / "large")
    return str(folder / "large")


@pytest.mark.parametrize("trace", [NEEDLE, MULTI, LONG], ids=lambda one: Path(one).name)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens_on_every_sample(screen: Tab, page: str, trace: str):
    screen.go(page, trace=trace, policy="ema:0.9", others="cumulative\nsingle")
    assert screen.page.locator("h2").first.is_visible()
    assert screen.page.locator(BAD).count() == 0
    assert screen.page.locator(ALERTS).count() == 0
    charts = screen.page.locator('[data-testid="stVegaLiteChart"]')
    if page != "text":
        charts.first.wait_for()
        # A chart has a text alternative, and is drawn.
        assert charts.locator("canvas, svg").first.is_visible()
        assert screen.page.locator('[role="graphics-document"]').first.get_attribute("aria-label")


def figures(screen: Tab) -> dict[str, float]:
    found = re.findall(r"(kept mass|churn|tokens held) ([0-9.e-]+)", screen.page.locator(".figures").inner_text())
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("trace", [NEEDLE, LONG], ids=lambda one: Path(one).name)
def test_the_step_slider_shows_the_numbers_of_replay(screen: Tab, trace: str):
    steps = kvsim.replay(trace, "ema:0.9", budget="20%", shadow_churn=False).steps
    screen.go("text", trace=trace, policy="ema:0.9", budget="20%", step="7")
    assert figures(screen)["kept mass"] == pytest.approx(steps["kept_mass"][6], abs=6e-5)
    screen.page.locator("input.slider").press("ArrowRight")
    screen.page.get_by_text("step 8 of").wait_for()
    shown = figures(screen)
    assert shown["kept mass"] == pytest.approx(steps["kept_mass"][7], abs=6e-5)
    assert shown["churn"] == pytest.approx(steps["churn"][7], abs=6e-5)
    assert shown["tokens held"] == steps["retained"][7]
    screen.page.wait_for_timeout(600)
    screen.settle()
    assert screen.parameters()["step"] == "8"
    url = screen.page.url
    screen.go("trace", trace=MULTI)
    screen.page.goto(url)
    screen.settle()
    assert figures(screen) == shown


def test_tokens_are_struck_out_as_they_are_evicted(screen: Tab):
    result = kvsim.replay(NEEDLE, "ema:0.9", budget="20%", shadow_churn=False)
    screen.go("text", trace=NEEDLE, policy="ema:0.9", budget="20%", step="0")
    panes = screen.page.locator(".pane .tokens").first
    assert panes.locator(".gone, .old").count() == 0
    screen.page.locator("input.slider").press("End")
    screen.page.get_by_text("step 48 of 48").wait_for()
    screen.page.wait_for_timeout(300)
    drawn = panes.locator(".kept, .gone, .old").count()
    assert drawn > 100
    kept = panes.locator(".kept").count()
    held = set(result.retained(48).tolist())
    assert kept == len(held & set(range(drawn)))


def test_a_brush_on_the_map_zooms_and_stands_in_the_url(screen: Tab):
    screen.go("map", trace=NEEDLE, policy="ema:0.9")
    assert "positions" not in screen.parameters()
    box = screen.page.locator('[data-testid="stVegaLiteChart"]').first.locator("canvas, svg").first.bounding_box()
    assert box is not None
    mouse = screen.page.mouse
    mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.35 * box["height"])
    mouse.down()
    mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.6 * box["height"], steps=8)
    mouse.up()
    screen.page.wait_for_timeout(800)
    screen.settle()
    assert "positions" in screen.parameters()
    assert screen.page.locator(BAD).count() == 0


def test_the_tokens_where_two_policies_part_are_those_of_analyze_diff(screen: Tab):
    screen.go("compare", trace=NEEDLE, policy="ema:0.9", others="single")
    command = ["analyze", "diff", "ema:0.9", "single", "--trace", NEEDLE, "--budget", "10%", "--limit", "1", "--json"]
    done = subprocess.run([sys.executable, "-m", "kvsim", *command], capture_output=True, check=True)
    wanted = json.loads(done.stdout)["results"][0]["pairs"][0]
    assert screen.page.get_by_text(f"on average: {wanted['b']} {wanted['jaccard']:.3f}").first.is_visible()


@pytest.mark.parametrize("page", ["trace", "text", "map", "compare"])
def test_a_recording_of_65536_tokens(screen: Tab, large: str, page: str):
    screen.go(page, trace=large, policy="ema:0.9", others="cumulative")
    assert screen.page.locator(BAD).count() == 0
    assert screen.page.locator(ALERTS).count() == 0
    if page == "text":
        screen.page.locator("input.slider").press("Home")
        screen.page.locator("input.slider").press("ArrowRight")
        screen.page.get_by_text("step 1 of 16").wait_for()
        assert figures(screen)["tokens held"] == 6553
        assert screen.page.locator(".pane .tokens span").count() < 5000
    if page == "trace":
        assert float(csv_of(screen, "summary")[0]["kept mass"]) == pytest.approx(
            replayed(large, "ema:0.9")[0]["kept_mass"]
        )


def turn(screen: Tab, title: str) -> None:
    screen.page.locator(".st-key-page").get_by_text(title, exact=True).click()
    screen.settle()


def test_another_recording_starts_with_its_whole_map(screen: Tab):
    screen.go("map", trace=NEEDLE)
    for other in (MULTI, NEEDLE):
        turn(screen, "Recording")
        screen.pick("offered", Path(other).name)
        turn(screen, "Map")
        assert screen.page.locator(BAD).count() == 0
        assert screen.page.locator(ALERTS).count() == 0
        assert "positions" not in screen.parameters()


@pytest.mark.parametrize("name", ["policy", "budget", "trace"])
def test_an_address_cannot_make_the_page_fetch_a_picture(screen: Tab, name: str):
    asked: list[str] = []
    screen.page.on("request", lambda one: asked.append(one.url))
    screen.go("trace", **{"trace": NEEDLE, name: "ema:![p](http://kvsim.invalid/a.png)"})
    assert screen.page.locator('[data-testid="stAlert"]').first.is_visible()
    assert [url for url in asked if "kvsim.invalid" in url and not url.startswith(screen.address)] == []


def test_a_recording_cut_short_while_open_is_named(screen: Tab, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(LONG, copy)
    screen.go("trace", trace=str(copy))
    for file in copy.rglob("*"):
        if file.is_file() and file.name != "zarr.json" and file.stat().st_size > 100_000:
            os.truncate(file, 4096)
    screen.enter("policy", "ema:0.77")
    assert screen.page.locator('[data-testid="stAlert"]').filter(has_text="copy").first.is_visible()
    screen.go("trace", trace=LONG)
    assert screen.page.locator(ALERTS).count() == 0


def test_back_leads_to_the_view_before(screen: Tab):
    screen.go("trace", trace=NEEDLE)
    before = screen.page.locator("h2").first.inner_text()
    screen.page.get_by_role("button", name="Map", exact=True).or_(
        screen.page.get_by_role("radio", name="Map")
    ).first.click()
    screen.page.get_by_role("heading", name="Which positions are retained").wait_for()
    screen.settle()
    screen.page.go_back()
    screen.page.get_by_role("heading", name=before).first.wait_for()
    screen.settle()
    box = screen.page.locator(".st-key-policy input")
    assert (box.input_value() or box.get_attribute("placeholder")) == "ema:0.8"
    assert screen.page.locator(ALERTS).count() == 0


def test_charts_fit_a_narrow_window(chromium: Browser, explorer: str):
    with tab(chromium, explorer, width=800) as opened:
        for page in PAGES:
            opened.go(page, trace=NEEDLE)
            opened.page.wait_for_timeout(500)
            opened.settle()
            boxes = opened.page.locator('[data-testid="stVegaLiteChart"]')
            for index in range(boxes.count()):
                seen, whole = boxes.nth(index).evaluate("one => [one.clientWidth, one.scrollWidth]")
                assert whole <= seen + 24, (page, index, seen, whole)
        assert opened.complaints == []
