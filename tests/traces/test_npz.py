import io
import json
import signal
import subprocess
import sys
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvsim_traces import LayerInfo, Trace, TraceError, export_npz, import_npz, open_trace, verify_trace
from making import Recording, bounded, files_of

RECORDING = Recording(steps=6)


def saved(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def same(one: Trace, other: Trace) -> None:
    """Two traces hold the same."""
    assert one.capture == other.capture
    assert one.manifest.layers == other.manifest.layers
    assert one.manifest.sink_logits == other.manifest.sink_logits
    assert sorted(one.manifest.arrays) == sorted(other.manifest.arrays)
    assert one.hash == other.hash
    for step in range(1, one.num_steps + 1):
        np.testing.assert_array_equal(one.score_rows(step), other.score_rows(step))
        np.testing.assert_array_equal(one.row_sums(step), other.row_sums(step))
    if one.has("text"):
        assert one.texts() == other.texts()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_heads(tmp_path: Path, dtype: type, compressed: bool) -> None:
    arrays = RECORDING.npz("heads")
    arrays["attention"] = arrays["attention"].astype(dtype)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "in.npz", **arrays)
    steps: list[tuple[int, int]] = []
    trace = import_npz(tmp_path / "in.npz", tmp_path / "t", progress=lambda done, total: steps.append((done, total)))
    assert steps == [(step, 6) for step in range(1, 7)]
    assert (trace.capture, trace.num_steps, trace.num_layers, trace.num_heads, trace.num_kv_heads) == (
        "heads",
        6,
        3,
        4,
        4,
    )
    assert trace.manifest.source == "import"
    assert trace.manifest.generation["mode"] == "imported"
    assert trace.manifest.complete
    for step in range(1, 7):
        want = (arrays["attention"][step - 1, ..., : 13 + step].astype(np.float64) * 32768).astype(np.float16)
        np.testing.assert_array_equal(trace.stored_rows(step), want)
    assert verify_trace(tmp_path / "t").ok
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.npz", "t"]


def test_scores(tmp_path: Path) -> None:
    arrays = RECORDING.npz("scores")
    trace = import_npz(saved(tmp_path / "in.npz", **arrays, tokens=RECORDING.tokens), tmp_path / "t")
    assert (trace.capture, trace.num_heads, trace.num_kv_heads) == ("scores", 1, 1)
    np.testing.assert_array_equal(trace.tokens, RECORDING.tokens)
    for step in range(1, 7):
        np.testing.assert_allclose(trace.score_rows(step), arrays["scores"][step - 1, :, : 13 + step], atol=5e-4)


@pytest.mark.parametrize("capture", ["qk", "qkv"])
def test_vectors(tmp_path: Path, capture: str) -> None:
    trace = import_npz(saved(tmp_path / "in.npz", **RECORDING.npz(capture)), tmp_path / "t")
    assert (trace.capture, trace.num_heads, trace.num_kv_heads, trace.head_dim) == (capture, 4, 2, 8)
    recorded = open_trace(RECORDING.write(tmp_path / "r", capture, []))
    for step in range(1, 7):
        np.testing.assert_array_equal(trace.attention_rows(step), recorded.attention_rows(step))


def test_float32_vectors_stay_exact(tmp_path: Path) -> None:
    arrays = RECORDING.npz("qk")
    arrays["queries"] = np.random.default_rng(0).normal(size=(6, 3, 4, 8)).astype(np.float32) * 1e6
    trace = import_npz(saved(tmp_path / "in.npz", **arrays), tmp_path / "t")
    np.testing.assert_array_equal(trace.queries(3), arrays["queries"][2])


def test_attention_and_vectors_are_both_kept(tmp_path: Path) -> None:
    arrays = RECORDING.npz("heads") | RECORDING.npz("qkv")
    trace = import_npz(saved(tmp_path / "in.npz", **arrays), tmp_path / "t")
    assert trace.capture == "heads"
    assert all(trace.has(name) for name in ("attention", "queries", "keys", "values"))
    assert trace.num_kv_heads == 2
    np.testing.assert_array_equal(trace.attention_rows(4), RECORDING.stored(4))
    np.testing.assert_array_equal(trace.values(1), RECORDING.values[1])


def test_padding_may_be_nan_or_longer(tmp_path: Path) -> None:
    arrays = RECORDING.npz("heads")
    wide = np.full((6, 3, 4, 40), np.nan, np.float32)
    for step, rows in enumerate(RECORDING.attention):
        wide[step, ..., : rows.shape[-1]] = rows
        wide[step, ..., 30:] = 0
    arrays["attention"] = wide
    tokens = np.concatenate([RECORDING.tokens, [7] * 5])
    trace = import_npz(saved(tmp_path / "in.npz", **arrays, tokens=tokens, num_kv_heads=2), tmp_path / "t")
    assert trace.num_kv_heads == 2
    assert len(trace.tokens) == 19  # type: ignore[arg-type]
    for step in range(1, 7):
        np.testing.assert_array_equal(trace.attention_rows(step), RECORDING.stored(step))


def test_fortran_and_big_endian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = RECORDING.npz("heads") | RECORDING.npz("qk")
    arrays["attention"] = np.asfortranarray(arrays["attention"])
    arrays["keys"] = np.asfortranarray(arrays["keys"].astype(">f4"))
    arrays["queries"] = arrays["queries"].astype(">f2")
    for limit in (2**26, 0):
        # With no room in memory, arrays that must be whole go through a temporary file.
        monkeypatch.setattr("kvsim_traces.npz._IN_MEMORY", limit)
        trace = import_npz(saved(tmp_path / "in.npz", **arrays), tmp_path / f"t{limit}")
        np.testing.assert_array_equal(trace.attention_rows(5), RECORDING.stored(5))
        np.testing.assert_array_equal(trace.queries(2), RECORDING.queries[1])
        np.testing.assert_array_equal(trace.keys(2), RECORDING.keys[2])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.npz", "t0", f"t{2**26}"]


def test_unknown_arrays_are_noted(tmp_path: Path) -> None:
    trace = import_npz(saved(tmp_path / "in.npz", **RECORDING.npz("scores"), labels=np.arange(3)), tmp_path / "t")
    assert "labels" in trace.manifest.notes[0]


@pytest.mark.parametrize("capture", ["heads", "scores", "qk", "qkv"])
def test_export_of_import_round_trips(tmp_path: Path, capture: str) -> None:
    layers = [LayerInfo(), LayerInfo("sliding_attention", False, 6, 0.3, 5.0), LayerInfo()]
    trace = open_trace(RECORDING.write(tmp_path / "a", capture, layers=layers, vocab_size=1000, notes=["mine"]))
    assert export_npz(trace, tmp_path / "a.npz") == tmp_path / "a.npz"
    again = import_npz(tmp_path / "a.npz", tmp_path / "b")
    same(trace, again)
    assert again.manifest.notes == ["mine"]
    assert again.manifest.vocab_size == 1000
    export_npz(again, tmp_path / "b.npz")
    with np.load(tmp_path / "a.npz") as one, np.load(tmp_path / "b.npz") as other:
        assert (
            set(one) == set(other) == {"prompt_length", "num_heads", "num_kv_heads", "manifest", *trace.manifest.arrays}
        )
        for name in set(one) - {"manifest"}:
            np.testing.assert_array_equal(one[name], other[name])
            assert one[name].dtype == other[name].dtype
        if capture == "heads":
            for step in range(1, 7):
                np.testing.assert_array_equal(one["attention"][step - 1, ..., : 13 + step], RECORDING.stored(step))
                assert not one["attention"][step - 1, ..., 13 + step :].any()


def test_sinks_round_trip(tmp_path: Path) -> None:
    arrays = RECORDING.npz("heads")
    arrays["attention"] = arrays["attention"] / 2
    with pytest.raises(TraceError, match=r"row sums to 0.5"):
        import_npz(saved(tmp_path / "bad.npz", **arrays), tmp_path / "bad")
    arrays["row_sums"] = arrays["attention"].sum(axis=-1)
    trace = import_npz(saved(tmp_path / "in.npz", **arrays), tmp_path / "t")
    assert trace.manifest.sink_logits
    export_npz(trace, tmp_path / "out.npz")
    same(trace, import_npz(tmp_path / "out.npz", tmp_path / "u"))


def test_exports_are_reproducible_and_plain(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "heads"))
    files = [export_npz(trace, tmp_path / name).read_bytes() for name in ("a.npz", "b.npz")]
    assert files[0] == files[1]
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.testzip() is None
    with pytest.raises(TraceError, match=r"a\.npz: exists"):
        export_npz(trace, tmp_path / "a.npz")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.npz", "b.npz", "t"]


def changed(name: str, value: Any, capture: str = "heads") -> dict[str, Any]:
    arrays = RECORDING.npz(capture)
    if value is None:
        del arrays[name]
    else:
        arrays[name] = value
    return arrays


def poked(place: tuple[int, ...], value: float, capture: str = "heads", name: str = "attention") -> dict[str, Any]:
    arrays = RECORDING.npz(capture)
    arrays[name] = arrays[name].copy()
    arrays[name][place] = value
    return arrays


FULL = RECORDING.npz("heads")["attention"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed("prompt_length", None), "prompt_length: is missing"),
        (changed("prompt_length", 0), "prompt_length: must be from 1"),
        (changed("prompt_length", -3), "prompt_length: must be from 1"),
        (changed("prompt_length", 10**12), "prompt_length: must be from 1"),
        (changed("prompt_length", 2**31 - 1), "attention: must reach"),
        (changed("prompt_length", 13.0), "prompt_length: must be one integer"),
        (changed("prompt_length", np.array([13, 14])), "prompt_length: must be one integer"),
        (changed("prompt_length", 14), "attention: must reach 20 positions"),
        (changed("attention", None), "attention: is missing; a trace needs"),
        (changed("attention", FULL.astype(int)), "attention: must be float16, float32, float64, got int64"),
        (changed("attention", FULL.astype(complex)), "attention: must be numbers, got complex128"),
        (changed("attention", FULL.astype(np.longdouble)), "attention: must be float16, float32, float64"),
        (changed("attention", FULL.astype(object)), "attention: (must be numbers, got object|has no readable header)"),
        (changed("attention", FULL.astype(str)), "attention: must be numbers"),
        (changed("attention", FULL[0]), "attention: must have 4 axes"),
        (changed("attention", FULL[:0]), "attention: must not be empty"),
        (changed("attention", FULL[:, :0]), "attention: must not be empty"),
        (changed("scores", FULL.mean(axis=2)), "scores: is superfluous beside attention"),
        (changed("num_kv_heads", 3), "num_heads: 4 is not a multiple of num_kv_heads 3"),
        (changed("num_kv_heads", 0), "num_kv_heads: must be from 1"),
        (changed("num_kv_heads", True), "num_kv_heads: must be one integer, got bool"),
        (changed("num_heads", 5), "num_heads: is 5, but the arrays have 4 heads"),
        (changed("num_kv_heads", 4, "qk"), "num_kv_heads: is 4, but keys or values have 2 heads"),
        (changed("tokens", RECORDING.tokens[:5]), "tokens: must reach 19 positions"),
        (changed("tokens", RECORDING.tokens.astype(float)), "tokens: must be integers"),
        (changed("tokens", -RECORDING.tokens - 1), "tokens: must lie in"),
        (changed("text", np.zeros(3, np.uint8)), "arrays: text needs"),
        (changed("queries", RECORDING.queries[:5]), "queries: shape .* does not fit T = 6"),
        (changed("queries", RECORDING.queries[:, :2], "qk"), "keys: shape .* does not fit K = 2"),
        (changed("queries", RECORDING.queries[..., :4], "qk"), "keys: shape .* does not fit d = 4"),
        (changed("keys", RECORDING.keys[:, :, :18], "qk"), "keys: must reach 19 positions"),
        (changed("keys", None, "qk"), "attention: is missing"),
        (changed("values", RECORDING.values[:, :1], "qkv"), "values: shape .* does not fit G = 2"),
        (changed("prompt_mass", np.zeros((3, 4, 12))), "prompt_mass: shape .* does not fit P = 13"),
        (changed("manifest", np.frombuffer(b"{}", np.uint8)), "manifest: format_version"),
        (changed("manifest", np.frombuffer(b"{", np.uint8)), "manifest: is not valid JSON"),
        (changed("manifest", np.zeros(3)), "manifest: must be at most"),
        (poked((2, 1, 3, 5), np.nan), "attention of step 3: value at layer 1, head 3, position 5 is NaN"),
        (poked((2, 1, 3, 15), np.inf), "attention of step 3: value at layer 1, head 3, position 15 is infinite"),
        (poked((2, 1, 3, 5), -0.2), "attention of step 3: value at layer 1, head 3, position 5 is negative"),
        (poked((2, 1, 3, 5), 0.9), "attention of step 3: layer 1, head 3 row sums to"),
        (poked((5, 2, 0, 5), 0.9), "attention of step 6: layer 2, head 0 row sums to"),
        (poked((2, 1, 3, 16), 0.1), "attention: step 3 attends beyond its own position 15"),
        (poked((2, 1, 5), 0.9, "scores", "scores"), "scores of step 3: layer 1 row sums to"),
        (poked((2, 1, 0, 3), np.nan, "qk", "queries"), "queries: value at index .* is NaN"),
        (poked((1, 0, 3, 3), np.nan, "qk", "keys"), "keys: value at index .* is NaN"),
        (poked((1, 0, 15, 3), np.inf, "qk", "keys"), "keys: value at index .* is infinite"),
    ],
)
def test_bad_files(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    file = saved(tmp_path / "in.npz", **arrays)
    with pytest.raises(TraceError, match=rf"^{file}: ({message})"):
        import_npz(file, tmp_path / "new" / "t")
    assert [one.name for one in tmp_path.iterdir()] == ["in.npz"]


def member(shape: tuple[int, ...], dtype: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    stream = io.BytesIO()
    write = {(1, 0): np.lib.format.write_array_header_1_0, (2, 0): np.lib.format.write_array_header_2_0}[version]
    write(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue() + data


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


LENGTH = member((), "<i8", (13).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (member((10**6, 1, 1, 10**6), "<f4"), r"attention: its header claims \[1000000, 1, 1, 1000000\] of float32"),
        (member((10**12,), "<f4", b"0" * 400), "attention: its header claims"),
        (member((2, 2, 2, 20), "<f4", b"0" * 639), "attention: its header claims"),
        (member((2, 2, 2, 20), "<f4", b"0" * 641), "attention: its header claims"),
        (member((10**30, 0, 1, 1), "<f4"), "attention: must not be empty"),
        (member((-1, 1, 1, 1), "<f4"), "attention: has no readable header"),
        (b"\x93NUMPY\x02\x00" + b"\xff" * 4, "attention: has no readable header"),
        (b"\x93NUMPY\x09\x00" + b"\x00" * 40, "attention: has no readable header"),
        (b"not an array", "attention: has no readable header"),
        (b"", "attention: has no readable header"),
    ],
)
def test_lying_headers(tmp_path: Path, data: bytes, message: str) -> None:
    file = archive(tmp_path / "in.npz", prompt_length=LENGTH, attention=data)

    def read() -> None:
        with pytest.raises(TraceError, match=rf"^{file}: {message}"):
            import_npz(file, tmp_path / "t")

    bounded(read)
    assert [one.name for one in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_lying_archive(tmp_path: Path, method: int) -> None:
    """Header and directory of the archive agree on gigabytes that are not there."""
    size = 4 * 10**9
    noise = np.random.default_rng(0).bytes(20_000)
    data = member((1, 1, 1, 10**9), "<f4", noise)
    with zipfile.ZipFile(tmp_path / "in.npz", "w", method) as file:
        file.writestr("prompt_length.npy", LENGTH)
        file.writestr("attention.npy", data)
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    entry = raw.rindex(b"PK\x01\x02")
    for place in (entry + 20, entry + 24)[method == zipfile.ZIP_DEFLATED :]:
        raw[place : place + 4] = (size + len(data) - len(noise)).to_bytes(4, "little")
    (tmp_path / "in.npz").write_bytes(raw)

    def read() -> None:
        with pytest.raises(TraceError, match="attention: its header claims"):
            import_npz(tmp_path / "in.npz", tmp_path / "t")

    bounded(read)


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 no", b"x" * 1000, b"\x80\x04K\x03."])
def test_not_a_zip(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "in.npz").write_bytes(data)
    with pytest.raises(TraceError, match=r"is not an .npz file"):
        import_npz(tmp_path / "in.npz", tmp_path / "t")
    with pytest.raises(TraceError, match="is missing"):
        import_npz(tmp_path / "none.npz", tmp_path / "t")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_data(tmp_path: Path, compressed: bool) -> None:
    (np.savez_compressed if compressed else np.savez)(tmp_path / "in.npz", **RECORDING.npz("heads"))
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "in.npz") as file:
        start = file.getinfo("attention.npy").header_offset
    for place in range(start + 4000, start + 4100):
        raw[place] ^= 0xFF
    (tmp_path / "in.npz").write_bytes(raw)
    with pytest.raises(TraceError, match=r"in\.npz: attention"):
        import_npz(tmp_path / "in.npz", tmp_path / "t")
    assert [one.name for one in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_checksums_are_checked_whatever_zipfile_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    """Since Python 3.12 zipfile checks no stored member in which it was told to seek."""
    arrays = RECORDING.npz("qk")
    arrays["keys"] = np.asarray(arrays["keys"], order=order)
    np.savez(tmp_path / "in.npz", **arrays)
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "in.npz") as file:
        start = file.getinfo("keys.npy").header_offset
    raw[start + 500] ^= 1
    (tmp_path / "in.npz").write_bytes(raw)
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda self, data: None)
    with pytest.raises(TraceError, match=r"in\.npz: keys: is damaged: its checksum does not match"):
        import_npz(tmp_path / "in.npz", tmp_path / "t")
    assert [one.name for one in tmp_path.iterdir()] == ["in.npz"]


def test_the_last_step_is_not_read_before_its_checksum_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = RECORDING.npz("heads")
    np.savez(tmp_path / "in.npz", **arrays)
    raw = bytearray((tmp_path / "in.npz").read_bytes())
    value = arrays["attention"][5, 2, 3, 18].tobytes()
    place = raw.rindex(value)
    raw[place] ^= 1
    (tmp_path / "in.npz").write_bytes(raw)
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda self, data: None)
    with pytest.raises(TraceError, match=r"attention: is damaged: its checksum does not match"):
        import_npz(tmp_path / "in.npz", tmp_path / "t")


@pytest.mark.parametrize("heads", [2**16 + 1, 2**31 - 1])
def test_a_claim_of_heads(tmp_path: Path, heads: int) -> None:
    file = saved(tmp_path / "in.npz", **RECORDING.npz("scores"), num_heads=heads, num_kv_heads=heads)

    def read() -> None:
        with pytest.raises(TraceError, match=r"in\.npz: num_heads: must be an integer from 1 to 65536"):
            import_npz(file, tmp_path / "t")

    bounded(read)
    arrays = RECORDING.npz("scores")
    arrays["scores"] = np.repeat(arrays["scores"], 8, axis=1)
    most = saved(tmp_path / "most.npz", **arrays, num_heads=2**16, num_kv_heads=2**16)
    # What a first import loads is not what this is about.
    import_npz(most, tmp_path / "first")
    tracemalloc.start()
    trace = import_npz(most, tmp_path / "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.row_sums(1).shape == (24, 2**16)
    # [K, H] of float32 would be 6.3 MB.
    assert peak < 2_000_000, peak


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": "\\ud800"}'])
def test_a_manifest_that_is_not_json(tmp_path: Path, text: str) -> None:
    manifest = np.frombuffer(text.encode(), np.uint8)
    file = saved(tmp_path / "in.npz", **RECORDING.npz("scores"), manifest=manifest)
    with pytest.raises(TraceError, match=r"in\.npz: manifest: is not valid JSON"):
        import_npz(file, tmp_path / "t")


def test_a_killed_import_leaves_nothing_that_looks_like_a_trace(tmp_path: Path) -> None:
    file = saved(tmp_path / "in.npz", **RECORDING.npz("heads"))
    code = f"""
import os, signal
from kvsim_traces import import_npz
import_npz({str(file)!r}, {str(tmp_path / "t")!r}, progress=lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (left,) = [one.name for one in tmp_path.iterdir() if one != file]
    assert left.startswith(".t.")
    assert left.endswith(".tmp")
    assert not list(tmp_path.glob("[!.]*/zarr.json"))
    assert import_npz(file, tmp_path / "t").num_steps == 6


def test_imports_at_once(tmp_path: Path) -> None:
    file = saved(tmp_path / "in.npz", **RECORDING.npz("heads"))

    def run(out: str) -> str:
        try:
            return import_npz(file, tmp_path / "new" / out).hash
        except TraceError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(run, ["a", "b", "c", "d"]))
        one = list(pool.map(run, ["t"] * 4))
    assert len(set(hashes)) == 1
    assert one.count(hashes[0]) == 1
    refused = [each for each in one if each != hashes[0]]
    assert all("nothing was imported" in each or "is not an empty directory" in each for each in refused)
    assert sorted(each.name for each in (tmp_path / "new").iterdir()) == ["a", "b", "c", "d", "t"]


def test_export_leaves_others_files_alone(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "scores"))
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out.npz.tmp").symlink_to("victim")
    (tmp_path / "other.npz.tmp").write_text("precious")
    for name in ("out.npz", "other.npz"):
        same(import_npz(export_npz(trace, tmp_path / name), tmp_path / f"{name}.t"), trace)
    assert (tmp_path / "out.npz.tmp").is_symlink()
    assert (tmp_path / "victim").read_text() == (tmp_path / "other.npz.tmp").read_text() == "precious"
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".")]
    (tmp_path / "link.npz").symlink_to("nowhere")
    with pytest.raises(TraceError, match=r"link\.npz: exists"):
        export_npz(trace, tmp_path / "link.npz")
    assert not (tmp_path / "nowhere").exists()


def test_an_exported_file_has_the_usual_permissions(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "scores"))
    (tmp_path / "plain").write_text("")
    assert export_npz(trace, tmp_path / "out.npz").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "directory").mkdir()
    imported = import_npz(tmp_path / "out.npz", tmp_path / "u").path
    assert imported.stat().st_mode == (tmp_path / "directory").stat().st_mode


def test_existing_output(tmp_path: Path) -> None:
    file = saved(tmp_path / "in.npz", **RECORDING.npz("scores"))
    RECORDING.write(tmp_path / "t", "heads")
    before = files_of(tmp_path)
    for out in (tmp_path / "t", file):
        with pytest.raises(TraceError, match="exists and is not an empty directory"):
            import_npz(file, out)
    assert files_of(tmp_path) == before
    (tmp_path / "empty").mkdir()
    assert import_npz(file, tmp_path / "empty").num_steps == 6


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    shape = (2, 4, 4100)
    row = np.zeros(shape, np.float32)
    row[..., 0] = 1
    with zipfile.ZipFile(tmp_path / "in.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("prompt_length.npy", member((), "<i8", (100).to_bytes(8, "little")))
        with file.open("attention.npy", "w", force_zip64=True) as stream:
            stream.write(member((400, *shape), "<f4"))
            for _ in range(400):
                stream.write(row.tobytes())
    tracemalloc.start()
    import_npz(tmp_path / "in.npz", tmp_path / "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # 52 MB of float32; a step is 131 kB and a piece of 16 steps 1 MB.
    assert peak < 4 * 2**20


def test_manifest_in_an_export_is_json(tmp_path: Path) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk"))
    export_npz(trace, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
        assert json.loads(file["manifest"].tobytes()) == trace.manifest.to_json()
