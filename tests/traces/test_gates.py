"""Keys before the rotary embedding and gates as a trace keeps them; gates added to a trace that is there."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import zarr
from kvsim_traces import (
    CaptureError,
    Manifest,
    TraceError,
    TraceWriter,
    export_npz,
    import_npz,
    open_trace,
    repair_trace,
    store_gates,
    verify_trace,
)
from kvsim_traces import gates as gates_module
from kvsim_traces.files import write_json
from kvsim_traces.reader import read_manifest
from kvsim_traces.writer import group_metadata
from making import EVERYTHING, PRE, Recording, files_of

RECORDING = Recording(prompt=30, steps=20)
ARRAYS = [*EVERYTHING, *PRE]


def agrees(path, steps):
    """The trace holds the first steps of the recording."""
    trace, group = open_trace(path), zarr.open_group(path, mode="r")
    for layer in range(3):
        np.testing.assert_array_equal(trace.keys_pre(layer), RECORDING.keys_pre[layer, :, : 30 + steps])
    np.testing.assert_array_equal(trace.gates(), RECORDING.gates[..., : 30 + steps])
    np.testing.assert_array_equal(group["gates"][...], RECORDING.gates[..., : 30 + steps])
    np.testing.assert_array_equal(group["keys_pre"][...], RECORDING.keys_pre[:, :, : 30 + steps])
    report = verify_trace(path)
    assert report.ok, report.problems


@pytest.mark.parametrize("capture", ["qk", "qkv", "scores"])
def test_they_round_trip(tmp_path, capture):
    arrays = ARRAYS if capture != "scores" else [*EVERYTHING, "gates"]
    gate = {"name": "g.safetensors", "hash": "ab"}
    trace = open_trace(RECORDING.write(tmp_path / "a", capture, arrays, gate=gate))
    export_npz(trace, tmp_path / "a.npz")
    again = import_npz(tmp_path / "a.npz", tmp_path / "b")
    assert again.manifest.gate == gate
    assert set(again.manifest.arrays) == set(trace.manifest.arrays)
    if capture != "scores":
        agrees(tmp_path / "b", 20)
    np.testing.assert_array_equal(again.gates(), RECORDING.gates)
    with np.load(tmp_path / "a.npz") as plain:
        np.testing.assert_array_equal(plain["gates"], RECORDING.gates)


@pytest.mark.parametrize("closed", [False, True])
def test_a_recording_that_stops_early(tmp_path, closed):
    manifest = RECORDING.manifest("qk", ARRAYS)
    writer = TraceWriter(tmp_path / "t", manifest)
    writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
    for step in range(1, 8):
        writer.append(**RECORDING.step_arguments(step, manifest.arrays))
    if closed:
        writer.close()
    else:
        writer.commit()
        writer._release()
        assert open_trace(tmp_path / "t").gates().shape == (3, 2, 37)
        assert repair_trace(tmp_path / "t").ok
    agrees(tmp_path / "t", 7)
    export_npz(open_trace(tmp_path / "t"), tmp_path / "t.npz")
    import_npz(tmp_path / "t.npz", tmp_path / "u")
    agrees(tmp_path / "u", 7)


def test_wrong_arrays_are_refused(tmp_path):
    with pytest.raises(TraceError, match="keys_pre needs keys"):
        RECORDING.manifest("scores", ["keys_pre"]).validate()
    with pytest.raises(TraceError, match="gate: is superfluous without the array gates"):
        RECORDING.manifest("qk", [], gate={"name": "g", "hash": "a"}).validate()
    with pytest.raises(TraceError, match=r"gate.hash: must be a string, got 3"):
        RECORDING.manifest("qk", ["gates"], gate={"name": "g", "hash": 3}).validate()
    manifest = RECORDING.manifest("qk", PRE)
    with TraceWriter(tmp_path / "t", manifest) as writer:
        given = RECORDING.prompt_arguments(manifest.arrays)
        with pytest.raises(TraceError, match=r"gates: must have shape \[3, 2, 50\], got \[3, 2, 49\]"):
            writer.write_prompt(gates=RECORDING.gates[..., 1:])
        writer.write_prompt(**given)
        step = RECORDING.step_arguments(1, manifest.arrays)
        with pytest.raises(TraceError, match="keys_pre: is missing"):
            writer.append(**{name: value for name, value in step.items() if name != "keys_pre"})
        with pytest.raises(TraceError, match=r"keys_pre: must have shape \[3, 2, 8\]"):
            writer.append(**(step | {"keys_pre": step["keys_pre"][..., 1:]}))
        writer.append(**step)


def test_old_manifests_have_no_gate_and_write_none():
    data = RECORDING.manifest("qk", []).to_json()
    assert "gate" not in data
    assert Manifest.from_json(data).gate is None
    assert "gate" not in Manifest.from_json(data).to_json()


# Added to a trace


@pytest.fixture
def path(tmp_path):
    return RECORDING.write(tmp_path / "t", "qk")


def test_gates_are_added_and_replaced(path):
    before, plain = open_trace(path).hash, files_of(path)
    trace = store_gates(path, lambda trace: RECORDING.gates.astype(np.float64), name="g", digest="one")
    np.testing.assert_array_equal(trace.gates(), RECORDING.gates)
    assert trace.has("gates")
    assert trace.manifest.gate == {"name": "g", "hash": "one"}
    assert trace.hash == before
    assert verify_trace(path).ok
    for name in set(plain) - {"zarr.json"}:
        assert (path / name).read_bytes() == plain[name]

    def other(trace):
        assert not trace.has("gates")
        return 1 - RECORDING.gates

    trace = store_gates(path, other, name="h", digest="two")
    np.testing.assert_array_equal(trace.gates(), 1 - RECORDING.gates)
    assert trace.manifest.gate == {"name": "h", "hash": "two"}
    assert trace.manifest.arrays.count("gates") == 1
    assert trace.hash == before
    assert [one.name for one in path.parent.iterdir()] == ["t"]


def test_stored_rows_stay_valid(path):
    trace = open_trace(path)
    trace.store_rows()
    store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    again = open_trace(path)
    assert verify_trace(path).ok
    again.attention_rows(1)
    assert again._rows is not None


def test_damaged_gates_are_reported_and_replaced(path):
    store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    piece = path / "gates" / "c.0.0.0"
    data = bytearray(piece.read_bytes())
    data[5] ^= 1
    piece.write_bytes(data)
    with pytest.raises(TraceError, match=r"gates.*checksum"):
        open_trace(path).gates()
    assert not verify_trace(path).ok
    piece.unlink()
    with pytest.raises(TraceError, match="is missing"):
        open_trace(path)
    store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    assert verify_trace(path).ok


@pytest.mark.parametrize("had", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_killed_at_any_moment_the_trace_is_readable(path, monkeypatch, had, at):
    """Every rename and every write of metadata may be the last."""
    if had:
        store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    done = [0]

    def counted(function):
        def run(*args, **options):
            if done[0] == at:
                raise KeyboardInterrupt
            done[0] += 1
            return function(*args, **options)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(gates_module, "write_json", counted(gates_module.write_json))
        patch.setattr(gates_module.os, "rename", counted(os.rename))
        try:
            store_gates(path, lambda trace: 1 - RECORDING.gates, name="h", digest="two")
        except KeyboardInterrupt:
            pass
        else:
            assert done[0] <= at
    trace = open_trace(path)
    np.testing.assert_array_equal(trace.keys(1), RECORDING.keys[1])
    if trace.has("gates"):
        want = {"one": RECORDING.gates, "two": 1 - RECORDING.gates}[trace.manifest.gate["hash"]]
        np.testing.assert_array_equal(trace.gates(), want)
    store_gates(path, lambda trace: RECORDING.gates, name="g", digest="three")
    assert verify_trace(path).ok


def test_repair_removes_gates_that_no_manifest_lists(path):
    listed = read_manifest(path)
    store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    write_json(path / "zarr.json", group_metadata(listed))
    assert verify_trace(path).problems == [
        f"{path / 'gates'}: is left over from an interrupted write; repair removes it"
    ]
    report = repair_trace(path)
    assert (report.ok, report.actions) == (True, [f"removed {path / 'gates'}"])
    assert verify_trace(path).ok


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (RECORDING.gates[..., 1:], r"gates: must have shape \[3, 2, 50\], got \[3, 2, 49\]"),
        (RECORDING.gates * 3, r"gates: must lie in 0..1, got 0.*\.\.2"),
        (RECORDING.gates * np.nan, "gates: value at layer 0, KV head 0, position 0 is NaN"),
        (np.ones((3, 2, 50), int), "gates: must be floating point, got int64"),
    ],
)
def test_scores_that_do_not_fit(path, scores, message):
    before = files_of(path)
    with pytest.raises(TraceError, match=message):
        store_gates(path, lambda trace: scores, name="g", digest="one")
    assert files_of(path) == before


def test_refusals(path, tmp_path):
    with pytest.raises(CaptureError, match="kvsim trace gates"):
        open_trace(path).gates()
    (path / "gates").symlink_to(tmp_path)
    with pytest.raises(TraceError, match="gates: is in the way and not replaced"):
        store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    (path / "gates").unlink()
    file = path / "zarr.json"
    data = json.loads(file.read_text())
    data["attributes"]["kvsim"]["complete"] = False
    file.write_text(json.dumps(data))
    with pytest.raises(TraceError, match="the recording was not closed; repair it first"):
        store_gates(path, lambda trace: RECORDING.gates, name="g", digest="one")
    with pytest.raises(TraceError, match="is missing"):
        store_gates(Path(tmp_path / "none"), lambda trace: RECORDING.gates, name="g", digest="one")
