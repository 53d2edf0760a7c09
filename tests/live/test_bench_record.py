"""The benchmark of recording runs, and its arithmetic is right; its times need a GPU."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kvsim import bench_record as module
from kvsim import bench_record_runs as runs
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


NOT_INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is not interpreted here")


@pytest.mark.parametrize("overlapped", [False, pytest.param(True, marks=NOT_INTERPRETED)])
def test_figures(tmp_path, monkeypatch, overlapped):
    if overlapped:
        monkeypatch.setattr("kvsim_traces.recorder.overlapped_device", lambda model: torch.device("cpu"))
    told, kept = [], []
    with np.errstate(all="ignore"):
        report = bench_record(
            tmp_path / "missing" / "disk",
            device="cpu",
            shape=SHAPE,
            dtype="float32",
            context=40,
            steps=6,
            long_context=60,
            long_steps=3,
            progress=lambda *now: told.append(now),
            save=kept.append,
        )
    assert json.loads(json.dumps(report)) == report
    assert not list((tmp_path / "missing" / "disk").iterdir())
    assert told == [(done, 31) for done in range(1, 32)]
    assert [len(now["rows"]) for now in kept] == [1, 2, 3, 3]
    assert ["long" in now for now in kept] == [False] * 3 + [True]
    assert kept[-1]["rows"] == report["rows"]
    rows = report["rows"]
    assert [row["capture"] for row in rows] == ["qk", "scores", "heads"]
    for row in rows:
        beside = row["unrecorded"]
        assert row["ratio_range"][0] <= row["ratio"] <= row["ratio_range"][1]
        assert (len(row["run_ms"]), len(beside["run_ms"])) == (4, 5)
        assert (row["steps_timed"], beside["steps_timed"]) == (16, 20)
        # There is no GPU to look into.
        assert [row[name] for name in ("extra_mib", "gpu_ms", "gpu_ratio", "idle_share")] == [None] * 4
    assert report["long"]["extra_mib"] is None
    heads = rows[2]
    # 2 layers of 4 heads over 46 positions, their sums and the token, each in a multiple of 256 bytes.
    assert heads["mb_per_step"] == round((256 + 256 + 768) / 1e6, 3)
    assert heads["goal"] >= 1.5
    assert all(row["goal_met"] == (row["ratio"] <= 1.1) for row in rows[:2])
    lines = table(report)
    names = ["unrecorded", "qk", "unrecorded", "scores", "unrecorded", "heads", "scores,", "plain", "GPU", "!:"]
    assert [line.split()[0] for line in lines[1:]] == names


def test_recorded_runs_stand_between_unrecorded_ones(tmp_path, monkeypatch):
    """What slows down or speeds up steadily on the way meets both alike."""
    order = []
    alone = [10.0, 12.0, 14.0, 16.0, 18.0]
    steps = {"p": iter([*alone, 20.0, 20.0, 40.0, 40.0]), "r": iter([22.0, 13.0, 30.0, 17.0, 19.0, 40.0, 60.0, 20.0])}

    def ran(kind):
        def run(model, context, count, *rest, **options):
            if count == 2 + 2 or context == 99:
                return runs.Run([1.0], 1.0, 1.0, [], None)
            if options.get("profiled"):
                pytest.fail("nothing is profiled on a CPU")
            order.append(kind)
            ms = next(steps[kind])
            return runs.Run([ms, ms, ms + 2], 2 * ms, 1.0, [], None)

        return run

    monkeypatch.setattr(module, "unrecorded", ran("p"))
    monkeypatch.setattr(module, "recorded", ran("r"))
    report = bench_record(
        tmp_path,
        device="cpu",
        shape=SHAPE,
        dtype="float32",
        context=40,
        steps=6,
        long_context=99,
        captures=("qk", "heads"),
    )
    assert "".join(order) == "p" + 8 * "rp"
    qk, heads = report["rows"]
    assert (qk["run_ms"], qk["unrecorded"]["run_ms"]) == ([22.0, 13.0, 30.0, 17.0], alone)
    # Around the runs: 11, 13, 15 and 17.
    assert (qk["ratio"], qk["ratio_range"]) == (1.5, [1.0, 2.0])
    # The unrecorded run in the middle belongs to both: 19, 20, 30 and 40.
    assert heads["unrecorded"]["run_ms"] == [18.0, 20.0, 20.0, 40.0, 40.0]
    assert (heads["ratio"], heads["ratio_range"]) == (1.5, [0.5, 2.0])
    assert heads["sustained_ratio"] == 1.5


def test_what_has_no_time_left_is_named_and_what_there_is_is_kept(tmp_path, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(module, "_disk_rate", lambda *_: 100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(now)))
    ran = runs.Run([1.0], 1.0, 1.0, [], None)
    monkeypatch.setattr(module, "unrecorded", lambda *_, **__: ran)
    monkeypatch.setattr(module, "recorded", lambda *_, **__: ran)
    report = bench_record(
        tmp_path, device="cpu", shape=SHAPE, dtype="float32", context=40, steps=6, long_context=60, seconds=10
    )
    assert "error" not in report["rows"][0]
    over = "not started: 10 seconds are over"
    assert report["rows"][1:] == [{"capture": capture, "error": over} for capture in ("scores", "heads")]
    assert report["long"] == {"capture": "scores", "error": over}
    assert "\n".join(table(report)).count(over) == 3


def test_a_run_that_is_killed_leaves_its_report(tmp_path, monkeypatch):
    out = tmp_path / "new" / "found.json"

    def killed(directory, *, save, **options):
        save({"rows": [1], "steps": options["steps"], "seconds": options["seconds"]})
        assert json.loads(out.read_text())["rows"] == [1]
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "bench_record", killed)
    monkeypatch.setattr("sys.argv", ["bench_record", "--out", str(out), "--seconds", "80"])
    with pytest.raises(KeyboardInterrupt):
        module.main()
    command = f"python -m kvsim.bench_record --out {out} --seconds 80"
    assert json.loads(out.read_text()) == {"rows": [1], "steps": 16, "seconds": 80.0, "command": command}
    assert [path.name for path in out.parent.iterdir()] == ["found.json"]


def test_time_on_the_gpu_counts_once_and_decides_the_goal_too():
    assert runs.busy_ms([(0, 2000), (1000, 3000), (9000, 9500), (1200, 1300)]) == 3.5
    assert runs.busy_ms([]) == 0
    found = runs.figures([runs.Run([40.0, 41.0], 42.0, 1.0, [2**20, 3 * 2**20], None)]) | {"mb_per_step": 0.3}
    plain = runs.figures(2 * [runs.Run([50.0], 50.0, 1.0, [2**20, 2**20], None)])
    row = module._beside("qk", found, plain, 5.0, 4.0, 1.1)
    # Quicker by the clock, and yet a quarter more work for the GPU: hidden in steps that are nine tenths idle.
    assert (row["ratio"], row["gpu_ratio"], row["goal_met"], row["extra_mib"]) == (0.81, 1.25, False, 2)
    assert (row["idle_share"], row["unrecorded"]["idle_share"]) == (round(1 - 5 / 40.5, 3), 0.92)
    assert module._beside("qk", found, plain, 4.2, 4.0, 1.1)["goal_met"]
    assert not module._beside("qk", found | {"run_ms": [60.0]}, plain, 4.0, 4.0, 1.1)["goal_met"]
    lines = "\n".join(table({"rows": [row], "disk_mb_s": 100.0}))
    for word in ("1.25", "1.10!", "88%", "92%"):
        assert word in lines


def test_a_recording_that_is_not_intact_gives_no_figures(tmp_path, monkeypatch):
    class Broken:
        ok, committed_steps, problems = False, 4, ("scores: a chunk is damaged",)

    monkeypatch.setattr(runs, "verify_trace", lambda path: Broken)
    with pytest.raises(KvsimError, match="not intact: scores: a chunk is damaged"):
        bench_record(tmp_path, device="cpu", shape=SHAPE, dtype="float32", context=20, steps=4, long_context=0)
    assert not list(tmp_path.iterdir())


def test_what_it_needs(tmp_path, capsys, monkeypatch):
    with pytest.raises(KvsimError, match="a CPU records a small shape only"):
        bench_record(tmp_path, device="cpu")
    with pytest.raises(KvsimError, match="at least 4 are measured, got 3"):
        bench_record(tmp_path, device="cpu", shape=SHAPE, steps=3)
    (tmp_path / "file").touch()
    with pytest.raises(KvsimError, match="file: File exists"):
        bench_record(tmp_path / "file", device="cpu", shape=SHAPE, steps=4)
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr("sys.argv", ["bench_record"])
    assert module.main() == 2
    assert capsys.readouterr().err == (
        "kvsim: error: kvsim bench record measures a CUDA GPU, and there is none (--device cuda)\n"
    )
    assert CliRunner().invoke(app, ["bench", "record"]).exit_code == 2
