"""`kvsim live --engine triton` and `kvsim bench live` as a user meets them."""

import json

import fast_cases as fc
import pytest
import torch
from token_texts import byte_level
from typer.testing import CliRunner

import kvsim
from kvsim import bench_live as bench
from kvsim import bench_live_models as models
from kvsim.bench_live_checks import same_answers
from kvsim.cli import app

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet_infinities")]
TEXT = "the three thin thieves"


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    fc.small("llama-gqa3", vocab_size=300).save_pretrained(path)
    byte_level().save_pretrained(path)
    (path / "prompt.txt").write_text(TEXT)
    words = ["live", "--model", path, "--prompt", path / "prompt.txt", "--steps", 2, "--budget", 5, "-q"]
    return [*words, "--dtype", "float32", "--policy", "ema:0.8"]


def test_both_engines_print_the_same_text(live):
    ways = {
        engine: json.loads(run(*live, "--physical", "--engine", engine, "--json").stdout)["results"]
        for engine in ("plain", "triton")
    }
    for plain, fast in zip(*ways.values(), strict=True):
        assert (fast["engine"], fast["attention"]) == ("triton", "triton")
        assert fast["physical"]
        same = ("policy", "text", "tokens", "steps", "evictions", "logical_bytes", "full_bytes", "loop")
        assert {name: fast[name] for name in same} == {name: plain[name] for name in same}
        assert not {"allocated_bytes", "attention"} & set(plain)
    before, after = ways["triton"][0]["allocated_bytes"]
    assert before > after


def test_the_table_says_what_was_allocated(live):
    output = run(*live, "--engine", "triton").stdout
    for word in ("live, engine triton", "evicted keys removed", "MB allocated before the first step", "near-ties"):
        assert word in output, output


def test_another_attention_is_named(live):
    output = run(*live, "--engine", "triton", "--attention", "sdpa").stdout
    assert "live, engine triton, attention sdpa; prompt" in output
    words = *live, "--engine", "triton", "--attention", "sdpa", "--json"
    assert json.loads(run(*words).stdout)["results"][0]["attention"] == "sdpa"
    assert "choice of --engine triton" in run(*live, "--attention", "sdpa", code=2).stderr
    assert "unknown attention 'x'" in run(*live, "--engine", "triton", "--attention", "x", code=2).stderr


def test_what_cannot_run_is_an_error_of_one_line(live, monkeypatch):
    assert "unknown engine 'cuda'" in run(*live, "--engine", "cuda", code=2).stderr
    error = run(*live, "--engine", "triton", "--policy", "ema:0.8/score=rkv", code=2).stderr
    assert "the fast form does not run redundancy; the plain engine can" in error
    assert "unknown attention 'x'" in run("bench", "live", "--attention", "x", code=2).stderr
    assert "unknown model 'llama'" in run("bench", "live", "--model", "llama", code=2).stderr
    if fc.DEVICE == "cpu":
        assert "needs a CUDA GPU" in run("bench", "live", code=2).stderr
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "needs a CUDA GPU" in run(*live, "--engine", "triton", code=2).stderr
        assert "needs a CUDA GPU" in run("bench", "live", code=2).stderr
        assert bench.main([]) == 2


TINY = {
    "kind": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


@pytest.fixture
def small_bench(monkeypatch):
    monkeypatch.setattr(bench, "build", lambda shape, device, _: models.build(shape, device, torch.float32))
    monkeypatch.setattr(bench, "WARM", 1)

    def measure(**options):
        given = {"models": ["tiny"], "contexts": [40], "replays": 2, "shapes": {"tiny": TINY}, "check": False}
        return bench.bench_live(**given | {"device": fc.DEVICE} | options)

    return measure


def test_a_report_says_what_was_measured_beside_what_must_be_read(small_bench):
    report = small_bench(settings=["full cache", "score every step"])
    full, every = report["rows"]
    assert (full["visible"], every["visible"]) == (43, 5)
    weights = sum(p.nbytes for p in models.build(TINY, "cpu", torch.float32).parameters()) - 50 * 32 * 4
    assert full["weight_bytes"] == every["weight_bytes"] == weights
    assert (full["visible_bytes"], every["visible_bytes"]) == (43 * 2 * 2 * 16 * 4, 5 * 2 * 2 * 16 * 4)
    floor = 1e3 * (weights + every["visible_bytes"]) / (report["copy_tb_s"] * 1e12)
    assert every["floor_ms"] == pytest.approx(floor)
    assert every["of_floor"] == pytest.approx(floor / every["ms"])
    assert every["of_loop"] == pytest.approx(every["loop_ms"] / every["ms"])
    assert every["allocated_before"] > every["allocated_after"]
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    text = "\n".join(bench.lines(report))
    for word in ("score every step", "full cache", "TB/s", "NOT met", "transformers: "):
        assert word in text


def test_attentions_stand_beside_each_other(small_bench):
    report = small_bench(settings=["score every step"], attentions=["triton", "sdpa", "flash_attn"])
    assert [row["attention"] for row in report["rows"]] == ["triton", "sdpa", "flash_attn"]
    ours, sdpa, flash = report["rows"]
    assert ours["visible"] == sdpa["visible"]
    # One loop for both.
    assert ours["loop_ms"] == sdpa["loop_ms"]
    assert "attention 'flash_attn'" in flash["error"]
    assert report["goals"]["of_floor"]["value"] == ours["of_floor"]


def test_a_setting_that_fails_or_has_no_time_left_is_reported_and_the_rest_goes_on(small_bench, monkeypatch):
    monkeypatch.setitem(bench.SETTINGS, "score every step", "ema:0.8/score=rkv")
    report = small_bench(settings=["score every step", "no eviction"])
    assert "the fast form does not run redundancy" in report["rows"][0]["error"]
    assert report["rows"][1]["ms"] > 0
    assert "redundancy" in "\n".join(bench.lines(report))
    assert small_bench(settings=["no eviction"], seconds=0)["rows"][0]["error"] == "not started: 0 seconds are over"


def test_the_check_of_answers_sees_a_wrong_one(monkeypatch):
    options = {"length": 20, "steps": 2, "rules": ("ema:0.8",), "fused": (False,)}
    right = same_answers(fc.DEVICE, **options)
    assert right["cases"] == 2
    assert right["evictions"] > 0
    assert bench._wrong_answers(right) == []
    wrong = kvsim.parse("ema:0.1")
    monkeypatch.setattr("kvsim.bench_live_checks.parse", lambda text: wrong.with_budget(kvsim.Budget(4)))
    assert bench._wrong_answers(same_answers(fc.DEVICE, **options))


def test_goals_are_those_of_the_longest_context():
    rows = [
        {"model": "a", "context": context, "setting": setting, "ms": ms, "of_floor": 0.75, "of_loop": 6.0}
        for context, setting, ms in [
            (16, "score every step", 9.0),
            (64, "score every step", 5.1),
            (64, "first step only", 5.0),
        ]
    ]
    found = bench.goals(rows)
    assert {name: aim["met"] for name, aim in found.items()} == dict.fromkeys(found, True)
    assert found["cost_of_scoring"]["value"] == pytest.approx(0.02)
    rows[1] |= {"ms": 5.2, "of_floor": 0.69}
    assert {name: aim["met"] for name, aim in bench.goals(rows).items()} == {
        "of_floor": False, "of_loop": True, "cost_of_scoring": False,
    }  # fmt: skip
    assert bench.goals([{"model": "a", "error": "x"}]) == {}
