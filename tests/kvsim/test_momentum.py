"""Momentum dominance: what one layer, one step and a whole run carry, against the definition and the arithmetic."""

import dataclasses
import json

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from kvsim_traces import LayerInfo, Manifest, TraceWriter, open_trace
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.momentum import momentum
from kvsim.scoring import attention_scores, independent_scores

RULES = [
    *("ema:0.8", "ema:0.8,over=step", "ema:0.6,over=layer", "single", "cumulative", "ema:0.7/group=layer"),
    *("ema:0.5/group=head", "ema:0.9,over=step/refresh=3", "h2o", "ema:0.8/score=entropy"),
]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def steady_trace(path, row, steps, layers=1, *, zero=False):
    """The same scores at every step and layer; generated positions get nothing."""
    manifest = Manifest(
        capture="heads",
        prompt_length=len(row),
        planned_steps=steps,
        num_layers=layers,
        num_heads=1,
        num_kv_heads=1,
        arrays=["attention", "row_sums"],
        layers=[LayerInfo()] * layers,
        sink_logits=zero,
    )
    with TraceWriter(path, manifest) as writer:
        writer.write_prompt()
        for t in range(steps):
            full = np.tile(np.float32([*row, *[0.0] * (t + 1)]), (layers, 1, 1))
            writer.append(attention=full)
    return open_trace(path)


def scores_of(trace, source, groups, g, t):
    everything = np.arange(trace.prompt_length + t)
    if source.kind != "attention":
        return independent_scores(source, groups, g, everything, t)
    rows = trace.attention_rows(t, list(groups.layers)).astype(float)
    return attention_scores(source, rows, groups, g, everything, renormalise=False)


def by_definition(trace, policy, scorer):
    """Run the recurrence as it is, with one layer's scores changed, with one step's, and with all."""
    parsed = kvsim.parse(policy)
    plan = parsed.plan(trace)
    other = dataclasses.replace(parsed.expand(), score=kvsim.parse(f"single/score={scorer}").score).plan(trace).score
    norm = np.linalg.norm
    layers, steps, tops = [], [], []

    def step(m, s):
        m = np.zeros_like(m) if plan.reset else m
        for a, b, row in zip(plan.a[0], plan.b[0], s, strict=True):
            m = a * m + b * row
        return m

    def same(x, y, budget):
        x, y = (set(np.argsort(np.float32(z), kind="stable")[-budget:]) for z in (x, y))
        return len(x & y) / len(x | y)

    for g in range(plan.groups.count):
        own = changed = plan.m0[g]
        for t in range(1, trace.num_steps + 1):
            own, changed = np.append(own, 0), np.append(changed, 0)
            if not plan.scored[t - 1]:
                own[-1], changed[-1] = own[:-1].mean(), changed[:-1].mean()
                continue
            s, x = (scores_of(trace, source, plan.groups, g, t) for source in (plan.score, other))
            m = np.zeros_like(own) if plan.reset else own
            for a, b, row, new in zip(plan.a[0], plan.b[0], s, x, strict=True):
                after, instead = a * m + b * row, a * m + b * new
                layers.append((norm(new - row) / norm(row), norm(instead - after) / norm(after)))
                m = after
            rule = step(np.zeros_like(own), s), step(np.zeros_like(own), x)
            after, once, changed = step(own, s), step(own, x), step(changed, x)
            compared = [rule, (after, once), (after, changed)]
            steps.append([norm(b - a) / norm(a) for a, b in compared])
            tops.append([same(a, b, int(plan.budgets[g])) for a, b in compared])
            own = after
    return *np.mean(layers, axis=0), *np.mean(steps, axis=0), *np.mean(tops, axis=0)


@pytest.mark.parametrize("policy", RULES)
@pytest.mark.parametrize("scorer", ["vnorm", "keydiff"])
def test_differences_are_those_of_the_definition(tmp_path, policy, scorer):
    trace = write_trace(tmp_path / "t", steps=9, prompt=20)
    (found,) = momentum(trace, [policy], scores=[scorer], budget=5)
    want = by_definition(trace, f"{policy}/budget=5", scorer)
    got = [found.scores_layer, found.state_layer, found.scores_step, found.state_step, found.state_run]
    got += [found.top_scores, found.top_step, found.top_run]
    assert got == pytest.approx(want)
    assert found.steps.mean(axis=1) == pytest.approx(want[2:5])
    assert found.steps[2, -1] == pytest.approx(found.state_run_last)


@pytest.mark.parametrize("layers", [1, 4])
def test_the_papers_arithmetic_holds_where_scores_do_not_change(tmp_path, layers):
    """With the same scores at every layer and step the carried shares are the weights: 1 - A, and 1 - A^K."""
    trace = steady_trace(tmp_path / "t", [0.4, 0.3, 0.2, 0.1], 200, layers)
    noisy = momentum(trace, ["ema:0.8", "ema:0.8,over=step"], noise=[0.82], budget=2)
    for found, layer, step in zip(noisy, (0.2, None), (1 - 0.8**layers, 0.2), strict=True):
        assert found.scores_layer == pytest.approx(0.82)
        assert found.expected_step == pytest.approx(step)
        assert found.steps[1, -1] / found.steps[0, -1] == pytest.approx(step, rel=1e-6)
        if layer is not None:
            assert found.expected_layer == pytest.approx(layer)
            assert found.carried_layer == pytest.approx(layer, rel=0.05)
            assert found.state_layer == pytest.approx(0.16, abs=0.015), "82% becomes 16%"


def test_expected_weights():
    sample = SAMPLES / "smollm2-long-64"
    rules = ["ema:0.8", "ema:0.8,over=step", "ema:0.8,over=layer", "single", "cumulative", "ema:0.8/group=layer"]
    found = momentum(sample, rules, noise=[0.5])
    layer = [row.expected_layer for row in found]
    step = [row.expected_step for row in found]
    assert step == pytest.approx([1 - 0.8**30, 0.2, 1, 1, 0, 0.2])
    shares = [0.2 / 30 / (0.8 + 0.2 * k / 30) for k in range(1, 31)]
    alone = [0.2 / (1 - 0.8**k) for k in range(1, 31)]
    assert layer == pytest.approx([0.2, np.mean(shares), np.mean(alone), 1, 0, 0.2])


def test_memory_averages_noise_but_not_another_scorer(tmp_path):
    trace = steady_trace(tmp_path / "t", [0.4, 0.3, 0.2, 0.1], 300)
    fixed, noise = momentum(trace, ["ema:0.9,over=step"], scores=["entropy"], noise=[0.5], budget=2)
    settled = np.sqrt((noise.steps[2, 100:] ** 2).mean())
    assert settled == pytest.approx(0.5 * np.sqrt(0.1 / 1.9), rel=0.15), "(1 - A) / (1 + A) of the variance"
    assert fixed.carried_run == pytest.approx(1, rel=0.02), "a change that stays is carried whole"
    assert fixed.steps[1, -1] < 0.2 * fixed.steps[2, -1], "one step of it is not"


def test_no_change_is_no_difference(tmp_path):
    trace = write_trace(tmp_path / "t")
    for found in momentum(trace, RULES[:6], scores=["attention"], noise=[0]):
        assert found.state_layer == found.state_step == found.state_run == 0
        assert found.top_scores == found.top_run == 1
        assert found.carried_layer is found.carried_step is found.carried_run is None


def test_noise_repeats_with_its_seed(tmp_path):
    trace = write_trace(tmp_path / "t")
    one, same, other = (momentum(trace, noise=[0.3], seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    together = momentum(trace, RULES, scores=["vnorm"], noise=[0.3], budget=7)
    apart = [row for rule in RULES for row in momentum(trace, [rule], scores=["vnorm"], noise=[0.3], budget=7)]
    assert together == apart


@pytest.mark.parametrize(
    "make",
    [
        lambda path: write_trace(path, steps=1),
        lambda path: write_trace(path, capture="scores"),
        lambda path: steady_trace(path, [0.0] * 8, 4, 2, zero=True),
    ],
    ids=["one step", "head means", "all-zero rows"],
)
@pytest.mark.parametrize("budget", [1, 1000])
def test_odd_recordings_give_numbers_or_none(tmp_path, make, budget):
    trace = make(tmp_path / "t")
    words = ["analyze", "momentum", "--trace", trace.path, "--budget", budget]
    found = json.loads(run(*words, "--json").stdout)["results"]
    assert [row["change"] for row in found] == ["score=entropy", "noise:0.82"] * 2
    assert "nan" not in run(*words).stdout.lower()
    if budget == 1000:
        assert all(row["top_scores"] == row["top_step"] == row["top_run"] == 1 for row in found)


def test_bad_input_is_an_error(tmp_path):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(KvsimError, match="name a change"):
        momentum(trace)
    for noise in (-1, float("nan"), float("inf"), 1e200):
        with pytest.raises(KvsimError, match="noise"):
            momentum(trace, noise=[noise])
    found = momentum(trace, ["ema"], noise=[1e6, 0.8200001])
    assert [one.change for one in found] == ["noise:1000000", "noise:0.8200001"]
    words = ["analyze", "momentum", "--trace", trace.path]
    assert "did you mean 'vnorm'" in run(*words, "--score", "vnrom", code=2).stderr
    assert "linear rule" in run(*words, "--policy", "snapkv:6", code=2).stderr
    assert "linear rule" in run(*words, "--score", "rkv:0.3", code=2).stderr
    head_means = write_trace(tmp_path / "s", capture="scores")
    assert "values" in run("analyze", "momentum", "--trace", head_means.path, "--score", "vnorm", code=2).stderr


def test_the_command_prints_what_python_returns():
    sample = SAMPLES / "smollm2-multineedle-256"
    words = ["analyze", "momentum", "--trace", sample, "--score", "vnorm", "--noise", 0.82, "--policy", "ema:0.8"]
    found = json.loads(run(*words, "--json").stdout)
    want = momentum(sample, ["ema:0.8"], scores=["vnorm"], noise=[0.82])
    assert found["results"] == [row.summary() for row in want]
    shown = run(*words).stdout
    for word in ("one layer", "one step", "whole run", "score=vnorm", "noise:0.82", "expected", "0.200", "0.999"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 105
