"""Sweeps: the grid, rows equal to single replays, one file that a killed sweep can go on with."""

import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import polars as pl
import pytest
from cases import write_trace
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.grid import expand_grid, parse_settings, setting_of

# `kvsim.sweep` is the function.
module = importlib.import_module("kvsim.sweep")

GRID = ["--set", "alpha=0.3,0.8", "--set", "refresh=1,first", "--set", "compression_ratio=0.5,0.9"]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    write_trace(folder / "first", capture="qkv", seed=1, steps=8)
    write_trace(folder / "second", capture="scores", seed=2, steps=10)
    write_trace(folder / "third", seed=3)
    return folder


@pytest.fixture
def runs(recordings, tmp_path):
    return shutil.copytree(recordings, tmp_path / "runs")


@pytest.fixture
def trace(runs):
    return kvsim.open_trace(runs / "third")


def sweep(runs, out, *words, code=0):
    return run("sweep", "--trace", runs / "*", "--out", out, "-q", *words, code=code)


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def same(one, other):
    """Equal up to the order of summation, which depends on what ran together."""
    assert_frame_equal(one, other, check_exact=False, rel_tol=0, abs_tol=1e-13)


# The grid


def test_the_last_setting_varies_fastest_and_every_combination_runs_once():
    grid = {"alpha": [0, "0.80", 0.8], "refresh": [1, "first"]}
    texts = [str(policy) for policy in expand_grid(["ema"], grid)]
    assert texts == [
        "ema:0/budget=10%",
        "ema:0/refresh=first/budget=10%",
        "ema:0.8/budget=10%",
        "ema:0.8/refresh=first/budget=10%",
    ]
    assert texts == [str(p) for p in expand_grid(["ema"], parse_settings(["alpha=0,0.80,0.8", "refresh=1,first"]))]


@pytest.mark.parametrize(
    ("base", "setting", "policies"),
    [
        ("ema:0.3/refresh=2", "refresh=4", ["ema:0.3/refresh=4/budget=10%"]),
        ("ema/budget=7", "compression_ratio=0.5", ["ema:0.8/budget=50%"]),
        ("ema/budget=7", "budget=8,30%", ["ema:0.8/budget=8", "ema:0.8/budget=30%"]),
        ("ema/budget=7", "alpha=0.5", ["ema:0.5/budget=7"]),
        ("ema", "over=step,both", ["ema:0.8,over=step/budget=10%", "ema:0.8/budget=10%"]),
        ("full", "compression_ratio=0.5,0.9", ["full"]),
        ("full", "budget=5", ["full"]),
        ("tova", "group=shared,layer", ["tova/group=shared/budget=10%", "tova/budget=10%"]),
        ("single", "score=recency,vnorm", ["single/score=recency/budget=10%", "single/score=vnorm/budget=10%"]),
        ("single", "protect=sink:4+recent:3", ["single/budget=10%/protect=sink:4+recent:3"]),
        ("streaming", "n_sink=2,3", ["streaming:2/budget=10%", "streaming:3/budget=10%"]),
    ],
)
def test_a_setting_replaces_what_the_policy_says(base, setting, policies):
    assert [str(policy) for policy in expand_grid([base], parse_settings([setting]))] == policies


def test_an_axis_is_compared_with_what_the_preset_implies_after_its_arguments_are_set():
    (policy,) = expand_grid(["inertiakv-lazy"], {"refresh": [4], "r": [8]})
    assert str(policy) == "inertiakv-lazy:8/refresh=4/budget=10%"


def test_commas_within_values_are_escaped():
    assert parse_settings(["alpha=0.5%2C1"]) == {"alpha": ["0.5%2C1"]}
    assert parse_settings(["score=random:1%2Cx=2,knorm"]) == {"score": ["random:1,x=2", "knorm"]}
    assert parse_settings(["score=x:a%252Cb"]) == {"score": ["x:a%2Cb"]}
    assert parse_settings(["budget=10%,25%"]) == {"budget": ["10%", "25%"]}


@pytest.mark.parametrize(
    ("policies", "settings", "message"),
    [
        (["ema"], ["alhpa=0.5"], "policy ema:0.8: unknown setting 'alhpa'; did you mean 'alpha'?"),
        (["ema", "tova"], ["alpha=0.5"], "policy tova: unknown setting 'alpha'"),
        (["tova"], ["alpha=0.5"], "compression_ratio, group, "),
        (["ema"], ["alpha=1.5"], "must be in [0, 1)"),
        (["ema"], ["alpha=high"], "alpha of 'ema' must be a finite number"),
        (["ema"], ["refresh=0"], "refresh"),
        (["ema"], ["group=both"], "unknown group 'both'"),
        (["ema"], ["budget=0.1"], "10%"),
        (["ema"], ["compression_ratio=1"], "[0, 1)"),
        (["ema"], ["compression_ratio=0.5", "budget=9"], "not both"),
        (["ema"], ["alpha"], "NAME=VALUE"),
        (["ema"], ["alpha="], "NAME=VALUE"),
        (["ema"], ["alpha=0.5,,0.6"], "NAME=VALUE"),
        (["ema"], ["=0.5"], "NAME=VALUE"),
        (["ema"], ["alpha=0.5", "alpha=0.6"], "'alpha' is given twice"),
        (["emma"], [], "did you mean 'ema'"),
        (["ema"], ["protect=recent:99"], "more than the budget"),
        (["h2o"], [], "group=head"),
    ],
)
def test_bad_requests_exit_with_2_and_write_nothing(runs, tmp_path, policies, settings, message):
    before = listing(tmp_path)
    words = [word for policy in policies for word in ("--policy", policy)]
    words += [word for setting in settings for word in ("--set", setting)]
    result = sweep(runs, tmp_path / "new" / "s.parquet", *words, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("kvsim: error: ")
    assert listing(tmp_path) == before


def test_bad_grids_in_python(trace):
    for grid, message in [({"refresh": "first"}, "list of values"), ({"alpha": []}, "list of values")]:
        with pytest.raises(kvsim.KvsimError, match=message):
            kvsim.sweep(trace, "ema", grid)
    with pytest.raises(kvsim.KvsimError, match="jobs must be at least 1"):
        kvsim.sweep(trace, "ema", jobs=0)
    with pytest.raises(kvsim.KvsimError, match="unknown engine 'warp'"):
        kvsim.sweep(trace, "ema", engine="warp")
    with pytest.raises(kvsim.KvsimError, match="unknown mode"):
        kvsim.sweep(trace, "ema", mode="slow")
    with pytest.raises(kvsim.KvsimError, match="at least one trace"):
        kvsim.sweep([], "ema")
    with pytest.raises(kvsim.KvsimError, match="at least one policy"):
        kvsim.sweep(trace, [])


def test_setting_of_reads_what_a_policy_has():
    policy = kvsim.parse("inertiakv-lazy:4/budget=25%")
    assert setting_of(policy, "r") == 4
    assert setting_of(policy, "refresh") == "4"
    assert setting_of(policy, "group") == "shared"
    assert setting_of(policy, "compression_ratio") == 0.75
    assert setting_of(policy, "budget") == "25%"
    assert setting_of(policy, "alpha") is None
    assert setting_of(kvsim.parse("full"), "compression_ratio") is None
    assert setting_of(kvsim.parse("full"), "budget") is None
    assert setting_of(kvsim.parse("ema/budget=9"), "compression_ratio") is None


# The rows


@pytest.mark.parametrize(("engine", "mode"), [("cpu", "exact"), ("cpu", "fast"), ("reference", "exact")])
def test_rows_equal_single_replays(runs, engine, mode):
    traces = [kvsim.open_trace(runs / name) for name in ("third", "first")]
    policies = ["ema:0.3", "ema:0.8/refresh=4", "single", "tova", "h2o", "streaming:2", "random:7", "full"]
    frame = kvsim.sweep(traces, policies, {"compression_ratio": [0.5, 0.8]}, engine=engine, mode=mode, jobs=2)
    rows = frame.to_dicts()
    wanted = [(t, p, r) for t in traces for p in policies for r in ((0.5, 0.8) if p != "full" else (0.5,))]
    assert len(rows) == len(wanted)
    for row, (trace, policy, ratio) in zip(rows, wanted, strict=True):
        one = kvsim.replay(trace, policy, compression_ratio=ratio, engine="reference", shadow_churn=False).summary()
        for name, value in one.items():
            if name == "engine":
                assert row[name] == engine
            elif isinstance(value, float):
                assert row[name] == pytest.approx(value, rel=0, abs=1e-6 if mode == "fast" else 1e-12), name
            else:
                assert row[name] == value, name
        assert row["engine_mode"] == mode
        assert row["set_compression_ratio"] == (None if policy == "full" else ratio)


def test_settings_are_columns_to_group_by(runs, tmp_path):
    sweep(runs, tmp_path / "s.parquet", "--policy", "ema", *GRID)
    frame = pl.read_parquet(tmp_path / "s.parquet")
    assert frame.height == 3 * 8
    columns = ["set_alpha", "set_refresh", "set_compression_ratio"]
    assert frame.columns[-3:] == columns
    assert [frame.schema[name] for name in columns] == [pl.Float64, pl.String, pl.Float64]
    means = frame.group_by(columns).agg(pl.len(), pl.col("kept_mass").mean())
    assert means["len"].to_list() == [3] * 8
    half = frame.filter(set_compression_ratio=0.5)["kept_mass"].mean()
    assert half > frame.filter(set_compression_ratio=0.9)["kept_mass"].mean()


def test_shadow_mode_and_shadow_churn(trace):
    frame = kvsim.sweep(trace, ["ema:0.8", "single"], shadow=True)
    want = kvsim.replay(trace, "single", shadow=True).summary()
    assert frame["mode"].to_list() == ["shadow"] * 2
    assert frame["kept_mass"][1] == pytest.approx(want["kept_mass"], abs=1e-12)
    assert kvsim.sweep(trace, "ema:0.8")["shadow_churn"].to_list() == [None]
    want = kvsim.replay(trace, "ema:0.8").summary()["shadow_churn"]
    assert kvsim.sweep(trace, "ema:0.8", shadow_churn=True)["shadow_churn"][0] == pytest.approx(want, abs=1e-12)


def test_json_holds_the_rows_and_the_counts(runs, tmp_path):
    words = "--policy", "ema", "--set", "alpha=0.3,0.8", "--json"
    first = json.loads(sweep(runs, tmp_path / "s.parquet", *words).stdout)
    assert (first["policies"], first["traces"], first["run"], first["found"]) == (2, 3, 6, 0)
    assert [(row["trace"], row["set_alpha"]) for row in first["results"]] == [
        (name, alpha) for name in ("first", "second", "third") for alpha in (0.3, 0.8)
    ]
    again = json.loads(sweep(runs, tmp_path / "s.parquet", *words).stdout)
    assert (again["run"], again["found"]) == (0, 6)
    assert again["results"] == first["results"]


def test_progress_counts_what_is_missing(runs, tmp_path):
    calls = []
    paths = sorted(runs.iterdir())
    kvsim.sweep(paths[0], ["ema", "tova"], out=tmp_path / "s.parquet")
    kvsim.sweep(paths, ["ema", "tova"], out=tmp_path / "s.parquet", jobs=3, progress=lambda *c: calls.append(c))
    assert calls[0] == (0, 4)
    assert calls[-1] == (4, 4)
    assert calls == sorted(calls)


def test_the_same_recording_runs_once(runs, trace, tmp_path):
    shutil.copytree(trace.path, tmp_path / "copy")
    frame = kvsim.sweep([trace, trace.path, str(trace.path), tmp_path / "copy"], "ema")
    assert frame["trace"].to_list() == ["third"]


# The file


@pytest.fixture
def counted(monkeypatch):
    """Names of what is replayed."""
    ran = []

    def replay_many(trace, policies, **options):
        ran.extend((trace.path.name, str(policy)) for policy in policies)
        return kvsim.replay_many(trace, policies, **options)

    monkeypatch.setattr(module, "replay_many", replay_many)
    return ran


def test_only_what_is_missing_runs(runs, tmp_path, counted):
    out = tmp_path / "s.parquet"
    sweep(runs, out, "--policy", "ema", "--set", "alpha=0.3,0.8", "--set", "refresh=1,first")
    assert len(counted) == len(set(counted)) == 12
    before = out.read_bytes(), out.stat().st_mtime_ns
    counted.clear()
    output = sweep(runs, out, "--policy", "ema", "--set", "alpha=0.8,0.3", "--set", "refresh=first,1").stdout
    assert "0 replayed, 12 found there" in output
    assert (out.read_bytes(), out.stat().st_mtime_ns) == before
    assert not counted
    sweep(runs, out, "--policy", "ema", *GRID)
    assert len(counted) == 12, "the default compression ratio, 0.9, was there"
    sweep(runs, tmp_path / "at_once.parquet", "--policy", "ema", *GRID)
    same(
        pl.read_parquet(out),
        pl.read_parquet(tmp_path / "at_once.parquet").select(pl.read_parquet(out).columns),
    )


def test_other_engines_modes_and_versions_are_other_rows(runs, tmp_path, counted):
    out = tmp_path / "s.parquet"
    for words in ([], ["--mode", "fast"], ["--engine", "reference"], ["--shadow"]):
        counted.clear()
        sweep(runs, out, "--policy", "ema:0.8", *words)
        assert len(counted) == 3
    frame = pl.read_parquet(out)
    old = frame.with_columns(version=pl.lit("0.0.1"))
    forgotten = old.with_columns(policy=pl.lit("forgotten:1/budget=10%"))
    pl.concat([old, forgotten]).write_parquet(out)
    counted.clear()
    sweep(runs, out, "--policy", "ema", "--set", "alpha=0.8")
    assert len(counted) == 3
    frame = pl.read_parquet(out)
    assert frame.height == 12 + 12 + 3
    assert frame.filter(policy="forgotten:1/budget=10%")["set_alpha"].null_count() == 12
    assert frame.filter(policy="ema:0.8/budget=10%")["set_alpha"].to_list() == [0.8] * 15


def test_shadow_churn_that_is_missing_is_computed(runs, tmp_path, counted):
    out = tmp_path / "s.parquet"
    sweep(runs, out, "--policy", "ema", "--policy", "single")
    sweep(runs, out, "--policy", "ema", "--shadow-churn")
    frame = pl.read_parquet(out)
    assert frame.height == 6
    assert frame.filter(pl.col("shadow_churn").is_null())["policy"].unique().to_list() == ["single/budget=10%"]
    counted.clear()
    sweep(runs, out, "--policy", "ema")
    sweep(runs, out, "--policy", "ema", "--shadow-churn")
    assert not counted


def test_another_sweep_adds_its_rows_and_settings(runs, tmp_path):
    out = tmp_path / "s.parquet"
    sweep(runs, out, "--policy", "ema", "--set", "alpha=0.3,0.8")
    sweep(runs, out, "--policy", "tova", "--policy", "single", "--set", "refresh=1,4")
    sweep(runs, out, "--policy", "window", "--set", "size=4", "--set", "start=zero")
    frame = pl.read_parquet(out)
    assert frame.height == 3 * (2 + 4 + 1)
    assert frame.columns[-4:] == ["set_alpha", "set_refresh", "set_size", "set_start"]
    picked = frame.filter(trace="first").select("policy", pl.col("^set_.*$")).rows()
    assert sorted(picked) == [
        ("ema:0.3/budget=10%", 0.3, "1", None, None),
        ("ema:0.8/budget=10%", 0.8, "1", None, None),
        ("single/budget=10%", None, "1", None, None),
        ("single/refresh=4/budget=10%", None, "4", None, None),
        ("tova/budget=10%", None, "1", None, None),
        ("tova/refresh=4/budget=10%", None, "4", None, None),
        ("window:4/budget=10%", None, "1", 4, "zero"),
    ]


def test_workers_change_nothing(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_POLICIES", 2)
    monkeypatch.setattr(module, "SAVE_SECONDS", 0)
    for jobs in (1, 5):
        sweep(runs, tmp_path / f"{jobs}.parquet", "--policy", "ema", *GRID, "--jobs", jobs)
    same(pl.read_parquet(tmp_path / "1.parquet"), pl.read_parquet(tmp_path / "5.parquet"))


def test_large_plans_run_in_small_batches(runs, tmp_path, monkeypatch):
    sizes = []

    def replay_many(trace, policies, **options):
        sizes.append(len(policies))
        return kvsim.replay_many(trace, policies, **options)

    monkeypatch.setattr(module, "replay_many", replay_many)
    policies = [f"ema:0.{k}" for k in range(10)]
    kvsim.sweep(runs / "third", policies, jobs=1)
    assert sizes == [5, 5]
    sizes.clear()
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    kvsim.sweep(runs / "third", policies, jobs=1)
    assert sizes == [1] * 10


KILLED = """
    import importlib, os, sys, time
    import kvsim
    sweep = importlib.import_module("kvsim.sweep")
    sweep.SAVE_SECONDS, sweep.BATCH_POLICIES = 0, 4
    batches = 0
    def replay_many(*args, **kwargs):
        global batches
        batches += 1
        if batches == 3:
            # The first batch is saved as soon as it is done, the second a little later.
            for _ in range(6000):
                if os.path.exists(out):
                    break
                time.sleep(0.01)
            print("ready", flush=True)
            time.sleep(600)
        return kvsim.replay_many(*args, **kwargs)
    sweep.replay_many = replay_many
    out = sys.argv[2]
    sys.argv = ["kvsim", "sweep", "--trace", sys.argv[1], "--out", sys.argv[2], "--jobs", "1", *sys.argv[3:]]
    from kvsim.cli import main
    main()
"""


def test_a_killed_sweep_goes_on_where_it_was(runs, tmp_path, counted):
    out = tmp_path / "out" / "s.parquet"
    words = [sys.executable, "-c", textwrap.dedent(KILLED), str(runs / "*"), str(out), "--policy", "ema", *GRID]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    saved = pl.read_parquet(out)
    assert saved.height in (4, 8)
    output = sweep(runs, out, "--policy", "ema", *GRID).stdout
    assert f"{24 - saved.height} replayed, {saved.height} found there" in output
    assert len(counted) == 24 - saved.height
    assert not set(counted) & set(saved.select("trace", "policy").rows())
    sweep(runs, tmp_path / "whole.parquet", "--policy", "ema", *GRID)
    same(pl.read_parquet(out), pl.read_parquet(tmp_path / "whole.parquet"))
    assert listing(out.parent) == ["s.parquet"], "nothing of the killed one is left"


def test_a_failure_keeps_what_is_finished(runs, tmp_path):
    out = tmp_path / "s.parquet"
    piece = next((runs / "third" / "attention").glob("c.*"))
    good = piece.read_bytes()
    data = bytearray(good)
    data[100] ^= 1
    piece.write_bytes(data)
    assert piece.name in sweep(runs, out, "--policy", "ema", *GRID, "--jobs", 1, code=2).stderr
    assert set(pl.read_parquet(out)["trace"]) == {"first", "second"}
    piece.write_bytes(good)
    assert "8 replayed, 16 found there" in sweep(runs, out, "--policy", "ema", *GRID).stdout


def test_a_failure_waits_for_what_is_running(runs, tmp_path, monkeypatch):
    failing = threading.Event()

    def replay_many(trace, policies, **options):
        if trace.path.name == "third":
            failing.set()
            raise kvsim.TraceError("damaged")
        assert failing.wait(60)
        time.sleep(0.3)
        return kvsim.replay_many(trace, policies, **options)

    monkeypatch.setattr(module, "replay_many", replay_many)
    with pytest.raises(kvsim.TraceError, match="damaged"):
        kvsim.sweep([runs / "first", runs / "third"], "ema", out=tmp_path / "s.parquet", jobs=2)
    assert pl.read_parquet(tmp_path / "s.parquet")["trace"].to_list() == ["first"]


def test_a_failure_before_anything_is_finished_leaves_no_file(runs, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "replay_many", fail)
    before = listing(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        kvsim.sweep(runs / "third", "ema", out=tmp_path / "new" / "s.parquet")
    assert listing(tmp_path) == before


def test_files_that_are_no_sweeps_are_refused_and_left_alone(runs, trace, tmp_path):
    replayed = tmp_path / "replayed"
    run("replay", "--trace", trace.path, "--policy", "ema", "--out", replayed, "--json")
    text, table, half = tmp_path / "notes.txt", tmp_path / "t.parquet", tmp_path / "half.parquet"
    text.write_text("notes")
    pl.DataFrame({"policy": ["ema"], "trace": ["t"]}).write_parquet(table)
    half.write_bytes(table.read_bytes()[:-20])
    for out, message in [
        (text, "is not a whole Parquet file"),
        (half, "is not a whole Parquet file"),
        (table, "is not a kvsim sweep: it has no text column 'trace_hash'"),
        (replayed / "results.parquet", "no text column 'engine_mode'"),
        (replayed, "is a directory"),
    ]:
        before = out.read_bytes() if out.is_file() else listing(out)
        assert message in sweep(runs, out, "--policy", "ema", code=2).stderr
        assert (out.read_bytes() if out.is_file() else listing(out)) == before
    assert not [name for name in listing(tmp_path) if name.endswith((".lock", ".tmp"))]


def test_two_sweeps_do_not_write_one_file_at_once(runs, tmp_path):
    lock = os.open(tmp_path / ".s.parquet.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "another process is writing it" in sweep(runs, tmp_path / "s.parquet", "--policy", "ema", code=2).stderr
    os.close(lock)
    sweep(runs, tmp_path / "s.parquet", "--policy", "ema")
    assert listing(tmp_path)[-1] == "s.parquet"


def test_a_file_that_cannot_be_written_is_an_error(runs, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in sweep(runs, tmp_path / "file" / "s.parquet", "--policy", "ema", code=2).stderr

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvsim.results_file.write_whole", full)
    assert "disk full" in sweep(runs, tmp_path / "s.parquet", "--policy", "ema", code=2).stderr
    assert not [name for name in listing(tmp_path) if name.startswith(("s.parquet", ".s"))]


def test_a_link_is_followed(runs, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "s.parquet").symlink_to(tmp_path / "disk" / "real.parquet")
    sweep(runs, tmp_path / "s.parquet", "--policy", "ema")
    assert (tmp_path / "s.parquet").is_symlink()
    assert pl.read_parquet(tmp_path / "disk" / "real.parquet").height == 3


def test_bad_traces_exit_with_2(runs, tmp_path):
    common = "--policy", "ema", "--out", tmp_path / "s.parquet"
    assert "no such trace directory" in run("sweep", "--trace", tmp_path / "none", *common, code=2).stderr
    assert not (tmp_path / "s.parquet").exists()
    run("sweep", *common, "--trace", runs / "first", runs / "third", "-q")
    assert pl.read_parquet(tmp_path / "s.parquet")["trace"].to_list() == ["first", "third"]


def test_help_says_what_is_left_out():
    text = " ".join(run("sweep", "--help").stdout.replace("│", " ").split())
    assert "off by default because it costs dense passes" in text
    assert "A comma within a value is written %2C" in text
