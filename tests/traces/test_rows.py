import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from kvsim_traces import CaptureError, LayerInfo, TraceError, open_trace
from kvsim_traces.rows import rows_path
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


def test_damaged_rows_are_an_error(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qk", [])
    piece = open_trace(path).store_rows() / "attention" / "c.0.0.0.0"
    data = bytearray(piece.read_bytes())
    data[5] ^= 4
    piece.write_bytes(data)
    with pytest.raises(TraceError, match=r"t\.rows/attention/c\.0\.0\.0\.0: chunk 0 .*checksum"):
        open_trace(path).attention_rows(1)


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
