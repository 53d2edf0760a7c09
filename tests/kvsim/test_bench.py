"""The benchmarks run, say what they promise, and refuse on a failing install; their numbers are not tested."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import kvsim
from kvsim import bench, bench_oracle
from kvsim.engines import cpu, get_engine


def test_replay_report(tmp_path):
    report = bench.bench_replay(tmp_path, steps=16, layers=3, prompt=64, heads=3, policies=(1, 4), repeats=1)
    keys = {"engine", "mode", "policies", "policy_steps_per_s", "ratio_to_memory_read"}
    assert all(keys <= set(row) for row in report["rows"])
    assert {(row["engine"], row["mode"], row["policies"]) for row in report["rows"]} >= {
        ("reference", "exact", 1),
        ("cpu", "fast", 4),
        ("cpu", "exact", 4),
    }
    assert {"processor", "numba", "kvsim", "shape"} <= set(report)


def test_no_number_from_a_failing_install(tmp_path, monkeypatch):
    def broken(trace, plans, **options):
        outcomes = cpu.run_many(trace, plans, **options)
        outcomes[0].evicted_at[0, 3] = 777
        return outcomes

    monkeypatch.setattr(bench, "get_engine", lambda name: broken if name == "cpu" else get_engine(name))
    with pytest.raises(kvsim.KvsimError, match="disagrees with the reference"):
        bench.bench_replay(tmp_path, steps=8, layers=2, prompt=32, heads=2, policies=(1,), repeats=1)


def test_a_large_recording_is_replayed_in_a_process_of_its_own(tmp_path):
    report = bench.bench_large(tmp_path, gigabytes=0.004, layers=2, prompt=1000)
    assert report["steps"] % 16 == 0
    assert report["peak_memory_mib"] < 1024
    trace = kvsim.open_trace(tmp_path / "large")
    assert trace.num_steps == report["steps"]
    assert np.isclose(trace.score_rows(trace.num_steps).sum(), 2, atol=1e-2)


def test_oracle_report():
    report = bench_oracle.bench_oracle([(400, 24), (30, 1)])
    large, small = report["rows"]
    assert (large["prompt"], large["steps"], large["budget"]) == (400, 24, 40)
    assert large["seconds_to_1_percent"] <= large["seconds_to_0.1_percent"] <= large["seconds"]
    assert large["gap"] < 1e-3
    assert large["gap_over_time"][-1] == [large["seconds"], large["gap"]]
    assert small["gap"] <= 1e-9
    assert report["kvsim"] == kvsim.__version__


def test_no_gap_from_a_schedule_that_does_not_fit(monkeypatch):
    found = bench_oracle.price

    def greedy(problem, **options):
        priced = found(problem, **options)
        return dataclasses.replace(priced, last=np.full_like(priced.last, problem.num_sets))

    monkeypatch.setattr(bench_oracle, "price", greedy)
    with pytest.raises(kvsim.KvsimError, match="does not fit"):
        bench_oracle.measure(100, 8)


@pytest.mark.slow
def test_the_command_prints_json(tmp_path):
    command = [sys.executable, "-m", "kvsim", "bench", "replay", "--json", "--directory", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert len(json.loads(ran.stdout)["rows"]) == 10
    assert not list(tmp_path.iterdir())
