"""The benchmark of recording runs, and its arithmetic is right; its times need a GPU."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvsim import bench_record as module
from kvsim.bench_record import bench_record, table
from kvsim.cli import app
from kvsim.errors import KvsimError

SHAPE = {
    "kind": "llama",
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize("overlapped", [False, True])
def test_figures(tmp_path, monkeypatch, overlapped):
    if overlapped:
        monkeypatch.setattr("kvsim_traces.recorder.overlapped_device", lambda model: torch.device("cpu"))
    told = []
    with np.errstate(all="ignore"):
        report = bench_record(
            tmp_path,
            device="cpu",
            shape=SHAPE,
            dtype="float32",
            context=40,
            steps=6,
            long_context=60,
            long_steps=3,
            progress=lambda *now: told.append(now),
        )
    assert json.loads(json.dumps(report)) == report
    assert not list(tmp_path.iterdir())
    assert told == [(done, 6) for done in range(1, 7)]
    plain, rows = report["unrecorded"], report["rows"]
    assert [row["capture"] for row in rows] == ["qk", "scores", "heads"]
    for row in [*rows, report["long"]]:
        beside = report["long"]["unrecorded"] if row is report["long"] else plain
        assert row["ratio"] == pytest.approx(row["step_ms"] / beside["step_ms"], rel=1e-2)
        assert row["sustained_ratio"] == pytest.approx(row["sustained_ms"] / beside["step_ms"], rel=1e-2)
        assert row["extra_mib"] is None
    assert {row["steps_timed"] for row in (plain, *rows)} == {4}
    heads = rows[2]
    # 2 layers of 4 heads over 46 positions, their sums and the token, each in a multiple of 256 bytes.
    assert heads["mb_per_step"] == round((256 + 256 + 768) / 1e6, 3)
    assert heads["goal"] >= 1.5
    assert all(row["goal_met"] == (row["ratio"] <= 1.1) for row in rows[:2])
    lines = table(report)
    assert [line.split()[0] for line in lines[1:-1]] == ["unrecorded", "qk", "scores", "heads", "scores,"]


def test_a_recording_that_is_not_intact_gives_no_figures(tmp_path, monkeypatch):
    class Broken:
        ok, committed_steps, problems = False, 4, ("scores: a chunk is damaged",)

    monkeypatch.setattr(module, "verify_trace", lambda path: Broken)
    with pytest.raises(KvsimError, match="not intact: scores: a chunk is damaged"):
        bench_record(tmp_path, device="cpu", shape=SHAPE, dtype="float32", context=20, steps=4, long_context=0)
    assert not list(tmp_path.iterdir())


def test_what_it_needs(tmp_path, capsys, monkeypatch):
    with pytest.raises(KvsimError, match="at least 4 are measured, got 3"):
        bench_record(tmp_path, device="cpu", steps=3)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["bench_record"])
    assert module.main() == 2
    assert capsys.readouterr().err == (
        "error: kvsim bench record measures a CUDA GPU, and there is none (--device cuda)\n"
    )
    assert CliRunner().invoke(app, ["bench", "record"]).exit_code == 2
