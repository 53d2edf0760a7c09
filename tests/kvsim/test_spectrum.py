"""Scorers against attention: by hand, against scipy, against the definition, and through the command."""

import json
import warnings

import numpy as np
import pytest
from cases import SAMPLES, rows_trace, write_trace
from kvsim_traces import CaptureError
from scipy.stats import spearmanr
from typer.testing import CliRunner

import kvsim
from kvsim.candidates import candidates
from kvsim.cli import app
from kvsim.correlation import spearman, top_jaccard
from kvsim.errors import KvsimError, PolicyError
from kvsim.policy import Policy
from kvsim.scorers import SCORERS
from kvsim.scoring import attention_scores, independent_scores, ranking
from kvsim.spectrum import READINGS, half_depth, spectrum

SCORES = [
    *("attention:heads=max", "entropy", "expected", "keydiff", "knorm", "knorm:sign=plus", "kvzip", "lagkv:4,n_sink=2"),
    *("pivotal", "random:3", "recency", "rkv:0.3,threshold=0.1,heads=mean", "vnorm"),
]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def row(found, scorer, reading, layer=None):
    (one,) = [r for r in found.rows if (r["scorer"], r["reading"], r["layer"]) == (scorer, reading, layer)]
    return one


def by_definition(trace, scorer, size):
    """[T, K + 1] rho and Jaccard against attention, from the replay's own scores and rankings."""
    rho, jac = [], []
    for t in range(1, trace.num_steps + 1):
        everything = np.arange(trace.prompt_length + t)
        rankings = []
        for score in ("attention", scorer):
            lines = []
            for group in ("layer", "shared"):
                plan = kvsim.parse(f"single/score={score}/group={group}/budget={size}").plan(trace)
                rows = trace.attention_rows(t, list(plan.groups.layers)).astype(float)
                for g in range(plan.groups.count):
                    if plan.score.kind == "attention":
                        s = attention_scores(plan.score, rows, plan.groups, g, everything, renormalise=False)
                    else:
                        s = independent_scores(plan.score, plan.groups, g, everything, t)
                    lines.append(ranking(plan, g, s.mean(axis=0), everything))
            rankings.append(np.stack(lines))
        rho.append([spearman(x, y) for x, y in zip(*rankings, strict=True)])
        jac.append([top_jaccard(x, y, size) for x, y in zip(*rankings, strict=True)])
    return np.array(rho), np.array(jac)


@pytest.mark.parametrize("levels", [3, 1000])
def test_spearman_is_scipys(levels):
    rng = np.random.default_rng(levels)
    for n in (2, 3, 17, 200):
        x, y = rng.integers(levels, size=(2, n))
        if np.ptp(x) and np.ptp(y):
            assert spearman(x, y) == pytest.approx(spearmanr(x, y).statistic, abs=1e-12)
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_top_sets_keep_the_newest_of_equal_scores():
    assert top_jaccard([5, 1, 1, 1], [5, 0, 0, 9], 2) == 1
    assert top_jaccard([5, 1, 1, 1], [5, 9, 0, 0], 2) == pytest.approx(1 / 3)
    assert top_jaccard([1, 2], [2, 1], 5) == 1


def test_by_hand(tmp_path):
    """Key norms 3 1 2 4 5 | 1 3 2 5 4 in two layers; attention of one step, five positions, B = 2."""
    keys = np.zeros((2, 5, 1), np.float32)
    keys[0, :, 0], keys[1, :, 0] = [3, 1, 2, 4, 5], [1, 3, 2, 5, 4]
    attention = [[[0.1, 0.3, 0.2, 0.15, 0.25], [0.05, 0.15, 0.1, 0.3, 0.4]]]
    trace = rows_trace(tmp_path / "t", attention, 4, keys=keys)
    found = spectrum(trace, ["knorm", "knorm:sign=plus", "recency"], budget=2)
    # Ranks of the attention: 1 5 3 2 4 and 1 3 2 4 5; rho = 1 - 6 sum d^2 / (5 * 24).
    plus = row(found, "knorm:sign=plus", "layer", 0)
    assert plus["spearman"] == pytest.approx(1 - 6 * (4 + 16 + 1 + 4 + 1) / 120)
    assert plus["top_jaccard"] == pytest.approx(1 / 3)  # {3, 4} and {1, 4}
    second = row(found, "knorm:sign=plus", "layer", 1)
    assert second["spearman"] == pytest.approx(0.9)
    assert second["top_jaccard"] == 1
    assert row(found, "knorm", "layer", 0)["spearman"] == pytest.approx(-plus["spearman"])
    assert row(found, "knorm", "layer", 0)["top_jaccard"] == pytest.approx(1 / 3)  # {1, 2} and {1, 4}
    assert row(found, "recency", "layer", 1)["spearman"] == pytest.approx(0.9)
    mean = row(found, "knorm:sign=plus", "mean_of_layers")
    assert mean["spearman"] == pytest.approx((plus["spearman"] + 0.9) / 2)
    assert mean["top_jaccard"] == pytest.approx((1 / 3 + 1) / 2)
    # Means over layers: norms 2 2 2 4.5 4.5, attention .075 .225 .15 .225 .325.
    together = row(found, "knorm:sign=plus", "layer_mean")
    want = spearmanr([2, 2, 2, 4.5, 4.5], [1, 3.5, 2, 3.5, 5]).statistic
    assert together["spearman"] == pytest.approx(want)
    assert together["top_jaccard"] == 1
    assert all(r["trace"] == "t" and r["steps"] == r["spearman_steps"] == 1 for r in found.rows)
    first, *_ = found.overview()
    assert (first["scorer"], first["layer"]) == ("recency", 0)
    assert (first["spearman_min"], first["spearman_max"]) == pytest.approx((0.3, 0.9))


@pytest.mark.parametrize("scorer", SCORES)
def test_rows_are_those_of_the_definition(tmp_path, scorer):
    trace = write_trace(tmp_path / "t", steps=5, prompt=30)
    found = spectrum(trace, [scorer], budget=7)
    label = next(iter(candidates([scorer])[0]))
    rho, jac = (values.mean(axis=0) for values in by_definition(trace, scorer, 7))
    for place, layer in enumerate((0, 1, 2)):
        one = row(found, label, "layer", layer)
        assert (one["spearman"], one["top_jaccard"]) == pytest.approx((rho[place], jac[place]), abs=1e-9)
    one = row(found, label, "mean_of_layers")
    assert (one["spearman"], one["top_jaccard"]) == pytest.approx((rho[:3].mean(), jac[:3].mean()), abs=1e-9)
    one = row(found, label, "layer_mean")
    assert (one["spearman"], one["top_jaccard"]) == pytest.approx((rho[3], jac[3]), abs=1e-9)


def test_the_learned_scorer_needs_its_file(tmp_path):
    from kvsim.bilinear import BilinearScorer, save_scorer

    trace = write_trace(tmp_path / "t", steps=4, prompt=20)
    rng = np.random.default_rng(0)
    w_q, w_k = rng.normal(size=(3, 4 * 8)), rng.normal(size=(3, 2 * 8))
    path = tmp_path / "s.safetensors"
    save_scorer(BilinearScorer(w_q=w_q, w_k=w_k, num_heads=4, num_kv_heads=2, head_dim=8, training={}), path)
    found = spectrum(trace, [f"learned:{path}"], budget=5)
    label = found.rows[0]["scorer"]
    rho, jac = by_definition(trace, f"learned:{path}", 5)
    one = row(found, label, "layer_mean")
    assert (one["spearman"], one["top_jaccard"]) == pytest.approx((rho[:, 3].mean(), jac[:, 3].mean()), abs=1e-9)
    assert "learned:FILE" in spectrum(trace).left_out["learned"]


def test_every_registered_scorer_is_measured_or_left_out_with_a_reason(tmp_path):
    trace = write_trace(tmp_path / "t", steps=3)
    found = spectrum(trace)
    measured = {r["scorer"].split(":")[0] for r in found.rows}
    assert measured | {name.split(":")[0] for name in found.left_out} == set(SCORERS)
    assert set(found.left_out) == {"kvpress", "learned"}
    assert not any(r["scorer"] == "attention" for r in found.rows)
    assert {"knorm", "knorm:sign=plus", "attention:heads=max"} <= {r["scorer"] for r in found.rows}
    assert {r["reading"] for r in found.rows} == set(READINGS)


def test_a_scores_capture_says_what_it_cannot_give(tmp_path):
    trace = write_trace(tmp_path / "t", capture="scores", steps=3)
    found = spectrum(trace)
    assert {r["scorer"] for r in found.rows} == {"entropy", "pivotal", "random:0", "recency"}
    for name, words in [("keydiff", "no keys"), ("vnorm", "no values"), ("attention:heads=max", "single heads")]:
        assert words in found.left_out[name]
        assert str(trace.path) not in found.left_out[name]
        with pytest.raises((CaptureError, PolicyError), match=words):
            spectrum(trace, [name])


def test_knorm_has_a_sign_in_replays_too(tmp_path):
    trace = write_trace(tmp_path / "t", steps=1)
    low, high = (kvsim.replay(trace, f"single/score={s}/group=layer", budget=10) for s in ("knorm", "knorm:sign=plus"))
    kept = [(r.evicted_at < 0).sum() for r in (low, high)]
    both = ((low.evicted_at < 0) & (high.evicted_at < 0)).sum()
    assert kept == [30, 30]
    assert both == 0
    assert str(kvsim.parse("single/score=knorm:sign=minus")) == "single/score=knorm"


def test_steps_can_be_chosen(tmp_path):
    trace = write_trace(tmp_path / "t", steps=9)
    every = by_definition(trace, "keydiff", 6)[0]
    found = spectrum(trace, ["keydiff", "rkv:0.5"], budget=6, steps=range(1, 10, 4))
    assert found.steps == (1, 5, 9)
    assert row(found, "keydiff", "layer", 1)["spearman"] == pytest.approx(every[[0, 4, 8], 1].mean(), abs=1e-9)
    alone = spectrum(trace, ["rkv:0.5"], budget=6)
    jumped = spectrum(trace, ["rkv:0.5"], budget=6, steps=[9])
    ninth = by_definition(trace, "rkv:0.5", 6)[0][8, 0]
    assert row(jumped, "rkv:0.5", "layer", 0)["spearman"] == pytest.approx(ninth, abs=1e-9)
    assert row(alone, "rkv:0.5", "layer", 0)["steps"] == 9
    for steps, words in [([0], "from 1 to 9"), ([10], "from 1 to 9"), ([], "no steps"), ([True], "whole numbers")]:
        with pytest.raises(KvsimError, match=words):
            spectrum(trace, ["recency"], steps=steps)


def test_only_eligible_layers_count(tmp_path):
    trace = write_trace(tmp_path / "t", layers=4, steps=2, eligible=[1, 3])
    found = spectrum(trace, ["vnorm"], budget=5)
    assert [r["layer"] for r in found.rows] == [1, 3, None, None]
    assert found.overview()[0]["layer"] == 1
    with pytest.raises(KvsimError, match=r"no layer 2 to measure \(eligible: 1, 3\)"):
        found.overview(2)
    assert half_depth(range(32)) == 15
    with pytest.raises(PolicyError, match="eligible"):
        spectrum(write_trace(tmp_path / "none", steps=2, eligible=[]))


def test_what_is_undefined_is_none(tmp_path):
    """Equal keys give key norms and cosines no order; a row of zeros gives attention none."""
    rows = [[[0.1, 0.2, 0.3, 0.4], [0.0] * 4], [[0.1, 0.2, 0.3, 0.25, 0.15], [0.0] * 5]]
    trace = rows_trace(tmp_path / "t", rows, 3, keys=np.ones((2, 5, 2), np.float32), sink_logits=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = spectrum(trace, budget=2)
    for scorer in ("knorm", "keydiff"):
        one = row(found, scorer, "layer", 0)
        assert (one["spearman"], one["spearman_steps"], one["steps"]) == (None, 0, 2)
        assert one["top_jaccard"] == pytest.approx((1 + 1 / 3) / 2)  # the newest two, as the tie rule keeps them
        assert row(found, scorer, "mean_of_layers")["spearman"] is None
    assert row(found, "recency", "layer", 1)["spearman"] is None
    first = row(found, "recency", "layer", 0)["spearman"]
    assert row(found, "recency", "mean_of_layers")["spearman"] == pytest.approx(first)
    json.dumps(found.rows, allow_nan=False)
    json.dumps(found.overview(), allow_nan=False)


def test_where_everything_is_kept_there_is_no_overlap_to_speak_of(tmp_path):
    trace = write_trace(tmp_path / "t", steps=4, prompt=20)
    at_all = spectrum(trace, ["recency"], budget=24)
    assert {r["top_jaccard"] for r in at_all.rows} == {None}
    assert at_all.rows[0]["spearman"] is not None
    some = row(spectrum(trace, ["recency"], budget=22), "recency", "layer", 0)["top_jaccard"]
    jac = by_definition(trace, "recency", 22)[1]
    assert some == pytest.approx(jac[2:, 0].mean())


def test_one_step_of_one_token(tmp_path):
    trace = rows_trace(tmp_path / "t", [[[0.75, 0.25]]], 1)
    found = spectrum(trace, budget=1)
    assert row(found, "recency", "layer", 0)["spearman"] == -1
    assert row(found, "recency", "layer", 0)["top_jaccard"] == 0


def test_the_sample_in_the_docstring():
    one = spectrum(SAMPLES / "smollm2-needle-512", ["keydiff"], steps=[1]).overview()[0]
    assert (round(one["spearman_layer"], 2), one["layer"]) == (0.2, 14)


def test_named_scorers_are_checked(tmp_path):
    trace = write_trace(tmp_path / "t", steps=2)
    for scorers, words in [(["knrm"], "did you mean 'knorm'"), ([], "at least one"), (["learned"], "needs file")]:
        with pytest.raises(PolicyError, match=words):
            spectrum(trace, scorers)
    assert len(spectrum(trace, ["recency", "recency"]).rows) == 5
    assert isinstance(kvsim.parse("single/score=knorm:sign=plus"), Policy)


def test_the_command(tmp_path):
    write_trace(tmp_path / "a", steps=6)
    write_trace(tmp_path / "b", steps=6, capture="scores")
    printed = run(
        "analyze", "scorers", tmp_path / "a", tmp_path / "b", "--every", 2, "--layer", 2, "--budget", 5
    ).stdout
    assert "a: 3 layers, 3 steps, every 2 steps, B = 5" in printed
    assert "left out: keydiff (capture scores has no keys" in printed
    assert "knorm is minus the key norm" in printed
    assert "nan" not in printed.lower()
    words = ("--scorer", "recency", "--scorer", "knorm", "--json", "--compression-ratio", 0.8)
    found = json.loads(run("analyze", "scorers", "--trace", tmp_path / "a", *words).stdout)
    assert [r["scorer"] for r in found["overview"]] in (["recency", "knorm"], ["knorm", "recency"])
    assert found["budgets"] == {"a": 8}
    assert len(found["results"]) == 2 * (3 + 2)
    assert found["left_out"] == []
    for bad, text in [
        (("--every", 0), "every must be"),
        (("--layer", 9), "no layer 9"),
        (("--scorer", "x"), "unknown"),
    ]:
        assert text in run("analyze", "scorers", tmp_path / "a", *bad, code=2).stderr


def test_the_table_fits_a_hundred_columns(monkeypatch):
    printed = run("analyze", "scorers", SAMPLES / "smollm2-multineedle-256", "--every", 12).stdout
    table = printed[: printed.index("left out")].splitlines()
    assert max(map(len, table)) <= 100
    assert any(line.startswith("attention:heads=max ") for line in table)
