import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kvsim_traces import CaptureError, TraceError, describe, open_trace
from kvsim_traces.values import halves_to_floats
from making import Recording

RECORDING = Recording()


def test_heads(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "heads"))
    assert (trace.prompt_length, trace.num_steps, trace.num_positions) == (13, 21, 34)
    assert (trace.num_layers, trace.num_heads, trace.num_kv_heads, trace.head_dim) == (3, 4, 2, 8)
    assert trace.capture == "heads"
    assert trace.eligible_layers == (0, 1, 2)
    for step in range(1, 22):
        rows = trace.attention_rows(step)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, RECORDING.stored(step))
        np.testing.assert_array_equal(trace.attention_rows(step, [2, 0]), rows[[2, 0]])
        want = RECORDING.stored(step).astype(np.float64).mean(axis=1).astype(np.float32)
        np.testing.assert_array_equal(trace.score_rows(step), want)
    np.testing.assert_array_equal(trace.prompt_queries(), RECORDING.prompt_queries)
    np.testing.assert_array_equal(trace.prompt_mass(), RECORDING.prompt_mass)
    np.testing.assert_array_equal(trace.kvzip_scores(), RECORDING.kvzip_scores)


def test_scores(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "scores"))
    for step in range(1, 22):
        want = (RECORDING.attention[step - 1].mean(axis=1) * 32768).astype(np.float16).astype(np.float32) / 32768
        np.testing.assert_array_equal(trace.score_rows(step), want)
        np.testing.assert_array_equal(trace.score_rows(step, [1]), want[[1]])
    with pytest.raises(CaptureError, match="captures that have it: heads, qk, qkv"):
        trace.attention_rows(1)
    np.testing.assert_array_equal(trace.row_sums(1), np.ones((3, 4)))


def test_tokens_and_text(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "scores"))
    np.testing.assert_array_equal(trace.tokens, RECORDING.tokens)
    assert [trace.token_bytes(index) for index in range(34)] == RECORDING.texts
    assert trace.texts() == [text.decode(errors="backslashreplace") for text in RECORDING.texts]
    for position in (-1, 34, True, 1.0):
        with pytest.raises(TraceError, match=r"^position: "):
            trace.token_bytes(position)  # type: ignore[arg-type]
    bare = open_trace(RECORDING.write(tmp_path / "bare", "scores", []))
    assert bare.tokens is None
    with pytest.raises(CaptureError, match="has no text_ends"):
        bare.token_bytes(0)


def test_vectors(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qkv"))
    for layer in range(3):
        np.testing.assert_array_equal(trace.keys(layer), RECORDING.keys[layer])
        np.testing.assert_array_equal(trace.values(layer), RECORDING.values[layer])
        assert trace.keys(layer) is trace.keys(layer)
        assert not trace.keys(layer).flags.writeable
    for step in range(1, 22):
        np.testing.assert_array_equal(trace.queries(step), RECORDING.queries[step - 1])


def test_absent_arrays_name_the_captures(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk", []))
    assert trace.has("keys")
    assert not trace.has("values")
    with pytest.raises(CaptureError, match="capture qk has no values; captures that have it: qkv"):
        trace.values(0)
    with pytest.raises(CaptureError, match=r"record with prompt mass, or add prompt_mass \[K,H,L0\] to the npz"):
        trace.prompt_mass()
    with pytest.raises(CaptureError, match=r"or add prompt_queries \[K,H,W,d\] to the npz"):
        trace.prompt_queries()
    with pytest.raises(CaptureError, match=r"record with kvzip, or add kvzip_scores \[K,Hk,L0\] to the npz"):
        trace.kvzip_scores()
    with pytest.raises(CaptureError, match="stored only when given"):
        trace.stored("row_sums")


@pytest.mark.parametrize("step", [0, 22, -1, 10**12, 1.0, "1", True])
def test_steps_out_of_range(tmp_path: Path, step: object) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk", []))
    for read in (trace.attention_rows, trace.score_rows, trace.queries, trace.row_sums):
        with pytest.raises(TraceError, match=r"^step: must be"):
            read(step)  # type: ignore[operator]


@pytest.mark.parametrize("layer", [3, -1, 1.0, "0", True])
def test_layers_out_of_range(tmp_path: Path, layer: object) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk", []))
    with pytest.raises(TraceError, match=r"^layer: must be from 0 to 2"):
        trace.keys(layer)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=r"^layer: must be from 0 to 2"):
        trace.attention_rows(1, [layer])  # type: ignore[list-item]


def test_hash_is_of_the_contents(tmp_path: Path) -> None:
    first = open_trace(RECORDING.write(tmp_path / "a", "heads", created="2026-01-01")).hash
    again = open_trace(RECORDING.write(tmp_path / "b", "heads", created="2027-01-01", notes=["x"])).hash
    assert len(first) == 64
    assert first == again
    other = open_trace(Recording(seed=1).write(tmp_path / "c", "heads")).hash
    fewer = open_trace(Recording(steps=20).write(tmp_path / "d", "heads")).hash
    sunk = open_trace(RECORDING.write(tmp_path / "e", "heads", sink_logits=True)).hash
    assert len({first, other, fewer, sunk}) == 4


def test_describe_is_json(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qkv"))
    facts = json.loads(json.dumps(describe(trace)))
    assert facts["hash"] == trace.hash
    assert facts["arrays"]["keys"]["shape"] == [3, 2, 34, 8]
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "t").rglob("c.*"))
    assert "num_steps=21" in repr(trace)


def test_verify_off_skips_checksums_alone(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "heads", [])
    piece = path / "attention" / "c.0.0.0.0"
    data = bytearray(piece.read_bytes())
    data[0] ^= 1
    piece.write_bytes(data)
    with pytest.raises(TraceError, match="checksum"):
        open_trace(path).attention_rows(1)
    assert open_trace(path, verify=False).attention_rows(1).shape == (3, 4, 14)
    data[1] = 0x7E
    piece.write_bytes(data)
    with pytest.raises(TraceError, match="is NaN"):
        open_trace(path, verify=False).attention_rows(1)


def test_a_checksum_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvsim_traces.stored as stored

    trace = open_trace(RECORDING.write(tmp_path / "t", "heads", []))
    calls = []
    real = stored.crc32c
    monkeypatch.setattr(stored, "crc32c", lambda data: calls.append(len(data)) or real(data))
    trace.attention_rows(1, [1])
    # One chunk of attention, one of row sums.
    assert len(calls) == 2
    trace.attention_rows(2, [1])
    assert len(calls) == 2
    trace.attention_rows(1)
    assert len(calls) == 4


def test_many_pieces_share_few_mappings(tmp_path: Path) -> None:
    recording = Recording(prompt=2, steps=700, layers=1, heads=1, kv_heads=1, dim=1)
    trace = open_trace(recording.write(tmp_path / "t", "heads", []))
    assert trace.stored("attention").pieces > 40
    for step in (1, 699, 350, 1):
        np.testing.assert_array_equal(trace.attention_rows(step), recording.stored(step))
    for step in range(1, 701):
        trace.attention_rows(step)
    assert len(trace.stored("attention")._mapped) <= 32


def test_all_halves_convert_exactly() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16)
    for scale in (1.0, 32768.0):
        np.testing.assert_array_equal(halves_to_floats(halves, scale), halves.astype(np.float32) / np.float32(scale))


def test_reader_imports_no_torch() -> None:
    code = "import sys, kvsim_traces; print(*sorted({'torch', 'polars', 'kvsim', 'zarr'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_unknown_attribute() -> None:
    import kvsim_traces

    with pytest.raises(AttributeError, match="no attribute 'recorder_of_dreams'"):
        _ = kvsim_traces.recorder_of_dreams  # type: ignore[attr-defined]


def test_path_may_be_relative_or_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RECORDING.write(tmp_path / "t", "scores")
    (tmp_path / "link").symlink_to(tmp_path / "t")
    monkeypatch.chdir(tmp_path / "t")
    want = open_trace(tmp_path / "t").hash
    assert open_trace(".").hash == want
    assert open_trace(str(tmp_path / "link")).hash == want
