"""The explorer in a real browser, against what ``kvsim replay --json`` prints."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browsing import Tab, csv_of
from exploring import LONG, MULTI, NEEDLE, replayed

# A browser on a busy machine can miss a moment; what is wrong fails three times.
pytestmark = [pytest.mark.slow, pytest.mark.flaky(reruns=2)]


@pytest.mark.parametrize("trace", [NEEDLE, LONG])
def test_numbers_on_the_screen_are_those_of_replay(screen: Tab, trace: str):
    screen.go("trace", trace=trace, policy="ema:0.9", others="tova\ncumulative", budget="20%")
    wanted = replayed(trace, "ema:0.9", "tova", "cumulative", budget="20%")
    shown = csv_of(screen, "summary")
    assert [row["policy"] for row in shown] == [row["policy"] for row in wanted]
    for name, column in (
        ("kept mass", "kept_mass"),
        ("raw agreement", "raw_agreement"),
        ("shadow churn", "shadow_churn"),
    ):
        assert [float(row[name]) for row in shown] == pytest.approx([row[column] for row in wanted], rel=1e-12)
    best = max(wanted, key=lambda row: row["kept_mass"])
    text = f"the highest mean is {best['kept_mass']:.3f}, of {best['policy']}."
    assert screen.page.get_by_text(text).first.is_visible()


def test_a_policy_typed_or_built_is_replayed_and_stands_in_the_url(screen: Tab):
    screen.go("trace", trace=NEEDLE)
    screen.enter("policy", "tova")
    assert screen.parameters()["policy"] == "tova"
    screen.page.get_by_text("Build a policy").click()
    screen.pick("build-group", "head")
    screen.wait_for_value("policy", "tova/group=head")
    assert csv_of(screen, "summary")[0]["policy"] == "tova/group=head/budget=10%"
    with_url = screen.page.url
    screen.go("trace", trace=MULTI)
    screen.page.goto(with_url)
    screen.settle()
    screen.wait_for_value("policy", "tova/group=head")
    assert float(csv_of(screen, "summary")[0]["kept mass"]) == pytest.approx(
        replayed(NEEDLE, "tova/group=head")[0]["kept_mass"], rel=1e-12
    )


def test_an_uploaded_npz_is_imported_and_replayed(screen: Tab, tmp_path: Path):
    rng = np.random.default_rng(5)
    scores = rng.dirichlet(np.full(40, 0.3), size=(8, 2)).astype(np.float32)
    for step in range(8):
        scores[step, :, 33 + step :] = 0
        scores[step] /= scores[step].sum(axis=-1, keepdims=True)
    file = tmp_path / "mine.npz"
    np.savez(file, scores=scores, prompt_length=32)
    screen.go("trace", trace="upload", policy="cumulative", others="")
    screen.page.locator('input[type="file"]').set_input_files(file)
    screen.page.get_by_role("heading", name="mine").wait_for()
    screen.settle()
    imported = tmp_path / "mine"
    subprocess.run(
        [sys.executable, "-m", "kvsim", "trace", "import", file, "--out", imported], check=True, capture_output=True
    )
    wanted = replayed(str(imported), "cumulative")[0]["kept_mass"]
    assert float(csv_of(screen, "summary")[0]["kept mass"]) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", ["garbage", "objects", "huge"])
def test_a_bad_upload_is_refused_and_the_app_goes_on(screen: Tab, tmp_path: Path, kind: str):
    file = tmp_path / "bad.npz"
    if kind == "garbage":
        file.write_bytes(b"PK\x03\x04 not an archive")
    elif kind == "objects":
        np.savez(file, scores=np.array([{"a": 1}], dtype=object), prompt_length=3)
    else:
        with open(file, "wb") as hole:
            os.truncate(hole.fileno(), 2 * 2**30)
    screen.go("trace", trace="upload", others="")
    screen.page.locator('input[type="file"]').set_input_files(file)
    refusal = {"garbage": "bad.npz", "objects": "object", "huge": "200"}[kind]
    screen.page.locator('[data-testid="stAlert"], [data-testid="stFileUploader"]').filter(
        has_text=refusal
    ).first.wait_for()
    screen.pick("offered", Path(LONG).name)
    assert screen.page.get_by_role("heading", name=Path(LONG).name).is_visible()
