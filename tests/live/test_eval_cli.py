"""kvsim eval: tables, resumption, and what is refused."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import polars as pl
import pytest
from asking import run, run_json, save_model

import kvsim.evaluate
from kvsim.evaluations import cells, comparisons, read_evaluations, write_evaluations

command = importlib.import_module("kvsim.cli.evaluate")

LAZY = "ema:0.8/refresh=4"
SETTING = ["--length", 800, "--samples", 2, "--answer-tokens", 3, "--policy", LAZY, "--policy", "tova"]
POLICIES = ["full", "ema:0.8/budget=10%", "ema:0.8/refresh=4/budget=10%", "tova/budget=10%"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def words(folder):
    return ["eval", "--model", folder, "--task", "niah_single_1", *SETTING]


@pytest.fixture
def decoded(monkeypatch):
    """Count what is decoded: policies of each batch."""
    batches = []
    plain = kvsim.evaluate.decode

    def counting(model, prefixes, policies, **options):
        batches.append([str(policy) for policy in policies])
        return plain(model, prefixes, policies, **options)

    monkeypatch.setattr("kvsim.evaluate.decode", counting)
    return batches


def test_full_cache_and_full_refresh_take_part(words, decoded):
    found = run_json(*words)
    assert decoded == [POLICIES] * 2
    assert [row["policy"] for row in found["answers"]] == POLICIES * 2
    assert [line["policy"] for line in found["results"]] == POLICIES
    assert found["results"] == comparisons(found["answers"])
    lazy = found["results"][2]
    assert lazy["refresh_delta"] is not None


def test_the_table(words):
    printed = run(*words, "--task", "niah_multivalue", "--length", 900).stdout.splitlines()
    assert [line for line in printed if "tokens" in line] == [
        "niah_single_1 at 800 tokens, 2 samples",
        "niah_multivalue at 800 tokens, 2 samples",
        "mean of the tasks at 800 tokens, 4 samples",
        "niah_single_1 at 900 tokens, 2 samples",
        "niah_multivalue at 900 tokens, 2 samples",
        "mean of the tasks at 900 tokens, 4 samples",
    ]
    rows = [line.split() for line in printed if line.startswith(("full", "ema", "tova"))]
    assert [row[0] for row in rows[:4]] == ["full", "ema:0.8", LAZY, "tova"]
    assert rows[0][1:] == ["0.0", "1.00", "1.00", "-", "-", "-", "-"]
    assert rows[2][4:] == ["+0.0", "1.000", "+0.0", "1.000"]
    assert rows[3][4:] == ["+0.0", "1.000", "-", "-"]
    assert printed[-1] == "B: 10% of the prompt (compression_ratio 0.9)"
    assert "nan" not in "".join(printed).lower()
    assert max(map(len, printed)) <= 110


def test_a_policy_named_twice_or_full_is_one(words, decoded):
    run(*words, "--policy", "full", "--policy", "ema:0.8", "--policy", LAZY, "--compression-ratio", 0.9, "--quiet")
    assert decoded[0] == POLICIES
    run(*words, "--compression-ratio", 0.9, "--compression-ratio", 0.5)
    assert decoded[-1] == POLICIES + [policy.replace("10%", "50%") for policy in POLICIES[1:]]


# Resumption


def same(found, expected):
    """Whether rows are equal; another batch sums in another order, so kept mass is so but for rounding."""
    assert [row | {"kept_mass": None} for row in found] == [row | {"kept_mass": None} for row in expected]
    kept = [[row["kept_mass"] for row in rows] for rows in (found, expected)]
    return kept[0] == pytest.approx(kept[1], abs=1e-5)


def test_a_second_run_computes_nothing(words, tmp_path, decoded):
    out = tmp_path / "new" / "rows.parquet"
    first = run_json(*words, "--out", out)
    assert len(decoded) == 2
    before = out.read_bytes(), out.stat().st_mtime_ns
    assert run_json(*words, "--out", out) == first
    assert len(decoded) == 2
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert read_evaluations(out) == first["answers"]


def test_only_what_is_missing_runs(words, tmp_path, decoded):
    out = tmp_path / "rows.parquet"
    whole = run_json(*words, "--out", out)["answers"]
    decoded.clear()
    write_evaluations([row for row in whole if row["index"] == 0 or row["policy"] == "full"], out)
    assert same(run_json(*words, "--out", out)["answers"], whole)
    assert decoded == [POLICIES[1:]]
    # more samples and another policy
    decoded.clear()
    more = run_json(*words, "--out", out, "--samples", 3, "--policy", "single")
    assert decoded == [["single/budget=10%"]] * 2 + [[*POLICIES, "single/budget=10%"]]
    assert {line["samples"] for line in more["results"]} == {3}
    # a smaller question of the same file
    decoded.clear()
    assert run_json(*words, "--out", out, "--samples", 1)["answers"] == read_evaluations(out)[:4]
    assert decoded == []
    assert len(read_evaluations(out)) == 15


def test_other_settings_are_not_mixed_up(words, folder, tmp_path, decoded):
    out = tmp_path / "rows.parquet"
    first = run_json(*words, "--out", out)
    other = save_model(tmp_path / "other", initializer_range=0.2)
    for count, change in enumerate(
        (
            ["--answer-tokens", 2],
            ["--seed", 1],
            ["--length", 820],
            ["--chat"],
            ["--model", other],
            ["--dtype", "bfloat16"],
            ["--compression-ratio", 0.8],
            ["--task", "niah_multivalue"],
        ),
        start=2,
    ):
        decoded.clear()
        found = run_json(*words, *change, "--out", out)
        assert len(decoded) == 2, change
        own = [row for row in found["answers"] if row not in first["answers"]]
        assert len(own) in (6, 8), change
        assert same(found["answers"], run_json(*words, *change)["answers"])
        assert len(read_evaluations(out)) >= 8 * (count - 1)
    decoded.clear()
    assert run_json(*words, "--out", out) == first
    assert decoded == []


@pytest.mark.parametrize("name", ["version", "model_hash", "question_hash"])
def test_rows_of_another_version_model_or_text_stay_and_do_not_count(words, tmp_path, decoded, name):
    out = tmp_path / "rows.parquet"
    first = run_json(*words, "--out", out)
    foreign = [row | {name: "another", "score": 50.0} for row in first["answers"]]
    write_evaluations(foreign, out)
    decoded.clear()
    assert run_json(*words, "--out", out) == first
    assert decoded == [POLICIES] * 2
    assert read_evaluations(out) == foreign + first["answers"]


def test_another_tokenizer_is_another_question(words, folder, tmp_path, decoded):
    from asking import chatting

    out = tmp_path / "rows.parquet"
    run(*words, "--chat", "--out", out)
    tokenizer = chatting()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    decoded.clear()
    run(*words, "--model", save_model(tmp_path / "other", tokenizer=tokenizer), "--chat", "--out", out)
    assert decoded == [POLICIES] * 2


def test_rows_are_saved_while_it_runs_and_when_it_fails(words, tmp_path, monkeypatch):
    out = tmp_path / "rows.parquet"
    plain = kvsim.evaluate.decode
    seen = []

    def failing(*given, **options):
        seen.append(len(read_evaluations(out)))
        if len(seen) == 4:
            raise KeyboardInterrupt
        return plain(*given, **options)

    monkeypatch.setattr("kvsim.evaluate.decode", failing)
    monkeypatch.setattr(command, "SAVE_SECONDS", 0)
    run(*words, "--samples", 9, "--out", out, code=130)
    assert seen == [0, 4, 8, 12]
    assert len(read_evaluations(out)) == 12
    seen.clear()
    monkeypatch.setattr(command, "SAVE_SECONDS", 1000)
    run(*words, "--samples", 9, "--out", out, code=130)
    assert seen == [12] * 4
    assert len(read_evaluations(out)) == 24
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


SLOW = """
import sys, time
import kvsim.evaluate
from kvsim.cli import app
import importlib
importlib.import_module("kvsim.cli.evaluate").SAVE_SECONDS = 0
plain = kvsim.evaluate.decode
def slow(*given, **options):
    time.sleep(0.3)
    return plain(*given, **options)
kvsim.evaluate.decode = slow
app(sys.argv[1:])
"""


def test_a_killed_run_keeps_whole_rows(words, tmp_path, decoded):
    out = tmp_path / "rows.parquet"
    child = subprocess.Popen([sys.executable, "-c", SLOW, *map(str, words), "--samples", "50", "--out", str(out)])
    while len(read_evaluations(out)) < 12 and child.poll() is None:
        time.sleep(0.02)
    assert "another process is writing it" in run(*words, "--out", out, code=2).stderr
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    held = len(read_evaluations(out))
    assert held >= 12
    assert held % 4 == 0
    found = run_json(*words, "--samples", 15, "--out", out)
    assert len(decoded) == 15 - held // 4
    decoded.clear()
    assert run_json(*words, "--samples", 15) == found


# Files of questions, and the grid

SQUAD = {
    "data": [
        {
            "paragraphs": [
                {
                    "context": f"The {town} of the north has {number} bridges.",
                    "qas": [
                        {
                            "question": f"How many bridges has {town}?",
                            "is_impossible": False,
                            "answers": [{"text": str(number), "answer_start": len(f"The {town} of the north has ")}],
                        }
                    ],
                }
            ]
        }
        for town, number in (("Ely", 31), ("Bath", 52), ("Wells", 17))
    ]
}


def test_questions_from_a_file(folder, tmp_path, decoded):
    file, out = tmp_path / "squad.json", tmp_path / "rows.parquet"
    file.write_text(json.dumps(SQUAD))
    words = ["eval", "--model", folder, "--task", "qa_1", "--samples", 2, "--length", 700, "--answer-tokens", 3]
    words += ["--policy", "tova", "--out", out]
    found = run_json(*words, "--file", file)["answers"]
    assert [row["task"] for row in found] == ["qa_1"] * 4
    assert found[0]["survival"] == 1
    # another file of the same name and shape is another task
    file.write_text(json.dumps(SQUAD).replace("31", "13"))
    decoded.clear()
    again = run_json(*words, "--file", file)["answers"]
    assert len(decoded) == 2
    assert {row["question_hash"] for row in again} & {row["question_hash"] for row in found} == set()
    assert "has 3 questions" in run(*words, "--file", file, "--samples", 4, code=2).stderr
    assert len(read_evaluations(out)) == 8 + 2
    assert "takes no file of questions" in run(*words, "--file", file, "--task", "vt", code=2).stderr
    assert "qa_1 needs questions" in run(*words, code=2).stderr
    assert "No such file" in run(*words, "--file", tmp_path / "none.json", code=2).stderr


DEPTHS = ("0%", "50%", "100%")


def test_the_needle_grid(folder, tmp_path, decoded):
    out = tmp_path / "rows.parquet"
    words = ["eval", "--model", folder, "--task", "needle", "--samples", 2, "--answer-tokens", 3, "--policy", "tova"]
    words += ["--length", 800, "--length", 900, "--depths", 3, "--out", out]
    found = run_json(*words)
    assert set(found) == {"grid", "answers"}
    assert found["grid"] == cells(found["answers"])
    places = [(cell["policy"], cell["length"], cell["depth"], cell["samples"]) for cell in found["grid"]]
    policies = ("full", "tova/budget=10%")
    assert sorted(places) == sorted((p, n, d, 2) for p in policies for n in (800, 900) for d in (0.0, 50.0, 100.0))
    assert len(decoded) == 12
    # The parquet file's rows are what the chart takes as well.
    from kvsim import charts

    assert len(charts.needle_grid(pl.read_parquet(out)).to_dict()["vconcat"]) == 2
    printed = run(*words).stdout.splitlines()
    assert len(decoded) == 12
    full = {(cell["length"], cell["depth"]): cell["rouge_l_f"] for cell in found["grid"] if cell["policy"] == "full"}
    assert printed[0] == f"full: {sum(full.values()) / 6:.2f}, 2 samples a cell"
    assert printed[1].split() == ["depth", "800", "900"]
    rows = [[depth, *(f"{full[n, float(depth[:-1])]:.2f}" for n in (800, 900))] for depth in DEPTHS]
    assert [line.split() for line in printed if line.split()[:1] and line.split()[0] in DEPTHS][:3] == rows
    assert any(line.startswith("tova: 0.") for line in printed)


def test_cells_with_one_prompt_are_two_cells(folder):
    # So little prose that neighbouring depths put the needle in the same place.
    words = ["eval", "--model", folder, "--task", "needle", "--samples", 1, "--answer-tokens", 1, "--policy", "tova"]
    grid = run_json(*words, "--length", 500, "--depths", 9)["grid"]
    assert len(grid) == 18


# What is refused


def test_what_is_refused(words, tmp_path):
    out = tmp_path / "rows.parquet"
    for extra, what in (
        (["--samples", 0], "--samples must be at least 1"),
        (["--samples", -1], "--samples must be at least 1"),
        (["--task", "niah"], "unknown task 'niah'"),
        (["--length", 30], "length 30 is too small"),
        (["--policy", "oracle:future", "--answer-tokens", 1], "oracle:future"),
        (["--policy", "emma"], "unknown policy"),
        (["--compression-ratio", "1"], "compression_ratio"),
        (["--depths", 3], "--depths makes a grid of the task needle alone, got niah_single_1"),
        (["--model", tmp_path / "none"], "no such model"),
    ):
        assert what in run(*words, *extra, "--out", tmp_path / "below" / "rows.parquet", code=2).stderr
    needle = [word if word != "niah_single_1" else "needle" for word in words]
    assert "--depths must be at least 2" in run(*needle, "--depths", 1, code=2).stderr
    assert "no chat template" in run(*words, "--model", _without_template(tmp_path), "--chat", code=2).stderr
    out.write_bytes(b"mine")
    assert "is not a whole Parquet file" in run(*words, "--out", out, code=2).stderr
    assert out.read_bytes() == b"mine"
    pl.DataFrame({"policy": ["tova"], "score": [1.0]}).write_parquet(out)
    assert "is not a file of kvsim evaluations" in run(*words, "--out", out, code=2).stderr
    assert "cannot be written" in run(*words, "--out", out / "below.parquet", code=2).stderr
    assert "cannot be read" in run(*words, "--out", tmp_path, code=2).stderr


def _without_template(tmp_path):
    from token_texts import byte_level

    return save_model(tmp_path / "model", tokenizer=byte_level())
