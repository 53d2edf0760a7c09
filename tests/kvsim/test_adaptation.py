"""What an adaptive rule did and what it is worth: numbers, and the commands that print them."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from cases import SAMPLES, random_attention, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim.adaptation import DEFAULT_ADAPTIVE, adaptation, fixed_beside, hindsight
from kvsim.bench_adaptive import bench_adaptive
from kvsim.cli import app
from kvsim.synth import Synthetic, write_synthetic
from kvsim.tradeoff import decompose

REPORT = Path(kvsim.__file__).parent / "benchmarks" / "adaptive.json"
TAILS = ("", "/group=layer", "/group=head/refresh=2", "/score=vnorm", "/protect=sink:1+recent:2")


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("tail", TAILS)
def test_the_shadow_loss_of_a_fixed_alpha_is_its_total(tmp_path, tail):
    trace = write_trace(tmp_path / "t", steps=15)
    rules = [f"ema:{alpha},over={over}{tail}" for alpha in (0, 0.6, 0.9) for over in ("both", "step")]
    found = adaptation(trace, rules, budget=7, h=3)
    want = decompose(trace, rules, budget=7, h=3)
    assert [row.shadow_loss for row in found] == pytest.approx([row.total for row in want], abs=1e-12)
    results = [kvsim.replay(trace, rule, budget=7) for rule in rules]
    assert [row.kept_mass for row in found] == pytest.approx([r.summary()["kept_mass"] for r in results], abs=1e-12)


def test_a_synthetic_recording_knows_its_utilities(tmp_path):
    spec = Synthetic("drift", prompt=60, steps=20, drift=0.05)
    trace = write_synthetic(spec, tmp_path / "t")
    rules = ["ema:0.8,over=step", "ema:0.5/group=layer"]
    want = decompose(trace, rules, utility=spec.utilities)
    found = adaptation(trace, rules, utility=spec.utilities)
    assert [row.shadow_loss for row in found] == pytest.approx([row.total for row in want], abs=1e-12)


def test_a_path_says_what_happened(tmp_path):
    trace = write_trace(tmp_path / "t", steps=15)
    noise, trigger, tracking, fixed = adaptation(
        trace,
        ["adaptive:noise,warmup=4", "adaptive:disagreement,over=step", "adaptive:tracking/refresh=2", "ema:0.6"],
        budget=8,
    )
    assert noise.irreversible.alphas[:4].tolist() == [0.8] * 4
    assert len(set(noise.irreversible.alphas[4:])) == 1
    assert (noise.irreversible.switches, noise.irreversible.first_switch) == (1, 5)
    assert set(noise.shadow.signals) == {"sigma", "delta", "eta"}
    assert set(trigger.shadow.alphas[1:]) <= {0.3, 0.95}
    assert list(trigger.shadow.signals) == ["disagreement"]
    assert tracking.shadow.steps.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert tracking.shadow.first_switch == 5
    assert set(tracking.shadow.signals) == {"signal", "random"}
    assert fixed.alpha == 0.6
    summary = fixed.summary()["shadow"]
    assert summary.pop("alpha_mean") == pytest.approx(0.6)
    assert summary == {"alpha_min": 0.6, "alpha_max": 0.6, "switches": 0, "first_switch": None, "signals": {}}


def test_the_fixed_rules_beside_have_the_same_axes():
    rules = [
        "adaptive:noise/group=layer",
        "adaptive:tracking/group=layer",
        "adaptive:tracking,over=step/budget=9",
        "ema",
    ]
    found = [str(policy) for policy in fixed_beside(rules)]
    assert found[:2] == ["ema:0/group=layer", "ema:0.3/group=layer"]
    assert len(found) == 16
    assert found[-1] == "ema:0.99,over=step/budget=9"


def test_hindsight_takes_the_best_of_each_family(tmp_path):
    trace = write_trace(tmp_path / "t")
    rules = ["adaptive:tracking", "ema:0.2", "ema:0.9", "ema:0.2,over=step", "single"]
    with pytest.raises(kvsim.PolicyError, match=r"single.*no alpha to follow \(valid heads: adaptive, ema\)"):
        adaptation(trace, rules)
    rows = adaptation(trace, rules[:-1])
    both, step = hindsight(rows)
    assert both["family"] == rows[0].family == "ema:alpha/budget=10%"
    assert step["family"] == "ema:alpha,over=step/budget=10%"
    assert both["kept_mass"] == max(row.kept_mass for row in rows[1:3])
    assert both["shadow_loss"] == min(row.shadow_loss for row in rows[1:3])
    assert {row.alpha: row.shadow_loss for row in rows[1:3]}[both["shadow_loss_alpha"]] == both["shadow_loss"]


@pytest.mark.parametrize("budget", [1, 5, 1000])
def test_odd_recordings_give_numbers(tmp_path, budget):
    zero = np.zeros_like(random_attention(np.random.default_rng(0), 4, 2, 2, 7))
    for name, trace in {
        "one": write_trace(tmp_path / "one", steps=1),
        "zero": write_trace(tmp_path / "zero", attention=zero, prompt=7, sink_logits=True),
        "scores": write_trace(tmp_path / "scores", capture="scores", steps=3),
    }.items():
        text = run("analyze", "adaptive", "--trace", trace.path, "--budget", budget, "--json").stdout
        found = json.loads(text)
        assert len(found["results"]) == len(DEFAULT_ADAPTIVE) + 16, name
        for row in found["results"]:
            assert math.isfinite(row["kept_mass"])
            assert -1e-9 <= row["shadow_loss"] < 1
            if budget == 1000:
                assert row["shadow_loss"] == pytest.approx(0, abs=1e-12)
        assert "nan" not in run("analyze", "adaptive", "--trace", trace.path, "--budget", budget).stdout.lower()


def test_the_command_prints_what_python_returns(monkeypatch):
    sample = SAMPLES / "smollm2-multineedle-256"
    rules = ["adaptive:noise,over=step", "adaptive:tracking,over=step,beta=0.3"]
    words = ["analyze", "adaptive", "--trace", sample, "--policy", rules[0], "--policy", rules[1], "--h", 4]
    found = json.loads(run(*words, "--json").stdout)
    rows = adaptation(sample, [*rules, *fixed_beside(rules)], h=4)
    assert found["results"] == [row.summary() for row in rows]
    assert found["hindsight"] == hindsight(rows)
    output = run(*words).stdout
    assert max(map(len, output.splitlines())) <= 120
    assert "best of ema:alpha,over=step in hindsight" in output
    for word in (*rules, "ema:0.8,over=step", "sigma", "eta", "hindsight", "open loop", "compression_ratio 0.9"):
        assert word in output
    assert re.search(r"adaptive:noise,over=step +0\.749\d +0\.\d{4} +0\.51 +0\.30 +0\.80 +1 +11", output)


def test_bad_input_is_an_error(tmp_path):
    trace = write_trace(tmp_path / "t")
    for h in (-1, 1.5, True):
        with pytest.raises(kvsim.KvsimError, match="h must be"):
            adaptation(trace, h=h)
    with pytest.raises(kvsim.KvsimError, match="shape"):
        adaptation(trace, utility=lambda step: np.ones((1, 1)))
    with pytest.raises(kvsim.KvsimError, match="at least one policy"):
        adaptation(trace, [])
    assert "adaptive, ema" in run("analyze", "adaptive", "--trace", trace.path, "--policy", "tova", code=2).stderr
    run("analyze", "adaptive", code=2)


def test_the_benchmark_repeats(tmp_path):
    report = json.loads(REPORT.read_text())
    again = bench_adaptive(tmp_path, [kvsim.open_trace(SAMPLES / "smollm2-multineedle-256")], regimes=[], prompts=[256])
    (given,) = [row for row in report["recordings"] if row["trace"] == "smollm2-multineedle-256"]
    for rule, row in again["recordings"][0]["rules"].items():
        assert row == pytest.approx(given["rules"][rule], rel=1e-4)
    assert again["eta"] == [pytest.approx(report["eta"][0], rel=1e-4)]
    assert report["seeds"] == again["seeds"]
    etas = [row["eta"] for row in report["eta"]]
    assert etas == sorted(etas)
    assert etas[-1] > 10 * etas[0], "of nothing but the prompt's length"


def test_a_small_benchmark(tmp_path, monkeypatch):
    regimes = [{"kind": "iid", "noise": 1.0, "prompt": 40}, {"kind": "drift", "drift": 0.1, "noise": 0.3, "prompt": 40}]
    report = bench_adaptive(tmp_path, regimes=regimes, seeds=(1, 2), prompts=(40,), steps=14)
    assert report == bench_adaptive(tmp_path, regimes=regimes, seeds=(1, 2), prompts=(40,), steps=14)
    assert list(tmp_path.iterdir()) == []
    rule = "adaptive:tracking,over=step"
    rows = []
    for seed in (1, 2):
        trace = write_synthetic(Synthetic(**regimes[0], steps=14, seed=seed), tmp_path / str(seed))
        rows.append(adaptation(trace, [rule])[0])
    assert report["synthetic"][0]["rules"][rule]["kept_mass"] == pytest.approx(
        np.mean([row.kept_mass for row in rows]), rel=1e-5
    )
    fixed = [name for name in report["summary"] if name.startswith("ema:") and "step" in name]
    ratios = []
    for regime in report["synthetic"]:
        least = min(regime["rules"][name]["shadow_loss"] for name in fixed)
        ratios.append(regime["rules"][rule]["shadow_loss"] / least)
    assert report["summary"][rule]["shadow_loss_of_best"] == pytest.approx(math.sqrt(ratios[0] * ratios[1]), rel=1e-4)
    assert set(report["direction"]) == {"eta", "disagreement", "signal"}


def test_the_benchmark_says_what_the_readme_says():
    """Tracking ranks better than any one alpha on the synthetic recordings, and keeps no more mass."""
    summary = json.loads(REPORT.read_text())["summary"]
    for over in ("", ",over=step"):
        tracking = summary[f"adaptive:tracking{over}"]
        fixed = [row for rule, row in summary.items() if rule.startswith("ema:") and ("step" in rule) == bool(over)]
        assert tracking["shadow_loss_of_best"] < min(row["shadow_loss_of_best"] for row in fixed)
        assert tracking["kept_mass_of_best"] < max(row["kept_mass_of_best"] for row in fixed)
