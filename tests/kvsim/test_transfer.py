"""Scorers under single, ema and cumulative: against single replays, by hand, and through the command."""

import json
import warnings

import pytest
from cases import SAMPLES, rows_trace, write_trace
from kvsim_traces import CaptureError
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError, PolicyError
from kvsim.scorers import SCORERS
from kvsim.transfer import MEASURES, rules, transfer


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def row(found, scorer, rule):
    (one,) = [r for r in found.rows if (r["scorer"], r["rule"]) == (scorer, rule)]
    return one


@pytest.mark.parametrize("group", ["shared", "layer", "head"])
@pytest.mark.parametrize("score", ["attention", "vnorm", "keydiff", "random:3"])
def test_a_row_is_a_replay_and_its_difference_from_single(tmp_path, group, score):
    trace = write_trace(tmp_path / "t", steps=9)
    found = transfer(trace, [score], alphas=[0.6, 0.9], group=group, budget=7)
    assert [r["rule"] for r in found.rows] == rules([0.6, 0.9], group)
    base = kvsim.replay(trace, f"single/score={score}/group={group}", budget=7).summary()
    for one in found.rows:
        text = f"{one['rule']}/score={score}/group={group}"
        want = kvsim.replay(trace, text, budget=7).summary()
        assert one["policy"] == want["policy"] == str(kvsim.parse(f"{text}/budget=7"))
        assert {name: one[name] for name in MEASURES} == {name: want[name] for name in MEASURES}
        for name in MEASURES:
            change = None if one["rule"] == "single" else want[name] - base[name]
            assert one[f"{name}_change"] == change


def test_the_rules():
    assert rules() == ["single", "ema:0.8", "ema:0.8,over=step", "cumulative"]
    assert rules([0.9, 0.9, 0], "layer") == ["single", "ema:0.9", "ema:0", "cumulative"]
    for alphas, words in [([], "at least one alpha"), ([1.0], "in \\[0, 1\\)"), ([-0.1], "in \\[0, 1\\)")]:
        with pytest.raises(KvsimError, match=words):
            rules(alphas)


def test_a_static_scorer_freezes_by_hand(tmp_path):
    """Recency in one layer, two kept of 0, 1, 2 and then 3, 4: an EMA of 0.5 halves what a newcomer has.

    Step 1 sees 0, 1, 2, 3 at half their positions and keeps 2 (1) and 3 (1.5). At step 2 these have 1.5 and 2.25, and
    position 4 has 2: it takes the place of 2. At step 3, 3 has 2.625, 4 has 3, and 5 has 2.5: it is lost.
    """
    rows = [[[0.25] * 4], [[0.2] * 5], [[0.125, 0.125, 0.125, 0.125, 0.25, 0.25]]]
    trace = rows_trace(tmp_path / "t", rows, 3)
    found = transfer(trace, ["recency"], alphas=[0.5], budget=2)
    single, ema = row(found, "recency", "single"), row(found, "recency", "ema:0.5")
    assert (single["newest_kept"], ema["newest_kept"]) == (1, pytest.approx(2 / 3))
    # Step 2 sees 2, 3, 4 either way; step 3 sees 3, 4, 5 either way.
    assert single["kept_mass"] == ema["kept_mass"] == pytest.approx((1 + 0.6 + 0.625) / 3, abs=1e-3)
    assert ema["newest_kept_change"] == pytest.approx(-1 / 3)
    # Sums: 4, 6 and 4 at step 2, where the lower of the equal ones goes; then 9, 8 and 5.
    assert row(found, "recency", "cumulative")["newest_kept"] == pytest.approx(2 / 3)


def test_every_registered_scorer_is_replayed_or_left_out_with_a_reason(tmp_path):
    found = transfer(write_trace(tmp_path / "t", steps=3))
    assert {r["scorer"].split(":")[0] for r in found.rows} | set(found.left_out) == set(SCORERS)
    assert set(found.left_out) == {"kvpress", "learned"}
    assert not found.approximate


def test_a_scores_capture_says_what_it_cannot_give(tmp_path):
    trace = write_trace(tmp_path / "t", capture="scores", steps=3)
    found = transfer(trace)
    assert {r["scorer"] for r in found.rows} == {"attention", "entropy", "pivotal", "random:0", "recency"}
    assert found.approximate
    assert "single heads" in found.left_out["attention:heads=max"]
    assert found.left_out["keydiff"] == "capture scores has no keys; captures that have it: qk, qkv"
    for scorers, group, words in [
        (["vnorm"], "shared", "no values"),
        (["attention:heads=max"], "layer", "single heads"),
    ]:
        with pytest.raises((CaptureError, PolicyError), match=words):
            transfer(trace, scorers, group=group)
    with pytest.raises(PolicyError, match="group=head needs attention of single heads"):
        transfer(trace, group="head")
    with pytest.raises(PolicyError, match="unknown group"):
        transfer(trace, group="heads")


@pytest.mark.parametrize(
    ("rows", "budget"),
    [
        ([[[0.25] * 4] * 2], 2),
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
        found = transfer(trace, budget=budget)
    json.dumps(found.rows, allow_nan=False)
    for one in found.rows:
        assert 0 <= one["kept_mass"] <= 1
        assert (one["shadow_churn"] is None) == (len(rows) == 1)


def test_the_command(tmp_path):
    write_trace(tmp_path / "a", steps=5)
    write_trace(tmp_path / "b", steps=1, capture="scores")
    words = ("--scorer", "recency", "--scorer", "attention", "--alpha", 0.6, "--alpha", 0.9, "--budget", 6)
    printed = run("analyze", "transfer", tmp_path / "a", tmp_path / "b", *words).stdout
    assert "a: group shared, B = 6" in printed
    assert "b: group shared, B = 6; approximate (scores capture)" in printed
    assert "ema:0.9,over=step" in printed
    assert "nan" not in printed.lower()
    found = json.loads(run("analyze", "transfer", tmp_path / "a", *words, "--json", "--group", "layer").stdout)
    (one,) = found["results"]
    assert (one["group"], one["budget"], len(one["rows"])) == ("layer", 6, 2 * 4)
    assert "unknown score" in run("analyze", "transfer", tmp_path / "a", "--scorer", "x", code=2).stderr
    assert "[0, 1)" in run("analyze", "transfer", tmp_path / "a", "--alpha", 1, code=2).stderr


def test_the_table_fits_a_hundred_columns(monkeypatch):
    printed = run("analyze", "transfer", SAMPLES / "smollm2-long-64", "--alpha", 0.95).stdout
    table = printed[: printed.index("left out")].splitlines()
    assert max(map(len, table)) <= 100
    assert any(line.startswith("recency ") for line in table)
