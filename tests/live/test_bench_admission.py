"""The benchmark of admission runs, checks before it times, and its arithmetic is right; its times need a GPU."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from kvsim.bench_admission import bench, checks, runs
from kvsim.bench_admission.goals import BASE, OURS, estimate_seconds, goals, lines
from kvsim.bench_admission.models import SHAPES, SMOKE, Setting, drawn_masks
from kvsim.bench_live_models import build
from kvsim.cli import app
from kvsim.costs import SHAPES as COSTS
from kvsim.costs import Shape
from kvsim.errors import KvsimError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

TINY = Setting(window=8, chunk=16, steps=1, warm=1, repeats=1, device="cpu", dtype=torch.float32)
SMALL = {"length": 12, "steps": 1, "kinds": ("llama",), "shape": SMOKE["tiny"]}


@pytest.fixture(scope="module")
def report():
    return bench.smoke()


def test_smoke(report):
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["wrong"] == []
    assert max(report["checks"]["model"].values()) < 1e-5
    composed, whole = report["rows"]
    assert [row["length"] for row in report["rows"]] == [24, 40]
    for row, attended in ((composed, 1), (whole, 2)):
        assert [len(run["attention_ms"]) for run in row["runs"].values()] == [attended] * 2
        for name, cache in ((OURS, "dual"), ("SDPA math", "full")):
            run, own = row["runs"][cache], row["prefill"][name]
            layers = 2 * row["attention"][name] if row is composed else sum(run["attention_ms"])
            assert own["composed"] == (row is composed)
            assert own["ms"] == pytest.approx(run["rest_ms"] + layers)
            assert own["parts"]["attention"] == pytest.approx(layers)
            assert own["ms"] >= sum(own["parts"].values()) - own["parts"].get("gather (in attention)", 0)
        assert set(row["prefill"][OURS]["parts"]) == {
            "attention", "allocation", "projections", "gate", "gather (in attention)", "pool", "output and MLP",
            "head",
        }  # fmt: skip
        full, dual = (row["runs"][cache]["decode"] for cache in ("full", "dual"))
        assert full["visible"] == row["length"] + TINY.all_steps
        assert set(full["tried"]) == {"triton", "sdpa", "flash_attn"}
        assert "flash-attn-4 is not installed" in full["tried"]["flash_attn"]
        # A quarter of what has left the window at random, and the window.
        assert 8 <= dual["visible"] <= 8 + row["length"] / 4 + 2
        assert row["decode"]["ratio"] == pytest.approx(full["ms"] / dual["ms"])
    assert whole["runs"]["dual"]["prefill_ms"] == pytest.approx(whole["prefill"][OURS]["ms"])
    shape = Shape.of_config(SMOKE["tiny"])
    weights, cache = 2 * shape.read_weights, 40 * 2 * 8 * 2 * 2
    assert whole["decode"]["allowed"] == pytest.approx((weights + cache) / (weights + cache / 4))
    text = "\n".join(lines(report))
    for word in ("composed", "whole", "not measured", "goal at least 0.9", "gate", "pool"):
        assert word in text


def test_checks_see_what_is_wrong(monkeypatch):
    assert checks.wrong("model", checks.model_errors(TINY, **SMALL)) == []
    real = checks.DualCache
    monkeypatch.setattr(
        checks, "DualCache", lambda model, length, setting, *given: real(
            model, length, replace(setting, window=setting.window + 1), *given
        ),
    )  # fmt: skip
    found = checks.wrong("model", checks.model_errors(TINY, **SMALL))
    assert any("dual, prefill" in word for word in found)
    attend = checks.vertical_slash
    monkeypatch.setattr(checks, "vertical_slash", lambda *given, window, **more: attend(*given, window=1, **more))
    assert "vertical-slash" in checks.wrong("attention", checks.attention_errors(4, 2, 16, TINY, length=40))[0]


def test_out_of_memory_is_a_row(monkeypatch):
    class Full(runs.FullCache):
        def __init__(self, *given):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 500 GiB")

    monkeypatch.setattr(runs, "FullCache", Full)
    monkeypatch.setattr(runs, "decode_times", Full)
    row = {"model": "tiny", "length": 20}
    model = build(SMOKE["tiny"], "cpu", torch.float32)
    runs.measure(row, model, ("run", "attention"), False, TINY, Shape.of_config(SMOKE["tiny"]))
    assert row["runs"]["full"] == {"error": "out of memory"}
    assert row["runs"]["dual"]["decode"] == {"error": "out of memory"}
    assert set(row["prefill"]) == {OURS}
    text = "\n".join(lines({"machine": {}, "window": 8, "admitted": 0.25, "rows": [row], "goals": [], "wrong": []}))
    assert "full cache: out of memory" in text
    assert "decode, dual cache: out of memory" in text


def test_what_there_is_no_time_for_is_said_and_each_row_is_saved():
    saved = []
    given = {"models": ["tiny"], "lengths": (24, 16), "setting": TINY, "shapes": SMOKE, "check": False}
    report = bench.bench_admission(**given, seconds=0, save=lambda now: saved.append(len(now["rows"])))
    assert [row["error"] for row in report["rows"]] == ["not started: 0 seconds are over"] * 2
    assert saved == [1, 2]
    assert {aim["met"] for aim in report["goals"]} == {None}


def test_goals():
    row = {
        "model": "a", "length": 400_000, "prefill_ratio": {BASE: 4.4}, "attention_ratio": {BASE: 5.4, "cuDNN": 3.8},
        "decode": {"of_allowed": 0.91}, "memory_saved": 0.49,
    }  # fmt: skip
    found = {aim["name"].partition(": ")[2]: aim["met"] for aim in goals([row], "a")}
    assert list(found.values()) == [True, True, False, None, True, False]
    assert [aim["met"] for aim in goals([row], "b")] == [None] * 6


def test_masks_are_exact_and_differ():
    masks = drawn_masks(2, 3, 100, 25, "cpu")
    assert masks.sum(-1).tolist() == [[25] * 3] * 2
    assert len(masks.flatten(0, 1).unique(dim=0)) == 6


def test_shapes_are_those_that_costs_know():
    for name, shape in SHAPES.items():
        assert replace(Shape.of_config(shape, name)) == COSTS[name]


def test_estimates_grow_with_what_is_asked():
    shapes = [COSTS["llama-3.1-8b"]]
    composed = estimate_seconds(shapes, [400_000], ("run",), (), Setting())
    whole = estimate_seconds(shapes, [400_000], ("run",), (400_000,), Setting())
    # 31 more layers: four seconds each by FlashAttention-2, and one by ours.
    assert 100 < whole - composed < 200
    assert estimate_seconds(shapes, [400_000], ("attention",), (), Setting()) < composed + 60


def test_what_it_refuses(capsys, monkeypatch):
    assert bench.main([]) == 2
    assert (
        capsys.readouterr().err.strip().split("\n")[-1].startswith("kvsim: error: kvsim bench admission needs a CUDA")
    )
    for words, said in (
        (["--model", "gpt-5"], "qwen3-4b"),
        (["--part", "prefill"], "attention"),
        (["--sparsity", "1"], "sparsity"),
        (["--window", "0"], "window"),
        (["--whole", "5000"], "400000"),
        (["--tiling", "row=2"], "columns"),
        (["--tiling", "rows=x"], "number"),
    ):
        assert bench.main(words) == 2
        assert said in capsys.readouterr().err
    assert bench.main(["--estimate"]) == 0
    assert "minutes of an H200" in capsys.readouterr().out
    assert bench.tiling_of("split=1,columns=128").split is True
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KvsimError, match="TRITON_INTERPRET=1"):
        bench.smoke()


def test_command(report, monkeypatch):
    monkeypatch.setattr(bench, "smoke", lambda progress: report)
    run = CliRunner().invoke(app, ["bench", "admission", "--smoke", "--json"])
    assert json.loads(run.output)["rows"] == report["rows"]
    assert run.exit_code == 0
    run = CliRunner().invoke(app, ["bench", "admission"])
    assert run.exit_code == 2
    run = CliRunner().invoke(app, ["bench", "admission", "--estimate"])
    assert "minutes" in run.output
