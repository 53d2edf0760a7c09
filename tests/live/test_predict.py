"""Live answers beside what replays said, and how well the one tells the other."""

import itertools
import json
import math

import numpy as np
import polars as pl
import pytest
import scipy.stats
from asking import run, run_json, save_model
from kvsim_traces.loading import load_model

import kvsim
from kvsim.errors import KvsimError
from kvsim.evaluate import evaluate
from kvsim.live import decode, prefill
from kvsim.live.closed_loop import closed_loop
from kvsim.predict import predict_rows
from kvsim.predictions import PREDICTORS, auc, prediction, read_predictions
from kvsim.questions import ask, counter
from kvsim.tasks import TASKS

A, B, C = (f"ema:{alpha}/budget=10%" for alpha in (0.5, 0.8, 0.9))


def row(policy=A, score=0.0, *, index=0, **changes):
    return {"task": "vt", "length": 512, "seed": 0, "index": index, "policy": policy, "score": score} | {
        name: changes.get(name, 0.5) for name in (*PREDICTORS, *changes)
    }


def rows_of(scores, policies=(A, B, C), **values):
    """Rows of [samples][policies] scores and predictors."""
    return [
        row(policy, own[at], index=index, **{name: table[index][at] for name, table in values.items()})
        for index, own in enumerate(scores)
        for at, policy in enumerate(policies)
    ]


# By hand


def test_auc_by_hand():
    scores = np.array([[100.0, 0.0, 0.0], [50.0, 100.0, 50.0]])
    values = np.array([[0.9, 0.5, 0.9], [0.1, 0.2, 0.3]])
    # 100 over 0: .9 > .5 right, .9 = .9 half; 100 over 50: .2 > .1 right, .2 < .3 wrong
    assert auc(scores, values) == (4, 2.5 / 4)
    assert auc(scores, -values) == (4, 1.5 / 4)
    assert auc(np.zeros((2, 3)), values) == (0, None)


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_that_of_all_pairs(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(3, size=(6, 4)) * 50.0
    values = rng.integers(4, size=(6, 4)) / 4
    sides = [
        1.0 if values[s, i] > values[s, j] else 0.5 if values[s, i] == values[s, j] else 0.0
        for s in range(6)
        for i, j in itertools.permutations(range(4), 2)
        if scores[s, i] > scores[s, j]
    ]
    assert auc(scores, values) == (len(sides), pytest.approx(np.mean(sides)))
    # with one right and one wrong policy a sample it is the rank-sum statistic's
    one = scipy.stats.mannwhitneyu(values[0], values[1]).statistic / 16
    joint = np.concatenate([values[0], values[1]])[None]
    right = np.array([[100.0] * 4 + [0.0] * 4])
    assert auc(right, joint)[1] == pytest.approx(one)


def test_ranks_of_policies_by_hand():
    scores = [[100, 100, 0], [100, 0, 0]]
    kept = [[0.9, 0.8, 0.1], [0.9, 0.8, 0.1]]
    error = [[0.3, 0.1, 0.2], [0.3, 0.1, 0.2]]
    found = {
        line["predictor"]: line for line in prediction(rows_of(scores, open_kept_mass=kept, open_output_error=error))
    }
    assert list(found) == list(PREDICTORS)
    best = found["open_kept_mass"]
    assert (best["task"], best["length"], best["budget"]) == ("vt", 512, "10%")
    assert (best["samples"], best["policies"], best["pairs"]) == (2, 3, 4)
    assert best["rank_correlation"] == pytest.approx(1)
    assert best["auc"] == 1
    # a small error should mean a good answer: mean scores 100, 50, 0 against -.3, -.1, -.2
    assert found["open_output_error"]["rank_correlation"] == pytest.approx(-0.5)
    assert found["open_output_error"]["auc"] == pytest.approx(1 / 4)
    # a predictor that says nothing
    assert found["closed_kept_mass"]["rank_correlation"] is None
    assert found["closed_kept_mass"]["rank_correlation_low"] is None
    assert found["closed_kept_mass"]["auc"] == 0.5
    assert (found["closed_kept_mass"]["auc_low"], found["closed_kept_mass"]["auc_high"]) == (0.5, 0.5)


def test_equal_policies_share_a_rank():
    scores = [[100, 100, 0], [0, 0, 0]]
    kept = [[0.9, 0.5, 0.1]] * 2
    (line,) = (one for one in prediction(rows_of(scores, open_kept_mass=kept)) if one["predictor"] == "open_kept_mass")
    expected = scipy.stats.spearmanr([50, 50, 0], [0.9, 0.5, 0.1]).statistic
    assert line["rank_correlation"] == pytest.approx(expected)


def test_nothing_is_defined_where_all_answers_are_alike():
    for line in prediction(rows_of([[100, 100, 100]] * 3)):
        for name in ("rank_correlation", "auc"):
            assert [line[f"{name}{end}"] for end in ("", "_low", "_high")] == [None] * 3
        assert line["pairs"] == 0
        json.dumps(line, allow_nan=False)


def test_intervals_hold_the_value_and_follow_the_seed():
    rng = np.random.default_rng(5)
    scores = rng.integers(2, size=(12, 3)) * 100.0
    kept = scores / 100 + rng.normal(size=scores.shape)
    rows = rows_of(scores, open_kept_mass=kept)
    line, again, other = (prediction(rows, seed=seed)[0] for seed in (0, 0, 1))
    assert line == again != other
    for name in ("rank_correlation", "auc"):
        assert line[f"{name}_low"] <= line[name] <= line[f"{name}_high"]
        assert line[f"{name}_low"] < line[f"{name}_high"]
    drawn = np.random.default_rng(0).integers(12, size=(1000, 12))
    shares = [auc(scores[d], kept[d])[1] for d in drawn]
    assert line["auc_low"] == pytest.approx(np.quantile(shares, 0.025))


def test_the_order_of_the_rows_means_nothing():
    rng = np.random.default_rng(3)
    rows = rows_of(rng.integers(2, size=(30, 3)) * 100.0, open_kept_mass=rng.random((30, 3)))
    shards = [[r for r in rows if r["index"] % 3 == part] for part in (2, 0, 1)]
    assert prediction([*itertools.chain(*shards)]) == prediction(rows)


def test_budgets_tasks_and_lengths_are_apart():
    rows = [
        r | {"policy": r["policy"].replace("10%", budget), "length": length}
        for budget in ("10%", "20%")
        for length in (512, 900)
        for r in rows_of([[100, 0, 0]], closed_kept_mass=[[0.5, 0.1, 0.2]])
    ]
    found = prediction([*rows, *(r | {"policy": "full"} for r in rows_of([[100.0]], ["full"]))])
    assert len(found) == 5 * len(PREDICTORS)
    assert [line["budget"] for line in found[:: len(PREDICTORS)]] == ["10%", "10%", "20%", "20%", "-"]
    assert {line["policies"] for line in found[: -len(PREDICTORS)]} == {3}


def test_a_predictor_that_some_row_lacks_has_no_line():
    rows = rows_of([[100, 0, 0], [0, 0, 100]])
    rows[4] |= {"open_survival": None}
    assert [line["predictor"] for line in prediction(rows)] == [name for name in PREDICTORS if name != "open_survival"]


def test_what_is_not_one_table():
    rows = rows_of([[100, 0, 0], [0, 0, 100]])
    with pytest.raises(KvsimError, match="no rows"):
        prediction([])
    with pytest.raises(KvsimError, match="vt at 512: every sample must have a row of every policy"):
        prediction(rows[:-1])
    with pytest.raises(KvsimError, match=r"sample 0 has two rows of ema:0.5"):
        prediction([*rows, rows[0]])
    # another seed's samples are others
    assert prediction([*rows, *(r | {"seed": 1} for r in rows)])[0]["samples"] == 4
    for name in ("model_hash", "chat", "answer_tokens", "version"):
        with pytest.raises(KvsimError, match=f"of one {name} can be compared, got None, 7"):
            prediction([*rows, row(index=2, **{name: 7})])
    with pytest.raises(KvsimError, match="unknown policy"):
        prediction([row("emma:0.8")])


# Files


def test_files_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [row(open_survival=None), row(B, 100, index=1)]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert read_predictions([file, file]) == rows * 2
    assert read_predictions([]) == []


BROKEN = {
    "not JSON": "{",
    "no 'task'": "[]",
    **{f"no '{name}'": json.dumps({k: v for k, v in row().items() if k != name}) for name in row() if name != "seed"},
    "no 'score'": json.dumps(row() | {"score": None}),
    "no 'length'": json.dumps(row() | {"length": True}),
    "no 'index'": json.dumps(row() | {"index": "0"}),
    "no 'seed'": json.dumps(row() | {"seed": "0"}),
    "no 'open_survival'": json.dumps(row() | {"open_survival": math.nan}),
    "no 'closed_output_error'": json.dumps(row() | {"closed_output_error": math.inf}),
}


@pytest.mark.parametrize("what", BROKEN)
def test_foreign_files(tmp_path, what):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row()) + "\n" + BROKEN[what] + "\n")
    with pytest.raises(KvsimError, match=f"^{file}: line 2 .*{what}"):
        read_predictions([file])
    run("analyze", "prediction", file, code=2)


def test_unreadable_files(tmp_path):
    file = tmp_path / "rows.jsonl"
    for make, what in (
        (lambda: None, "cannot be read"),
        (lambda: file.write_bytes(b"\xff\xfe"), "not UTF-8"),
        (lambda: file.write_text(""), "no rows"),
    ):
        make()
        assert what in run("analyze", "prediction", file, code=2).stderr
    assert "cannot be read" in run("analyze", "prediction", tmp_path, code=2).stderr


def test_the_table(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = rows_of([[100, 100, 0], [100, 0, 0]], open_kept_mass=[[0.9, 0.8, 0.1]] * 2)
    rows = [r | {"open_survival": None, "closed_survival": None} for r in rows]
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    printed = run("analyze", "prediction", file, "--intervals").stdout.splitlines()
    assert printed[0] == "vt at 512 tokens, B = 10%: 2 samples, 3 policies"
    assert [line.split() for line in printed[1:6] if line.split() and "─" not in line] == [
        ["predictor", "rank", "AUC", "pairs"],
        ["open", "kept", "mass", "1.00", "[0.87,", "1.00]", "1.00", "[1.00,", "1.00]", "4"],
        ["open", "output", "error", "-", "0.50", "[0.50,", "0.50]", "4"],
        ["closed", "kept", "mass", "-", "0.50", "[0.50,", "0.50]", "4"],
    ]
    assert run_json("analyze", "prediction", file)["results"] == prediction(rows)


def test_the_overview_of_all_tasks(tmp_path):
    rows = [
        one | {"task": task, "policy": one["policy"].replace("10%", budget), "open_survival": None, "answer_tokens": n}
        for budget in ("10%", "20%")
        for task, n in (("vt", 8), ("fwe", 16))
        for one in rows_of([[100, 100, 0], [100, 0, 0]], open_kept_mass=[[0.9, 0.8, 0.1]] * 2)
    ]
    file = tmp_path / "rows.parquet"
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(file)
    assert read_predictions([file]) == rows
    assert run_json("analyze", "prediction", file)["results"] == prediction(rows)
    printed = run("analyze", "prediction", file).stdout.splitlines()
    assert [line for line in printed if line.startswith("B = ")] == [
        f"B = {budget}: {what}"
        for budget in ("10%", "20%")
        for what in (
            "AUC over pairs of policies on one sample, 0.5 is chance",
            "rank correlation over policies",
        )
    ]
    assert [line.split() for line in printed if line.startswith(("vt", "fwe"))][:4] == [
        ["vt", "512", "2", "3", "4", "1.00", "-", "0.50", "0.50", "0.50", "0.50"],
        ["fwe", "512", "2", "3", "4", "1.00", "-", "0.50", "0.50", "0.50", "0.50"],
        ["vt", "512", "2", "3", "4", "1.00", "-", "-", "-", "-", "-"],
        ["fwe", "512", "2", "3", "4", "1.00", "-", "-", "-", "-", "-"],
    ]
    assert max(map(len, printed)) <= 100
    one = run("analyze", "prediction", file, "--budget", "20%").stdout.splitlines()
    assert [line for line in one if line.startswith("B = ")] == [line for line in printed if line.startswith("B = 20")]
    error = run("analyze", "prediction", file, "--budget", "50%", code=2).stderr
    assert "--budget 50%: no rows of it (there are: 10%, 20%)" in error


def test_foreign_parquet(tmp_path):
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"mine")
    assert "is not a whole Parquet file" in run("analyze", "prediction", file, code=2).stderr
    pl.DataFrame([row(), row(score=math.nan, index=1)]).write_parquet(file)
    error = run("analyze", "prediction", file, code=2).stderr
    assert "rows.parquet: row 2 is not a row of kvsim predict: it has no 'score'" in error
    assert "cannot be read" in run("analyze", "prediction", tmp_path / "none.parquet", code=2).stderr


# With a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


POLICIES = ["ema:0.8", "single/group=layer", "snapkv:8"]
SETTING = {"length": 800, "answer_tokens": 5}


def test_rows_are_those_of_the_runs_they_name(folder):
    model, tokenizer = load_model(folder, device="cpu")
    task = TASKS["niah_single_1"]
    (rows,) = predict_rows(model, tokenizer, task, POLICIES, indices=[1], **SETTING)
    (live,) = evaluate(model, tokenizer, task, ["full", *POLICIES], indices=[1], **SETTING)
    question = ask(tokenizer, task.sample(1, 800, counter(tokenizer, chat=False)), chat=False)
    prefix = prefill(model, question.tokens)
    (full,) = decode(model, [prefix], ["full"], steps=5)
    loops = closed_loop(model, prefix, full.tokens, POLICIES)
    for row_, own, loop in zip(rows, live[1:], loops, strict=True):
        assert row_["policy"] == own["policy"] == loop.policy
        assert (row_["score"], row_["answer"]) == (own["score"], own["answer"])
        assert row_["full_score"] == live[0]["score"]
        assert (row_["live_kept_mass"], row_["live_survival"]) == (own["kept_mass"], own["survival"])
        assert row_["exact"]
        assert row_["steps"] == 5
        closed = loop.result.summary()
        assert row_["closed_kept_mass"] == pytest.approx(closed["kept_mass"])
        assert row_["closed_output_error"] == pytest.approx(closed["output_error"])
        assert row_["closed_survival"] == (loop.result.evicted_at[:, question.needle_positions] < 0).mean()
        json.dumps(row_, allow_nan=False)
    ema, _, snap = rows
    # evictions before the first step are all that a prefill-time policy makes: open and closed agree
    assert snap["open_survival"] == snap["closed_survival"]
    assert ema["open_kept_mass"] != ema["closed_kept_mass"]
    assert ema["open_kept_mass"] == pytest.approx(ema["closed_kept_mass"], abs=0.2)


def test_the_open_loop_is_a_replay_of_the_full_cache_s_recording(folder, tmp_path):
    from kvsim_traces import record

    model, tokenizer = load_model(folder, device="cpu")
    task = TASKS["niah_single_1"]
    (rows,) = predict_rows(model, tokenizer, task, POLICIES, indices=[0], **SETTING)
    question = ask(tokenizer, task.sample(0, 800, counter(tokenizer, chat=False)), chat=False)
    trace = record(model, question.tokens, out=tmp_path / "t", steps=5, capture="qkv", tokenizer=tokenizer)
    for row_ in rows:
        replayed = kvsim.replay(trace, row_["policy"])
        assert row_["open_kept_mass"] == pytest.approx(replayed.summary()["kept_mass"], abs=2e-3)
        assert row_["open_output_error"] == pytest.approx(replayed.summary()["output_error"], abs=2e-3)
        survived = (replayed.evicted_at[:, question.needle_positions] < 0).mean()
        assert row_["open_survival"] == pytest.approx(survived, abs=0.05)


def key_of(row):
    return row["index"], row["policy"]


def test_shards_together_are_the_whole(folder, tmp_path):
    words = ["predict", "--model", folder, "--task", "niah_single_1", "--samples", 3, "--length", 800]
    words += ["--answer-tokens", 3, "--policy", "ema:0.8", "--policy", "single", "--quiet"]
    whole = tmp_path / "whole.jsonl"
    assert run(*words, "--out", whole).stdout == f"wrote {whole}: 6 rows\n"
    shards = [tmp_path / "new" / f"{part}.jsonl" for part in (1, 2)]
    for part, out in enumerate(shards, start=1):
        run(*words, "--shard", f"{part}/2", "--out", out)
    rows = read_predictions([whole])
    parts = read_predictions(shards)
    assert [r["index"] for r in parts] == [0, 0, 2, 2, 1, 1]
    assert sorted(parts, key=lambda r: (r["index"], r["policy"])) == sorted(
        rows, key=lambda r: (r["index"], r["policy"])
    )
    results = [run_json("analyze", "prediction", *files)["results"] for files in ([whole], shards, shards[::-1])]
    assert results[0] == results[1] == results[2]
    assert "two rows" in run("analyze", "prediction", whole, shards[0], code=2).stderr


def test_what_the_command_refuses(folder, tmp_path):
    out = tmp_path / "rows.jsonl"
    words = ["predict", "--model", folder, "--task", "niah_single_1", "--policy", "ema:0.8", "--length", 800]
    for extra, what in (
        (["--samples", 0], "--samples must be at least 1"),
        (["--task", "niah"], "unknown task 'niah'"),
        (["--task", "qa_1"], "qa_1 needs questions"),
        (["--length", 30], "length 30 is too small"),
        (["--policy", "oracle:future", "--answer-tokens", 1], "oracle:future"),
        (["--policy", "emma"], "unknown policy"),
        (["--compression-ratio", "1.5"], "compression_ratio"),
        *((["--shard", shard], "--shard must be I/N") for shard in ("0/2", "3/2", "a/2", "2", "1/0", "²/3", "-1/2")),
    ):
        assert what in run(*words, *extra, "--out", out, code=2).stderr
        assert not list(tmp_path.iterdir())
    out.write_text("mine")
    assert "exists already" in run(*words, "--out", out, code=2).stderr
    assert "cannot be written" in run(*words, "--out", out / "below", code=2).stderr
    assert out.read_text() == "mine"
