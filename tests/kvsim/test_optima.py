"""Policies beside their own optimum: the numbers of `kvsim.oracle`, exact where that is quick."""

import json

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import charts, optima, oracle
from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.intervals import best_alphas_by

MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("multineedle-256", "long-64"))
POLICIES = ["ema:0.8", "tova", "nonuniform/score=knorm/group=head", "snapkv:16", "cumulative"]


@pytest.fixture(scope="module")
def played():
    trace = kvsim.open_trace(MULTI)
    return trace, kvsim.replay_many(trace, POLICIES, shadow_churn=False)


@pytest.mark.parametrize("method", ["exact", "bound"])
def test_the_numbers_are_the_oracles(played, method):
    trace, results = played
    told = []
    found = optima.beside_optimum(results, trace, method, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == 3 + 1 + 30 + 90
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    for one, result in zip(found, results, strict=True):
        if result.policy.startswith("snapkv"):
            assert (one.best, one.gap, one.method, one.step_rows()) == (None, None, None, [])
            assert "lets the cache grow" in one.why_not
            continue
        assert one.gap == oracle.gap(result, trace, method)
        assert one.method == method
        over = oracle.gap_over_time(result, trace, method)
        assert one.optimum_steps.tolist() == over.optimum.tolist()
        rows = one.step_rows()
        assert [row["kept_mass"] for row in rows] == over.policy.tolist()
        assert rows[0]["reference"] == f"oracle:{method}/group={one.group}"
    assert found[0].optimum_steps is found[-1].optimum_steps


def test_auto_is_exact_until_the_program_is_large(played, monkeypatch):
    trace, results = played
    exact = optima.beside_optimum(results[:1], trace)
    assert (exact[0].method, exact[0].gap) == ("exact", oracle.gap(results[0], trace, "exact"))
    monkeypatch.setattr(optima, "QUICK", 3)
    monkeypatch.setattr(oracle, "_known", type(oracle._known)())
    (bound,) = optima.beside_optimum(results[:1], trace)
    assert (bound.method, bound.gap) == ("bound", oracle.gap(results[0], trace))
    assert bound.gap > exact[0].gap


def test_the_command_says_which_best_is_meant(played):
    words = ["analyze", "oracle", str(MULTI), "--policy", "tova", "--policy", "snapkv:16", "--method", "auto", "--json"]
    (tova, snapkv) = json.loads(CliRunner().invoke(app, words).stdout)["results"]
    trace, results = played
    assert (tova["best_is"], tova["gap"]) == ("exact", oracle.gap(results[1], trace, "exact"))
    assert (snapkv["best_is"], snapkv["best"], snapkv["comparable"]) == (None, None, False)
    table = CliRunner().invoke(app, words[:-1]).stdout
    assert "best is" in table
    assert "exact optimum where that is quick" in table


def test_pooled_budgets_and_no_steps(tmp_path):
    trace = write_trace(tmp_path / "t", seed=4, steps=16)
    (result,) = kvsim.replay_many(trace, ["cumulative/group=head"], budget=6, shadow_churn=False)
    (one,) = optima.beside_optimum([result], trace, "bound", pooled=True, steps=False)
    assert one.gap == oracle.gap(result, trace, pooled=True)
    assert one.optimum_steps is None
    assert one.step_rows() == []


def test_what_cannot_be_compared(played):
    trace, results = played
    with pytest.raises(KvsimError, match="unknown method 'best'"):
        optima.beside_optimum(results, trace, "best")
    with pytest.raises(KvsimError, match="is a replay of smollm2-multineedle-256"):
        optima.beside_optimum(results, kvsim.open_trace(LONG))
    (shadow,) = kvsim.replay_many(trace, ["tova"], shadow=True)
    assert "shadow" in optima.beside_optimum([shadow], trace)[0].why_not


def test_the_chart_says_what_the_optimum_is(played):
    trace, results = played
    rows = [row for one in optima.beside_optimum(results, trace, "bound") for row in one.step_rows()]
    spec = charts.oracle_gap(rows).to_dict()
    notes = spec["title"]["subtitle"]
    assert notes[0] == "smollm2-multineedle-256"
    assert notes[1].startswith("irreversible; open loop; B = ")
    assert notes[2] == "thick grey: the optimum, oracle:bound, oracle:bound/group=layer, oracle:bound/group=head"


def test_the_best_alpha_by_a_metric(played):
    trace, _ = played
    texts = ["ema:0", "ema:0.5", "ema:0.9", "cumulative", "ema:0.3,over=step"]
    rows = [result.summary() for result in kvsim.replay_many(trace, texts, shadow_churn=False)]
    for metric, pick in (("kept_mass", max), ("raw_top_evicted", min)):
        (best,) = best_alphas_by(rows, metric)
        values = [row[metric] for row in rows[:3]]
        assert best["value"] == pick(values)
        assert best["best"] == [[0.0, 0.5, 0.9][values.index(pick(values))]]
        assert best["alphas"] == [0.0, 0.5, 0.9]
        assert best["at_edge"] is (best["best"] == [0.9])
    with pytest.raises(KvsimError, match="unknown metric with a best value 'churn'"):
        best_alphas_by(rows, "churn")
    with pytest.raises(KvsimError, match="of several"):
        best_alphas_by([rows[0], rows[1] | {"trace_hash": "other"}])
    assert np.isfinite(best["value"])
