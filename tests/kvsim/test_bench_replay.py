"""The benchmark of the GPU engine runs at a small size, refuses where it must, and prints what it promises."""

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from kvsim import bench_replay as bench
from kvsim.cli import app
from kvsim.engines import get_engine
from kvsim.errors import KvsimError

pytest.importorskip("triton")

SMALL = {"count": 3, "steps": 5, "layers": 2, "prompt": 20, "repeats": 1, "cpu_seconds": 1.0}
COMMANDS = [["-m", "kvsim", "bench", "replay", "--device", "cuda"], ["-m", "kvsim.bench_replay"]]


def test_policies_fit_any_prompt():
    grid = bench.policies(80, 4096)
    assert len(set(grid)) == 80
    assert sum("recent:32" in text for text in grid) == 40
    assert not any("recent" in text for text in bench.policies(80, 24))


def test_report(tmp_path):
    said = []
    report = bench.bench_replay_gpu(tmp_path, **SMALL, progress=said.append)
    cpu = f"cpu, {bench.CORES} cores"
    assert [(row["engine"], row["mode"]) for row in report["rows"]] == [
        (cpu, "exact"), (cpu, "fast"), ("gpu", "exact"), ("gpu", "fast"), ("gpu, all metrics", "exact"),
    ]  # fmt: skip
    assert all(row["policies"] == 3 and row["policy_steps_per_s"] > 0 for row in report["rows"])
    assert report["policies_compared"] == 3
    assert report["shape"] == {"policies": 3, "steps": 5, "layers": 2, "prompt": 20}
    assert "goal" not in report
    assert len(said) == 2
    text = bench.lines(report)
    assert max(map(len, text)) <= 120
    assert "evicted_at equal on all 3 policies" in text[-1]
    assert "nan" not in json.dumps(report).lower()
    report["goal"] = {"met": False}
    assert bench.lines(report)[-1] == "goal: exact at least 20x: NOT met"


def test_no_number_where_the_engines_disagree(tmp_path, monkeypatch):
    def broken(trace, plans, **options):
        outcomes = get_engine("gpu")(trace, plans, **options)
        outcomes[1].evicted_at[0, 3] = 777
        return outcomes

    monkeypatch.setattr(bench, "get_engine", lambda name: broken if name == "gpu" else get_engine(name))
    with pytest.raises(KvsimError, match="engines gpu and cpu disagree on 1 of 3 policies, such as ema:"):
        bench.bench_replay_gpu(tmp_path, **SMALL)
    # A recording that is not there.
    monkeypatch.setattr(bench, "write_recording", lambda *given: None)
    (tmp_path / "trace").rename(tmp_path / "elsewhere")
    with pytest.raises(KvsimError, match=r"the replay on 2 cores failed: .*trace"):
        bench.bench_replay_gpu(tmp_path, **SMALL)


@pytest.mark.parametrize("command", ["kvsim", "argparse"])
def test_without_a_gpu_it_exits_with_2(command, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for more, what in (([], "finds none here"), (["--smoke"], "no CUDA device found")):
        if command == "argparse":
            assert bench.main(more) == 2
            found = capsys.readouterr()
            assert found.out == ""
            told = found.err
        else:
            ran = CliRunner().invoke(app, ["bench", "replay", "--device", "cuda", *more])
            assert (ran.exit_code, ran.stdout) == (2, "")
            told = ran.stderr
        assert what in " ".join(told.split())


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=["kvsim", "argparse"])
def test_the_small_size_runs_in_the_interpreter(words, tmp_path):
    out = tmp_path / "report.json"
    kept = ["--json"] if "kvsim" in words else ["--out", str(out)]
    command = [sys.executable, *words, "--smoke", *kept, "--directory", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    report = json.loads(ran.stdout if "kvsim" in words else out.read_text())
    assert report["shape"]["policies"] == bench.SMOKE["count"]
    assert report["command"].split()[-1] == str(tmp_path)
    assert [path for path in tmp_path.iterdir() if path != out] == []


@pytest.mark.parametrize(
    ("words", "what"),
    [(["--device", "tpu"], "unknown device 'tpu'"), (["--device", "cuda", "--large"], "takes neither --smoke nor")],
)
def test_words_that_do_not_fit(words, what):
    ran = CliRunner().invoke(app, ["bench", "replay", *words])
    assert ran.exit_code == 2
    assert what in ran.stderr
