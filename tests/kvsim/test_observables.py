"""Observables and alpha sensitivity: by hand, against replays, trade-off and scipy, on recordings of every kind."""

import dataclasses
import itertools
import json
import math
import warnings

import numpy as np
import pytest
from cases import SAMPLES, rows_trace, write_trace
from scipy.stats import pearsonr, spearmanr
from typer.testing import CliRunner

import kvsim
from kvsim.alphas import ALPHAS
from kvsim.cli import app
from kvsim.correlation import pearson
from kvsim.errors import KvsimError, PolicyError
from kvsim.observables import OBSERVABLES, SENSITIVITIES, Sensitivity, correlate, sensitivity
from kvsim.synth import KINDS, Synthetic, synthetic_of, write_synthetic
from kvsim.tradeoff import decompose


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Small synthetic recordings of every kind, with little and much noise."""
    folder = tmp_path_factory.mktemp("synthetic")
    made = []
    for kind in KINDS:
        for noise in (0.1, 1.0):
            drift = {"drift": 0.1} if kind == "drift" else {}
            spec = Synthetic(kind, prompt=60, steps=16, layers=3, heads=2, noise=noise, **drift)
            made.append(write_synthetic(spec, folder / f"{kind}-{noise}"))
    return made


def one(observed, mass, loss=(0.0, 0.0, 0.0), name="t"):
    """A made-up result; its hash is its name."""
    full = {**dict.fromkeys(OBSERVABLES, 0.5), **observed}
    alphas = (0.0, 0.5, 0.9)
    return Sensitivity(name, name, "ema:alpha", 0.8, 4, 9, False, full, alphas, tuple(mass), tuple(loss))


def test_scores_by_hand(tmp_path):
    """Two layers, two steps, B = 2, and an EMA of 0.5: margins and entropy of numbers written out."""
    rows = [[[0.5, 0.25, 0.125, 0.125]] * 2, [[0.25, 0.25, 0.25, 0.125, 0.125], [0.75, 0, 0.25, 0, 0]]]
    trace = rows_trace(tmp_path / "t", rows, 3)
    found = sensitivity(trace, alpha=0.5, budget=2).observed
    # Layer means .5 .25 .125 .125, then .5 .125 .25 .0625 .0625: the second less the third, over the second.
    assert found["score_margin"] == pytest.approx((0.5 + 0.5) / 2)
    first = (0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)) / math.log(4)
    second = (0.5 * math.log(2) + 0.125 * math.log(8) + 0.25 * math.log(4) + 0.125 * math.log(16)) / math.log(5)
    assert found["score_entropy"] == pytest.approx((first + second) / 2)
    # State after step 1: 3/4 of the first row. Step 2: a quarter of it, a quarter of layer 0, a half of layer 1.
    before = 0.75 * np.array([0.5, 0.25, 0.125, 0.125, 0])
    state = before / 4 + np.array(rows[1][0]) / 4 + np.array(rows[1][1]) / 2
    a, b = sorted(state)[-2], sorted(state)[-3]
    assert found["state_margin"] == pytest.approx((0.5 + (a - b) / a) / 2)


@pytest.mark.parametrize("over", ["both", "step", "layer"])
def test_the_rest_is_that_of_replays_and_of_the_trade_off(tmp_path, over):
    trace = write_trace(tmp_path / "t", steps=10)
    tail = "" if over == "both" else f",over={over}"
    found = sensitivity(trace, alpha=0.7, over=over, budget=6, h=2)
    watched = kvsim.replay(trace, f"ema:0.7{tail}", budget=6).summary()
    assert found.observed["disagreement"] == 1 - watched["raw_agreement"]
    assert found.observed["raw_top_evicted"] == watched["raw_top_evicted"]
    mass = [kvsim.replay(trace, f"ema:{a}{tail}", budget=6).summary()["kept_mass"] for a in ALPHAS]
    loss = [row.total for row in decompose(trace, [f"ema:{a}{tail}" for a in ALPHAS], budget=6, h=2)]
    assert (list(found.kept_mass), list(found.loss)) == (pytest.approx(mass), pytest.approx(loss))
    want = (max(mass) - min(mass), max(loss) - min(loss), mass[-1] - mass[0])
    assert tuple(found.responses.values()) == pytest.approx(want)
    assert found.best_by_kept_mass == [ALPHAS[int(np.argmax(mass))]]
    assert found.best_by_loss == [ALPHAS[int(np.argmin(loss))]]
    assert (found.rule, found.alpha, found.budget) == (f"ema:alpha{tail}", 0.7, 6)


def test_state_margin_is_the_shadow_replays(tmp_path):
    """Where the margin is 0 at every step, the shadow replay counts ties."""
    flat = rows_trace(tmp_path / "t", [[[1 / (8 + t)] * (8 + t)] * 2 for t in range(4)], 7)
    assert sensitivity(flat, alpha=0, budget=3).observed["state_margin"] == 0
    assert kvsim.replay(flat, "ema:0", budget=3, shadow=True).summary()["ties"] > 3


def test_a_rotating_preference_wants_a_low_alpha_and_noise_a_high_one(tmp_path):
    """The direction is known where the truth is: without noise memory only lags; without drift it only helps."""
    size = {"prompt": 80, "steps": 24, "layers": 2, "heads": 1}
    moving = write_synthetic(Synthetic("drift", noise=0, drift=0.15, **size), tmp_path / "moving")
    noisy = write_synthetic(Synthetic("iid", noise=2.0, **size), tmp_path / "noisy")
    moving, noisy = (
        sensitivity(t, over="step", utility=synthetic_of(t).utilities, compression_ratio=0.8) for t in (moving, noisy)
    )
    assert moving.best_by_loss == [0.0]
    assert noisy.best_by_loss[0] >= 0.8
    assert moving.responses["loss_spread"] > 0.04
    assert noisy.responses["loss_spread"] > 0.01


def test_correlations_are_scipys(many):
    rows = [sensitivity(trace, budget=7) for trace in many]
    found = correlate(rows, resamples=200)
    assert len(found) == len(OBSERVABLES) * len(SENSITIVITIES)
    for row in found:
        # In float32, where shares that are equal but for rounding tie.
        x = np.array([r.observed[row["observable"]] for r in rows], np.float32)
        y = np.array([r.responses[row["sensitivity"]] for r in rows], np.float32)
        assert row["spearman"] == pytest.approx(spearmanr(x, y).statistic, abs=1e-9)
        assert row["pearson"] == pytest.approx(pearsonr(x, y).statistic, abs=1e-5)
        assert row["spearman_low"] < row["spearman"] < row["spearman_high"]
        assert 0 < row["spearman_p"] <= 1
    assert found == correlate(rows, resamples=200)
    assert found != correlate(rows, resamples=200, seed=1)


def test_permutation_p_is_that_of_all_orders():
    """Of the six orders of three points, two are in line, and all are as far as rho = 0.5."""
    rows = [one({"score_margin": x}, (0, y, 0), name=str(x)) for x, y in ((1.0, 0.1), (2.0, 0.2), (3.0, 0.4))]
    found = {(r["observable"], r["sensitivity"]): r for r in correlate(rows)}
    line = found["score_margin", "kept_mass_spread"]
    assert (line["spearman"], line["spearman_low"], line["spearman_high"]) == (1, 1, 1)
    assert line["spearman_p"] == pytest.approx(1 / 3)
    assert line["pearson"] == pytest.approx(pearsonr([1, 2, 3], [0.1, 0.2, 0.4]).statistic)


def test_p_of_few_recordings_tries_every_order():
    x, y = (1.0, 2.0, 3.0, 4.0, 5.0), (0.1, 0.3, 0.2, 0.5, 0.4)
    rows = [one({"score_margin": a}, (0, b, 0), name=str(a)) for a, b in zip(x, y, strict=True)]
    found = {(r["observable"], r["sensitivity"]): r for r in correlate(rows, resamples=1)}
    rho = abs(spearmanr(x, y).statistic)
    orders = [abs(spearmanr(x, order).statistic) >= rho - 1e-9 for order in itertools.permutations(y)]
    assert found["score_margin", "kept_mass_spread"]["spearman_p"] == pytest.approx(np.mean(orders))


def test_what_is_undefined_is_none():
    rows = [one({"score_margin": float(i)}, (0, i / 10, 0), name=str(i)) for i in range(4)]
    found = {(r["observable"], r["sensitivity"]): r for r in correlate(rows)}
    names = [f"{name}{end}" for name in ("spearman", "pearson") for end in ("", "_low", "_high", "_p")]
    for key in [("score_margin", "loss_spread"), ("disagreement", "kept_mass_spread")]:
        assert [found[key][name] for name in names] == [None] * 8
    two = correlate(rows[:2])[0]
    assert [two[name] for name in names] == [None] * 8
    assert two["traces"] == 2
    rows[0] = dataclasses.replace(rows[0], observed={**rows[0].observed, "score_margin": None})
    three = correlate(rows)[0]
    assert (three["traces"], three["spearman"]) == (3, 1)
    assert all(r["spearman"] is None and r["traces"] == 0 for r in correlate([]))


def test_a_spread_of_rounding_is_none():
    found = one({}, (0.5, 0.5 + 1e-16, 0.5 - 1e-16), (0.1, 0.2, 0.2 + 1e-16))
    assert found.responses == {"kept_mass_spread": 0.0, "loss_spread": pytest.approx(0.1), "kept_mass_tilt": 0.0}
    assert found.best_by_kept_mass == [0.0, 0.5, 0.9]
    assert found.best_by_loss == [0.0]
    assert one({}, (0.5, 0.7, 0.6)).responses["kept_mass_tilt"] == pytest.approx(0.1)


def test_pearson_of_constants_is_undefined():
    assert np.mean([0.1] * 3) != 0.1
    assert np.isnan(pearson([0.1] * 3, np.arange(3)))
    assert pearson([1, 2, 4], [1, 2, 4]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("rows", "budget"),
    [
        ([[[0.4, 0.3, 0.2, 0.1]] * 2], 2),
        ([[[0.0] * 4], [[0.0] * 5]], 2),
        ([[[0.25] * 4], [[0.2] * 5]], 9),
        ([[[0.5, 0.5]]], 1),
    ],
    ids=["one step", "nothing attended", "all kept", "one token"],
)
def test_odd_recordings_give_numbers_or_none(tmp_path, rows, budget):
    trace = rows_trace(tmp_path / "t", rows, len(rows[0][0]) - 1, sink_logits=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = sensitivity(trace, budget=budget)
    json.dumps(found.summary(), allow_nan=False)
    assert (found.observed["score_margin"] is None) == (budget == 9)
    assert (found.observed["score_entropy"] is None) == (sum(rows[0][0]) == 0)


def test_bad_requests(tmp_path, many):
    trace = write_trace(tmp_path / "t", steps=2)
    for words, error, options in [
        ("in \\[0, 1\\)", PolicyError, {"alpha": 1.0}),
        ("two different alphas", KvsimError, {"alphas": [0.5, 0.5]}),
        ("h must be", KvsimError, {"h": -1}),
    ]:
        with pytest.raises(error, match=words):
            sensitivity(trace, budget=5, **options)
    row = sensitivity(trace, budget=5)
    with pytest.raises(KvsimError, match="given twice"):
        correlate([row, row])
    with pytest.raises(KvsimError, match="same rule"):
        correlate([row, sensitivity(many[0], alpha=0.5, budget=5)])
    with pytest.raises(KvsimError, match="resamples"):
        correlate([row], resamples=0)


def test_the_command(many, tmp_path):
    paths = [trace.path for trace in many[:6]]
    printed = run("analyze", "sensitivity", *paths, "--budget", 6, "--over", "step").stdout
    assert "correlations over 6 recordings" in printed
    assert "observed: ema:0.8,over=step; u: true utilities; B: 6 tokens" in printed
    assert "nan" not in printed.lower()
    found = json.loads(run("analyze", "sensitivity", *paths[:2], "--json").stdout)
    assert [row["trace"] for row in found["results"]] == ["iid-0.1", "iid-1.0"]
    assert found["results"][0]["alphas"] == list(ALPHAS)
    assert {row["spearman"] for row in found["correlations"]} == {None}
    five = run("analyze", "sensitivity", *paths[:5], "--budget", 6)
    assert "Spearman" not in five.stdout
    assert "correlations over recordings need at least 6 of them; those over fewer say nothing" in five.stdout
    five = json.loads(run("analyze", "sensitivity", *paths[:5], "--budget", 6, "--json").stdout)
    assert any(row["spearman"] is not None for row in five["correlations"])
    alone = run("analyze", "sensitivity", paths[0]).stdout
    assert "need at least 6 of them" in alone
    write_trace(tmp_path / "real", steps=3, capture="scores")
    mixed = ("analyze", "sensitivity", paths[0], tmp_path / "real")
    assert "add --smoothed" in run(*mixed, code=2).stderr
    assert "scores captures among them: approximate" in run(*mixed, "--smoothed").stdout
    assert "[0, 1)" in run("analyze", "sensitivity", paths[0], "--alpha", 2, code=2).stderr


def test_the_tables_fit_a_hundred_columns(many):
    paths = [SAMPLES / "*", *(trace.path for trace in many[:3])]
    printed = run("analyze", "sensitivity", *paths, "--smoothed").stdout.splitlines()
    assert any("Spearman" in line for line in printed)
    notes = ("correlations", "observed")
    assert max(len(line) for line in printed if not line.startswith(notes)) <= 100
