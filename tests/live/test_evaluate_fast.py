"""Answers by the engine triton: batches of samples, the plain form's rows, and what is kept of a file."""

import json

import fast_cases as fc
import pytest
from asking import chatting, run, save_model
from kvsim_traces.loading import load_model

import kvsim.live.fast
from kvsim.errors import KvsimError
from kvsim.evaluate import evaluate
from kvsim.evaluations import comparisons, engine_of, read_evaluations
from kvsim.tasks import TASKS

pytestmark = pytest.mark.usefixtures("quiet_infinities")

POLICIES = ["full", "ema:0.8/budget=10%", "ema:0.8/budget=20%"]
SETTING = {"length": 800, "indices": range(2), "chat": True, "answer_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=chatting(), **fc.SMALL)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device=fc.DEVICE, dtype="float32")


@pytest.fixture
def batches(monkeypatch):
    """Count the rows of each batch, decoded by the plain form so that no test waits for an interpreter."""
    seen = []

    def plain(model, prefixes, policies, *, steps, stop, graphs):
        from dataclasses import replace

        from kvsim.live import decode

        seen.append([str(policy) for policy in policies])
        assert graphs is False
        found = decode(model, prefixes, policies, steps=steps, stop=stop)
        return [replace(one, engine="triton") for one in found]

    monkeypatch.setattr(kvsim.live.fast, "decode_fast", plain)
    monkeypatch.setattr("kvsim.evaluate.check_machine", lambda device: None)
    return seen


def rows_of(model, engine, **changes):
    return list(evaluate(*model, TASKS["niah_multikey_1"], POLICIES, engine=engine, **(SETTING | changes)))


def test_rows_that_differ_in_the_budget_only_share_a_batch(model, batches, monkeypatch):
    plain, fast = rows_of(model, "plain", indices=range(3)), rows_of(model, "triton", indices=range(3))
    assert batches == [["full"] * 3, POLICIES[1:] * 3]
    assert [[row | {"engine": "plain"} for row in own] for own in fast] == [
        [row | {"kept_mass": None} for row in own] for own in plain
    ]
    batches.clear()
    monkeypatch.setattr("kvsim.evaluate.ROWS", 2)
    wanted = lambda key: key["policy"] != "full" and key["index"] > 0  # noqa: E731
    few = rows_of(model, "triton", indices=range(3), wanted=wanted)
    assert batches == [POLICIES[1:], POLICIES[1:]]
    assert few == [[], fast[1][1:], fast[2][1:]]


@pytest.mark.slow
def test_the_kernels_answer_as_the_plain_form_does(model):
    plain, fast = ([row for own in rows_of(model, engine) for row in own] for engine in ("plain", "triton"))
    assert [engine_of(row) for row in fast] == ["triton"] * 6
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours["near_ties"] == theirs["near_ties"] == 0
        for name in ("policy", "index", "answer", "steps", "survival", "score", "prompt_length"):
            assert ours[name] == theirs[name], (name, ours, theirs)
    assert comparisons(fast)[0]["kept_mass"] is None
    with pytest.raises(KvsimError, match="answers of one engine can be compared, got plain, triton"):
        comparisons([*plain, *fast])


def test_a_file_of_the_other_engine_is_answered_again(folder, batches, tmp_path):
    out = tmp_path / "rows.parquet"
    words = ["eval", "--model", folder, "--task", "niah_single_1", "--length", 800, "--samples", 2]
    words += ["--answer-tokens", 2, "--policy", "ema:0.8", "--dtype", "float32", "--out", out, "--quiet"]
    run(*words)
    assert not batches
    printed = run(*words, "--engine", "triton").stdout
    assert batches == [["full"] * 2, ["ema:0.8/budget=10%"] * 2]
    assert "live, engine triton, greedy" in printed
    assert [engine_of(row) for row in read_evaluations(out)] == ["triton"] * 4
    again = json.loads(run(*words, "--engine", "triton", "--json").stdout)
    assert len(batches) == 2
    assert {row["kept_mass"] for row in again["answers"]} == {None}


def test_engines_that_cannot_run(folder, model, monkeypatch):
    with pytest.raises(KvsimError, match=r"unknown engine 'fast'.*plain, triton"):
        rows_of(model, "fast")
    words = ["eval", "--model", folder, "--task", "niah_single_1", "--policy", "ema:0.8", "--engine", "fast"]
    assert "unknown engine 'fast'" in run(*words, code=2).stderr
