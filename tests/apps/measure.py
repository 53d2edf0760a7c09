"""Time the explorer in a browser on a recording of 65,536 tokens: how soon a page stands, how soon it answers a slider.

    PYTHONPATH=tests/shared python tests/apps/measure.py

Writes apps/benchmarks/explorer.json. Not a test: the times are those of this machine, and of what else it does.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from browsing import ROOT, Tab, browser, served, tab
from kvsim_traces import import_npz

from kvsim.bench import machine

OUT = ROOT / "apps" / "benchmarks" / "explorer.json"
PROMPT, STEPS, LAYERS = 65_536, 64, 4
REPEATS = 5


READY_PART = {
    "trace": '.st-key-paper-kept-mass [role="graphics-document"]',
    "text": ".pane .tokens .kept",
    "map": '[role="graphics-document"]',
    "compare": '[role="graphics-document"]',
}
"""What stands on a page last of what is looked at first."""


WINDOW = ".st-key-paper-retention :is(canvas, svg.marks)"
"""What the window is drawn on; a new one for every drawing."""


def write_recording(folder: Path) -> Path:
    """Import a recording of head means whose attention is a heavy-tailed utility and noise."""
    rng = np.random.default_rng(0)
    base = rng.gamma(0.05, 1, size=(LAYERS, PROMPT + STEPS)).astype(np.float32)
    scores = np.zeros((STEPS, LAYERS, PROMPT + STEPS), np.float32)
    for step in range(STEPS):
        row = base * rng.gamma(2, 0.5, size=base.shape).astype(np.float32)
        row[:, PROMPT + step + 1 :] = 0
        scores[step] = row / row.sum(axis=-1, keepdims=True)
    np.savez(folder / "scores.npz", scores=scores, prompt_length=PROMPT)
    import_npz(folder / "scores.npz", folder / "large")
    (folder / "scores.npz").unlink()
    return folder / "large"


def opening(screen: Tab, page: str, trace: Path, policy: str) -> float:
    """Seconds from the address to a page that stands, in a new session."""
    start = time.perf_counter()
    screen.page.goto(f"{screen.address}/?page={page}&trace={trace}&policy={policy}")
    screen.page.locator(READY_PART[page]).first.wait_for(timeout=60_000)
    return time.perf_counter() - start


def step_move(screen: Tab) -> float:
    """Seconds from a key on the text page's slider to the figures of the next step."""
    step = int(screen.page.locator(".counter").inner_text().split()[1])
    start = time.perf_counter()
    screen.page.locator("input.slider").press("ArrowRight")
    screen.page.get_by_text(f"step {step + 1} of").wait_for()
    return time.perf_counter() - start


def map_move(screen: Tab, sent: list[float]) -> tuple[float, float]:
    """Seconds from a key on the map's slider of positions to the charts of that part, and from its being sent.

    Streamlit's slider waits for further keys before it tells the server.
    """
    sent.clear()
    chart = screen.page.locator(WINDOW)
    chart.evaluate("one => one.setAttribute('data-old', '1')")
    thumb = screen.page.locator(".st-key-positions input[type=range]").first
    start = time.perf_counter()
    thumb.press("ArrowRight")
    screen.page.wait_for_function(
        "window => { const one = document.querySelector(window); return one && !one.hasAttribute('data-old'); }",
        arg=WINDOW,
        timeout=60_000,
    )
    end = time.perf_counter()
    return end - start, end - sent[0]


def main() -> None:
    """Measure, print, save."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, browser() as running:
        trace = write_recording(Path(name))
        with served("--trace", str(trace)) as address:
            for page in READY_PART:
                # A policy of its own each time, so that nothing has been replayed yet.
                times = []
                for repeat in range(REPEATS):
                    with tab(running, address) as screen:
                        times.append(opening(screen, page, trace, f"ema:0.{repeat + 1}{list(READY_PART).index(page)}"))
                rows.append({"what": f"open {page}", "limit_s": 3.0, "first_s": times[0], **_spread(times)})
            with tab(running, address) as screen:
                opening(screen, "text", trace, "ema:0.9&step=1")
                screen.settle()
                moves = [step_move(screen) for _ in range(9)]
                rows.append({"what": "step slider, text", "limit_s": 0.3, **_spread(moves)})
                sent: list[float] = []
                screen.page.on("websocket", lambda one: one.on("framesent", lambda _: sent.append(time.perf_counter())))
                screen.go("map", trace=str(trace), policy="ema:0.9")
                pairs = [map_move(screen, sent) for _ in range(9)]
                for what, times in zip(("", ", from its being sent"), zip(*pairs, strict=True), strict=True):
                    rows.append({"what": f"position slider, map{what}", "limit_s": 0.3, **_spread(list(times))})
    for row in rows:
        print(f"{row['what']:44} median {row['median_s']:.3f} s, most {row['most_s']:.3f} s (limit {row['limit_s']} s)")
    OUT.parent.mkdir(exist_ok=True)
    shape = {"prompt": PROMPT, "steps": STEPS, "layers": LAYERS}
    OUT.write_text(json.dumps({"recording": shape, "rows": rows, **machine()}, indent=1) + "\n")


def _spread(times: list[float]) -> dict[str, float]:
    return {"median_s": round(statistics.median(times), 3), "most_s": round(max(times), 3)}


if __name__ == "__main__":
    main()
