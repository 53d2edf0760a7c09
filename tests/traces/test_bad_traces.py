"""Damaged and hostile traces: each a TraceError that names file and field, with nothing changed or allocated."""

import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvsim_traces import LayerInfo, TraceError, describe, export_npz, open_trace, repair_trace, verify_trace
from kvsim_traces.layout import ArrayLayout
from kvsim_traces.pieces import crc_bytes
from making import Recording, bounded, files_of

RECORDING = Recording(steps=20)


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    return RECORDING.write(tmp_path / "t", "heads")


@pytest.fixture
def qkv(tmp_path: Path) -> Path:
    return RECORDING.write(tmp_path / "t", "qkv")


def read_all(path: Path) -> None:
    """Open a trace and read everything in it."""
    trace = open_trace(path)
    for step in range(1, trace.num_steps + 1):
        trace.score_rows(step)
        if trace.has("queries"):
            trace.queries(step)
    for name in ("keys", "values"):
        if trace.has(name):
            for layer in range(trace.num_layers):
                getattr(trace, name)(layer)
    for name in ("prompt_queries", "prompt_mass", "kvzip_scores"):
        if trace.has(name):
            getattr(trace, name)()
    trace.texts()
    _ = trace.tokens


def refused(path: Path, match: str) -> None:
    """Reading, verifying and repairing all say so, and nothing changes."""
    before = files_of(path)
    with pytest.raises(TraceError, match=match):
        read_all(path)
    report = verify_trace(path)
    assert not report.ok
    assert any(re.search(match, problem) for problem in report.problems), report.problems
    try:
        repaired = repair_trace(path)
    except TraceError:
        pass
    else:
        assert not repaired.ok
        assert not repaired.actions
    assert files_of(path) == before


def change_json(file: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def change_manifest(path: Path, **changes: Any) -> None:
    change_json(path / "zarr.json", lambda data: data["attributes"]["kvsim"].update(changes))


def change_bytes(file: Path, position: int, value: int | None = None) -> None:
    data = bytearray(file.read_bytes())
    data[position] = data[position] ^ 0x10 if value is None else value
    file.write_bytes(data)


def rewrite_chunk(file: Path, layout: ArrayLayout, chunk: int, change: Callable[[np.ndarray], None]) -> None:
    """Change a chunk's numbers and make its checksum right again."""
    data = np.frombuffer(bytearray(file.read_bytes()), np.uint8)
    slot = data[chunk * layout.slot_bytes : (chunk + 1) * layout.slot_bytes]
    change(slot[: layout.chunk_bytes].view(layout.numpy_dtype).reshape(layout.chunk))
    slot[layout.chunk_bytes :] = np.frombuffer(crc_bytes(slot[: layout.chunk_bytes]), np.uint8)
    file.write_bytes(data.tobytes())


PIECE = "attention/c.0.0.0.0"


def test_the_checks_pass_a_good_trace(heads: Path) -> None:
    read_all(heads)
    assert verify_trace(heads).ok


@pytest.mark.parametrize("cut", [1, 5, 1000])
def test_truncated_piece(heads: Path, cut: int) -> None:
    os.truncate(heads / PIECE, (heads / PIECE).stat().st_size - cut)
    refused(heads, rf"{PIECE}: size: must be \d+ bytes, got \d+; the file is truncated")


def test_empty_and_longer_piece(heads: Path) -> None:
    data = (heads / PIECE).read_bytes()
    for wrong in (b"", data + b"x", data * 2):
        (heads / PIECE).write_bytes(wrong)
        refused(heads, f"{PIECE}: size: ")


@pytest.mark.parametrize("where", ["data", "checksum", "index", "index checksum"])
def test_flipped_byte(heads: Path, where: str) -> None:
    stored = open_trace(heads).stored("attention")
    size = (heads / PIECE).stat().st_size
    position = {"data": 10, "checksum": stored.layout.chunk_bytes, "index": size - 20, "index checksum": size - 1}[
        where
    ]
    change_bytes(heads / PIECE, position)
    field = "index" if "index" in where else r"chunk 0 \(step 0..3, layer 0\)"
    refused(heads, rf"{PIECE}: {field}: checksum does not match")


@pytest.mark.parametrize("offset", [0, 8, 2**63, 10**12])
def test_forged_index(heads: Path, offset: int) -> None:
    layout = open_trace(heads).stored("attention").layout
    data = np.frombuffer(bytearray((heads / PIECE).read_bytes()), np.uint8)
    index = data[-layout.index_bytes : -4]
    index[16:24] = np.frombuffer(offset.to_bytes(8, "little"), np.uint8)
    data[-4:] = np.frombuffer(crc_bytes(index), np.uint8)
    (heads / PIECE).write_bytes(data.tobytes())
    refused(heads, f"{PIECE}: index: must list 12 chunks one after the other")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.nan, "attention of step 2: value at layer 1, head 3, position 5 is NaN"),
        (np.inf, "attention of step 2: value at layer 1, head 3, position 5 is infinite"),
        (-1.0, "attention of step 2: value at layer 1, head 3, position 5 is negative"),
        (-0.0, "attention of step 2: value at layer 1, head 3, position 5 is negative"),
        (30000.0, r"attention of step 2: layer 1, head 3 row sums to 1\.\d+ instead of 1"),
    ],
)
def test_bad_rows(heads: Path, value: float, message: str) -> None:
    layout = open_trace(heads).stored("attention").layout

    def change(chunk: np.ndarray) -> None:
        chunk[1, 0, 3, 5] = value

    rewrite_chunk(heads / PIECE, layout, 1, change)
    refused(heads, f"{PIECE}: {message}")
    with pytest.raises(TraceError, match="layer 1, head 3"):
        open_trace(heads).attention_rows(2, [2, 1])
    open_trace(heads).attention_rows(2, [2, 0])


def test_bad_scores(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "scores")
    layout = open_trace(path).stored("scores").layout

    def change(chunk: np.ndarray) -> None:
        chunk[2, 0, 3] = 30000

    rewrite_chunk(path / "scores" / "c.0.0.0", layout, 1, change)
    refused(path, "scores of step 3: layer 1 row sums to 1")


def test_bad_row_sums(heads: Path) -> None:
    layout = open_trace(heads).stored("row_sums").layout

    def change(chunk: np.ndarray) -> None:
        chunk[1, 2, 0] = np.nan

    rewrite_chunk(heads / "row_sums" / "c.0.0.0", layout, 0, change)
    refused(heads, r"row_sums/c.0.0.0: row_sums of step 2: layer 2, head 0 is nan instead of 1")


@pytest.mark.parametrize(
    ("name", "piece", "message"),
    [
        ("queries", "c.0.0.0.0", "queries of step 1: value at index .* is NaN"),
        ("keys", "c.0.0.0.0", "keys of layer 0: value at KV head 0, position 0, dim 0 is NaN"),
        ("prompt_mass", "c.0.0.0", "prompt_mass: value at index .* is NaN"),
    ],
)
def test_nan_elsewhere(qkv: Path, name: str, piece: str, message: str) -> None:
    layout = open_trace(qkv).stored(name).layout

    def change(chunk: np.ndarray) -> None:
        chunk.reshape(-1)[0] = np.nan

    rewrite_chunk(qkv / name / piece, layout, 0, change)
    refused(qkv, message)


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("tokens", 3, -1, "tokens: tokens must lie in"),
        ("text_ends", 3, 10**6, "text_ends must rise"),
        ("text_ends", 0, -1, "text_ends must rise"),
        ("text_ends", 33, 10**12, "text_ends must rise"),
    ],
)
def test_bad_tokens_and_text(heads: Path, name: str, place: int, value: int, message: str) -> None:
    trace = open_trace(RECORDING.write(heads.parent / "u", "heads"))

    def change(chunk: np.ndarray) -> None:
        chunk[min(place, trace.num_positions - 1)] = value

    rewrite_chunk(heads / name / "c.0", trace.stored(name).layout, 0, change)
    refused(heads, message)


@pytest.mark.parametrize("name", ["attention/c.0.0.0.0", "attention/c.1.0.0.0", "tokens/c.0", "prompt_mass/c.0.0.0"])
def test_missing_piece(heads: Path, name: str) -> None:
    (heads / name).unlink()
    refused(heads, f"{name}: is missing")


@pytest.mark.parametrize("name", ["attention", "tokens"])
def test_missing_array(heads: Path, name: str) -> None:
    (heads / name).rename(heads.parent / "gone")
    refused(heads, f"{name}: is missing")


def test_missing_metadata(heads: Path) -> None:
    (heads / "attention" / "zarr.json").unlink()
    refused(heads, "attention/zarr.json: is missing")


@pytest.mark.parametrize("size", [10**12, 2**31 - 1, 2**26, 10**400])
@pytest.mark.parametrize(
    "fields",
    [
        ["committed_steps", "planned_steps"],
        ["planned_steps"],
        ["prompt_length"],
        ["num_heads", "num_kv_heads"],
        ["num_layers"],
        ["head_dim"],
        ["vocab_size"],
    ],
)
def test_huge_claims(qkv: Path, fields: list[str], size: int) -> None:
    change_manifest(qkv, complete=fields != ["planned_steps"], **dict.fromkeys(fields, size))
    if fields in (["planned_steps"], ["vocab_size"]) and size < 2**31:
        # Neither a longer plan nor a larger vocabulary is a claim about what is there.
        bounded(lambda: read_all(qkv))
        return
    bounded(lambda: refused(qkv, r"zarr\.json: \w+: "))


def test_huge_claims_in_both_places(heads: Path) -> None:
    """Metadata that agree with each other, but not with the files."""
    size = 2**31 - 1
    change_manifest(heads, committed_steps=size, planned_steps=size)
    for name in ("attention", "row_sums", "tokens", "text_ends"):
        steps = size + 13 if name in ("tokens", "text_ends") else size

        def change(data: Any, steps: int = steps) -> None:
            data["shape"][0] = steps
            if len(data["shape"]) == 4:
                data["shape"][3] = size + 13
                data["chunk_grid"]["configuration"]["chunk_shape"][3] = size + 13
                data["codecs"][0]["configuration"]["chunk_shape"][3] = size + 13

        change_json(heads / name / "zarr.json", change)
    bounded(lambda: refused(heads, r"attention/c\.0\.0\.0\.0: size: must be "))


def test_huge_piece(heads: Path) -> None:
    def change(data: Any) -> None:
        data["chunk_grid"]["configuration"]["chunk_shape"][0] = 4 * 10**12

    change_json(heads / "attention" / "zarr.json", change)
    bounded(
        lambda: refused(heads, r"attention/zarr\.json: chunk_grid\.\S+: a piece of attention has at most 64 chunks")
    )


def test_a_piece_of_more_chunks_than_a_writer_makes(heads: Path) -> None:
    """A sparse file may be as large as it likes, and so would the index of its chunks be."""
    layout = ArrayLayout("tokens", "int32", (33,), (2**26,), (1,))
    (heads / "tokens" / "zarr.json").write_text(json.dumps(layout.metadata()))
    os.truncate(heads / "tokens" / "c.0", layout.file_bytes(33))
    message = r"tokens/zarr\.json: chunk_grid\.\S+: a piece of tokens has at most 64 chunks, got 67108864"

    def read() -> None:
        with pytest.raises(TraceError, match=message):
            open_trace(heads)
        assert re.search(message, verify_trace(heads).problems[0])
        assert not repair_trace(heads).ok

    bounded(read)


@pytest.mark.parametrize("size", [2**16, 2**31 - 1])
def test_nothing_stands_for_the_heads_of_scores(tmp_path: Path, size: int) -> None:
    path = RECORDING.write(tmp_path / "t", "scores", [])
    change_manifest(path, num_heads=size, num_kv_heads=size)
    if size > 2**16:
        bounded(lambda: refused(path, rf"zarr\.json: num_heads: must be an integer from 1 to 65536, got {size}"))
        return

    def read() -> None:
        read_scores = open_trace(path)
        for step in range(1, 21):
            read_scores.score_rows(step)
        assert read_scores.row_sums(1).shape == (3, size)
        assert verify_trace(path).ok
        assert repair_trace(path).ok

    tracemalloc.start()
    bounded(read)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # [K, H] of float32 would be 786 kB.
    assert peak < 500_000


@pytest.mark.parametrize(("field", "value"), [("scaling", 1e308), ("scaling", 1e-310), ("softcap", 1e-320)])
def test_factors_that_overflow(qkv: Path, field: str, value: float) -> None:
    change_json(qkv / "zarr.json", lambda data: data["attributes"]["kvsim"]["layers"][1].update({field: value}))
    refused(
        qkv,
        rf"zarr\.json: layers\[1\]\.{field}: must have a size of 1\.2e-38 to 1\.7e\+38, got {re.escape(str(value))}",
    )


def test_the_largest_factors_and_vectors_give_finite_rows(tmp_path: Path) -> None:
    recording = Recording(steps=2)
    huge = float(np.finfo(np.float32).max)
    recording.queries = np.full((2, 3, 4, 8), huge, np.float32)
    recording.keys = np.where(recording.keys > 0, huge, -huge).astype(np.float32)
    layers = [LayerInfo(scaling=2.0**127), LayerInfo(scaling=2.0**127, softcap=2.0**-126), LayerInfo(softcap=2.0**127)]
    trace = open_trace(recording.write(tmp_path / "t", "qk", [], qk_dtype="float32", layers=layers))
    assert np.isfinite(trace.attention_rows(1)).all()
    np.testing.assert_allclose(trace.attention_rows(2).sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "attention/../tokens", "attention\x00", ""])
def test_path_traversal(heads: Path, name: str) -> None:
    change_manifest(heads, arrays=["attention", name])
    refused(heads, r"zarr\.json: arrays\[1\]: must be one of ")


def test_linked_array(heads: Path, tmp_path: Path) -> None:
    (heads / "tokens").rename(tmp_path / "elsewhere")
    (heads / "tokens").symlink_to(tmp_path / "elsewhere")
    refused(heads, "tokens: is a symbolic link")


@pytest.mark.parametrize("name", [PIECE, "attention/zarr.json", "zarr.json"])
def test_linked_file(heads: Path, tmp_path: Path, name: str) -> None:
    (heads / name).rename(tmp_path / "elsewhere")
    (heads / name).symlink_to(tmp_path / "elsewhere")
    refused(heads, f"{name}: is (a symbolic link|not a regular file)")


def test_pipes_do_not_hang(heads: Path) -> None:
    for name in (PIECE, "zarr.json"):
        (heads / name).unlink()
        os.mkfifo(heads / name)
        with pytest.raises(TraceError, match=f"{name}: is not a regular file"):
            open_trace(heads)


@pytest.mark.parametrize("file", ["zarr.json", "attention/zarr.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ('{"zarr_format": 3', "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"zarr_format": NaN}', "is not valid JSON"),
        ('{"zarr_format": ' + "9" * 5000 + "}", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("\udcff", "is not valid JSON"),
        ('{"zarr_format": 1e999}', "is not valid JSON: 1e999 is beyond"),
        ('{"a": "\\ud800"}', "is not valid JSON: a string holds half a surrogate pair"),
        ('{"\\uDFFF": 1}', "is not valid JSON: a string holds half a surrogate pair"),
        ('{"a": ' * 70 + "1" + "}" * 70, "is not valid JSON: nested deeper than 64 levels"),
    ],
)
def test_broken_json(heads: Path, file: str, text: str, message: str) -> None:
    (heads / file).write_bytes(text.encode(errors="surrogateescape"))
    refused(heads, f"{file}: {message}")


def test_what_a_manifest_says_can_be_printed(heads: Path) -> None:
    """Fields of a later version are kept, and so must be JSON."""
    change_manifest(heads, later=[{"name": "\U0001f600", "size": 1e300}])
    assert json.loads(json.dumps(describe(open_trace(heads)), allow_nan=False))["manifest"]["later"][0]["size"] == 1e300
    text = (heads / "zarr.json").read_text()
    for bad, reason in (("1e999", "1e999 is beyond"), ('"\\ud83d"', "a string holds half a surrogate pair")):
        (heads / "zarr.json").write_text(text.replace("1e+300", bad))
        refused(heads, rf"zarr\.json: is not valid JSON: {reason}")


@pytest.mark.parametrize("file", ["zarr.json", "attention/zarr.json"])
def test_huge_json(heads: Path, file: str) -> None:
    with open(heads / file, "r+b") as stream:
        stream.truncate(2**40)
    message = f"{file}: metadata of {2**40} bytes is larger"
    with pytest.raises(TraceError, match=message):
        open_trace(heads)
    assert any(message in problem for problem in verify_trace(heads).problems)
    if file == "zarr.json":
        with pytest.raises(TraceError, match=message):
            repair_trace(heads)
    else:
        assert not repair_trace(heads).ok


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data.pop("attributes"), r"attributes\.kvsim: is missing"),
        (lambda data: data.update(attributes=[]), r"attributes\.kvsim: is missing"),
        (lambda data: data.update(attributes={"kvsim": 3}), "manifest: must be an object"),
        (lambda data: data.update(zarr_format=2), "zarr_format: must be 3"),
        (lambda data: data.update(node_type="array"), "node_type: must be group"),
    ],
)
def test_not_a_trace(heads: Path, change: Callable[[Any], None], field: str) -> None:
    change_json(heads / "zarr.json", change)
    refused(heads, rf"zarr\.json: {field}")


def test_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("none", "is missing"), ("file", "is not a directory")):
        with pytest.raises(TraceError, match=f"{name}: {message}"):
            open_trace(tmp_path / name)
        assert not verify_trace(tmp_path / name).ok


def sharding(data: Any) -> Any:
    return data["codecs"][0]["configuration"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda data: data.update(data_type="float32"), "data_type: attention is stored as float16"),
        (lambda data: data.update(data_type=True), "data_type"),
        (lambda data: data.pop("data_type"), "data_type"),
        (lambda data: data.update(shape=[20, 3, 4]), "shape: must be 4 integers"),
        (lambda data: data.update(shape=[20, 3, 4, True]), "shape: must be 4 integers"),
        (lambda data: data.update(shape=[20, 3, 4, -1]), "shape: must be 4 integers"),
        (lambda data: data.update(shape=[20, 3, 4, "33"]), "shape: must be 4 integers"),
        (lambda data: data.update(shape=[20, 3, 5, 33]), "shape: must be .* by the manifest"),
        (lambda data: data.update(shape=[16, 3, 4, 29]), "shape: must be .* by the manifest"),
        (lambda data: data.update(chunk_grid=None), "chunk_grid"),
        (lambda data: data.update(fill_value=1.0), "fill_value"),
        (lambda data: data.update(fill_value=False), "fill_value"),
        (lambda data: data.update(chunk_key_encoding={"name": "v2"}), "chunk_key_encoding"),
        (lambda data: data.update(storage_transformers=[{"name": "x"}]), "storage_transformers"),
        (lambda data: data.update(attributes={"scale": 1.0}), "attributes"),
        (lambda data: data.update(dimension_names=["a", "b", "c", "d"]), "dimension_names"),
        (lambda data: data.update(codecs=[]), "codecs"),
        (lambda data: data.update(codecs=[{"name": "bytes"}]), "codecs"),
        (lambda data: sharding(data)["codecs"].append({"name": "gzip", "configuration": {"level": 5}}), "codecs"),
        (lambda data: sharding(data)["codecs"].pop(), "codecs"),
        (lambda data: sharding(data).update(index_location="start"), "codecs"),
        (lambda data: sharding(data)["codecs"][0].update(configuration={"endian": "big"}), "codecs"),
        (lambda data: sharding(data).update(chunk_shape=[4, 1, 4, 32]), r"codecs\[0\]\.configuration\.chunk_shape"),
        (lambda data: sharding(data).update(chunk_shape=[0, 1, 4, 33]), r"codecs\[0\]\.configuration\.chunk_shape"),
        (lambda data: sharding(data).update(chunk_shape=[3, 1, 4, 33]), r"codecs\[0\]\.configuration\.chunk_shape"),
        (
            lambda data: data["chunk_grid"]["configuration"].update(chunk_shape=[16, 2, 4, 33]),
            r"chunk_grid\.configuration\.chunk_shape",
        ),
        (lambda data: data.update(zarr_format=True), "zarr_format"),
        (lambda data: data.update(node_type="group"), "node_type"),
    ],
)
def test_bad_array_metadata(heads: Path, change: Callable[[Any], None], field: str) -> None:
    change_json(heads / "attention" / "zarr.json", change)
    refused(heads, rf"attention/zarr\.json: {field}")


def test_wrong_dtype_of_keys(qkv: Path) -> None:
    change_json(qkv / "keys" / "zarr.json", lambda data: data.update(data_type="float32"))
    refused(qkv, r"keys/c\.0\.0\.0\.0: size: ")
    change_json(qkv / "keys" / "zarr.json", lambda data: data.update(data_type="int16"))
    refused(qkv, r"keys/zarr\.json: data_type: keys is stored as float16 or float32, got 'int16'")


def test_export_of_a_damaged_trace_leaves_nothing(heads: Path, tmp_path: Path) -> None:
    change_bytes(heads / PIECE, 10)
    with pytest.raises(TraceError, match="checksum"):
        export_npz(open_trace(heads), tmp_path / "out.npz")
    assert [one.name for one in tmp_path.iterdir()] == ["t"]
