import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from kvsim_traces import CaptureError, LayerInfo, TraceError, open_trace, repair_trace, verify_trace
from kvsim_traces.rows import rows_path, write_rows
from making import Recording, files_of

RECORDING = Recording(steps=20)
LAYERS = [
    LayerInfo(),
    LayerInfo("sliding_attention", False, 6, 0.3, None),
    LayerInfo("chunked_attention", True, 8, None, 2.0),
]


def naive_row(layer: int, head: int, step: int) -> np.ndarray:
    """One row, position by position, from the definitions alone."""
    info, position = LAYERS[layer], RECORDING.prompt + step - 1
    query = RECORDING.queries[step - 1, layer, head].astype(float)
    logits = {}
    for i in range(position + 1):
        if info.type == "sliding_attention" and i <= position - info.sliding_window:  # type: ignore[operator]
            continue
        if info.type == "chunked_attention" and i // info.sliding_window != position // info.sliding_window:  # type: ignore[operator]
            continue
        key = RECORDING.keys[layer, head // 2, i].astype(float)
        logit = float(query @ key) * (info.scaling or 1 / math.sqrt(8))
        logits[i] = info.softcap * math.tanh(logit / info.softcap) if info.softcap else logit
    total = sum(math.exp(value) for value in logits.values())
    return np.array([math.exp(logits[i]) / total if i in logits else 0.0 for i in range(position + 1)])


def test_rows_are_softmax_of_queries_and_keys(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk", [], layers=LAYERS))
    for step in (1, 7, 20):
        rows = trace.attention_rows(step)
        assert rows.dtype == np.float32
        for layer in range(3):
            for head in range(4):
                np.testing.assert_allclose(rows[layer, head], naive_row(layer, head, step), rtol=1e-6, atol=1e-12)
        np.testing.assert_array_equal(trace.attention_rows(step, [2, 1]), rows[[2, 1]])
        np.testing.assert_array_equal(trace.score_rows(step), rows.mean(axis=1, dtype=np.float64).astype(np.float32))


def test_sink_logits_scale_computed_rows(tmp_path: Path) -> None:
    manifest = RECORDING.manifest("qk", ["row_sums"], sink_logits=True)
    from kvsim_traces import TraceWriter

    sums = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(3, 4)
    with TraceWriter(tmp_path / "t", manifest) as writer:
        writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
        for step in range(1, 21):
            writer.append(row_sums=sums, **RECORDING.step_arguments(step, manifest.arrays))
    np.testing.assert_allclose(open_trace(tmp_path / "t").attention_rows(3).sum(axis=-1), sums, rtol=1e-5)


def test_stored_rows_are_bit_equal_and_used(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qk", [], layers=LAYERS)
    before = files_of(path)
    computed = [open_trace(path).attention_rows(step) for step in range(1, 21)]
    trace = open_trace(path)
    steps = []
    assert trace.store_rows(lambda done, total: steps.append((done, total))) == rows_path(path)
    assert steps == [(step, 20) for step in range(1, 21)]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["t", "t.rows"]
    assert files_of(path) == before
    for one in (trace, open_trace(path)):
        for step, want in enumerate(computed, 1):
            np.testing.assert_array_equal(one.attention_rows(step).view(np.uint32), want.view(np.uint32))
            np.testing.assert_array_equal(one.attention_rows(step, [1]), want[[1]])
        assert one._rows is not None
    kept = zarr.open_group(rows_path(path), mode="r")["attention"]
    assert kept.shape == (20, 3, 4, 33)
    np.testing.assert_array_equal(kept[4, ..., :18], computed[4])


def test_rows_of_another_trace_are_not_used(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qk", [])
    open_trace(path).store_rows()
    other = Recording(steps=20, seed=1).write(tmp_path / "other", "qk", [])
    rows_path(path).rename(rows_path(other))
    trace = open_trace(other)
    trace.attention_rows(1)
    assert trace._rows is None
    trace.store_rows()
    fresh = open_trace(other)
    fresh.attention_rows(1)
    assert fresh._rows is not None
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other", "other.rows", "t"]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A trace with rows beside it."""
    path = RECORDING.write(tmp_path / "t", "qk", [], layers=LAYERS)
    open_trace(path).store_rows()
    return path


def damaged(rows: Path, how: str) -> None:
    piece = rows / "attention" / "c.0.0.0.0"
    if how == "flipped byte":
        data = bytearray(piece.read_bytes())
        data[5] ^= 4
        piece.write_bytes(data)
    elif how == "truncated piece":
        os.truncate(piece, 100)
    elif how == "missing piece":
        (rows / "attention" / "c.1.0.0.0").unlink()
    elif how == "other layout":
        file = rows / "attention" / "zarr.json"
        file.write_text(file.read_text().replace("float32", "float64"))
    elif how == "truncated metadata":
        os.truncate(rows / "zarr.json", 5)
    elif how == "no metadata":
        (rows / "zarr.json").unlink()
    elif how == "no array metadata":
        (rows / "attention" / "zarr.json").unlink()
    elif how in ("link", "dangling link"):
        rows.rename(rows.with_name("elsewhere"))
        rows.symlink_to("elsewhere" if how == "link" else "nowhere")
    else:
        shutil.rmtree(rows)
        if how == "empty":
            rows.mkdir()
        else:
            rows.write_text("mine")


DAMAGE = ["flipped byte", "truncated piece", "missing piece", "other layout", "truncated metadata", "no metadata"]
DAMAGE += ["no array metadata", "link", "dangling link", "empty", "file"]


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_rows_are_ignored_and_reported(stored: Path, how: str) -> None:
    want = [open_trace(stored).attention_rows(step) for step in range(1, 21)]
    assert verify_trace(stored).ok
    damaged(rows_path(stored), how)
    trace = open_trace(stored)
    for step in range(20, 0, -1):
        np.testing.assert_array_equal(trace.attention_rows(step), want[step - 1])
    assert trace._rows is None
    (problem,) = verify_trace(stored).problems
    assert problem.startswith(f"{rows_path(stored)}")
    assert problem.endswith("reading the trace ignores it, delete it or move it away")
    assert repair_trace(stored).ok


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows * np.nan, "layer 0, head 0 row sums to nan"),
        (lambda rows: rows * np.inf, "layer 0, head 0 row sums to"),
        (lambda rows: rows * 7, "layer 0, head 0 row sums to 7 instead of 1"),
        (lambda rows: rows - rows[..., ::-1] + 1 / rows.shape[-1], "value at layer 0, head 0, position .* is negative"),
        (lambda rows: np.full_like(rows, 3e38), "layer 0, head 0 row sums to inf"),
    ],
)
def test_rows_with_right_checksums_and_wrong_numbers(stored: Path, verify: bool, change: Any, message: str) -> None:
    trace = open_trace(stored)
    want = [trace.attention_rows(step) for step in (1, 9)]
    with np.errstate(invalid="ignore"):
        write_rows(stored, trace.manifest, trace.hash, lambda step: change(trace._computed_rows(step, None)))
    again = open_trace(stored, verify=verify)
    np.testing.assert_array_equal(again.attention_rows(1), want[0])
    np.testing.assert_array_equal(again.attention_rows(9, [2, 1]), want[1][[2, 1]])
    assert again._rows is None
    (problem,) = verify_trace(stored).problems
    assert re.search(rf"t\.rows/attention/c\.0\.0\.0\.0: attention of step 1: {message}", problem)


def test_verify_computes_some_stored_rows_again(stored: Path) -> None:
    trace = open_trace(stored)
    write_rows(stored, trace.manifest, trace.hash, lambda step: np.full((3, 4, 13 + step), 1 / (13 + step), np.float32))
    (problem,) = verify_trace(stored).problems
    assert "attention of step 1: differs from what queries and keys give" in problem


@pytest.mark.parametrize("how", ["empty", "file", "link", "dangling link", "no metadata", "truncated metadata"])
def test_storing_replaces_only_stored_rows(stored: Path, tmp_path: Path, how: str) -> None:
    damaged(rows_path(stored), how)
    if rows_path(stored).is_dir():
        (rows_path(stored) / "mine.txt").write_text("precious")
    before, names = files_of(tmp_path), sorted(os.listdir(tmp_path))
    trace = open_trace(stored)
    with pytest.raises(TraceError, match=r"t\.rows: is in the way and not replaced, for kvsim did not make it"):
        trace.store_rows(lambda done, total: pytest.fail("the rows were computed first"))
    assert (files_of(tmp_path), sorted(os.listdir(tmp_path))) == (before, names)


@pytest.mark.parametrize("how", ["flipped byte", "truncated piece", "missing piece", "other layout"])
def test_storing_mends_damaged_rows(stored: Path, tmp_path: Path, how: str) -> None:
    before = files_of(rows_path(stored))
    damaged(rows_path(stored), how)
    open_trace(stored).store_rows()
    assert files_of(rows_path(stored)) == before
    assert sorted(os.listdir(tmp_path)) == ["t", "t.rows"]


def test_what_appears_while_rows_are_computed_stays(stored: Path, tmp_path: Path) -> None:
    shutil.rmtree(rows_path(stored))

    def appear(done: int, total: int) -> None:
        rows_path(stored).mkdir(exist_ok=True)
        (rows_path(stored) / "mine.txt").write_text("precious")

    with pytest.raises(TraceError, match=r"t\.rows: is in the way"):
        open_trace(stored).store_rows(appear)
    assert sorted(os.listdir(tmp_path)) == ["t", "t.rows"]
    assert os.listdir(rows_path(stored)) == ["mine.txt"]


@pytest.mark.parametrize("there", [False, True])
def test_threads_store_rows_at_once(stored: Path, tmp_path: Path, there: bool) -> None:
    before = files_of(rows_path(stored))
    if not there:
        shutil.rmtree(rows_path(stored))
    ready = threading.Barrier(4)

    def store(_: int) -> None:
        trace = open_trace(stored)
        trace.store_rows(lambda done, total: ready.wait(30) and None if done == total else None)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store, range(4)))
    assert files_of(rows_path(stored)) == before
    assert sorted(os.listdir(tmp_path)) == ["t", "t.rows"]


def test_a_killed_store_leaves_nothing_that_looks_like_rows(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qk", [])
    code = f"""
import os, signal
from kvsim_traces import open_trace
open_trace({str(path)!r}).store_rows(lambda done, total: done == 9 and os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert [one.name for one in tmp_path.glob("[!.]*")] == ["t"]
    assert open_trace(path).store_rows() == rows_path(path)


def test_only_computed_rows_are_stored(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "heads", []))
    with pytest.raises(CaptureError, match="captures that do: qk, qkv"):
        trace.store_rows()
    assert [one.name for one in tmp_path.iterdir()] == ["t"]


def test_rows_survive_flushed_denormals() -> None:
    code = """
import numpy as np, torch
from kvsim_traces.values import halves_to_floats
halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
want = halves.astype(np.float64) / 32768
if torch.set_flush_denormal(True):
    assert (halves_to_floats(halves) == want).all()
"""
    pytest.importorskip("torch")
    subprocess.run([sys.executable, "-c", code], check=True)
