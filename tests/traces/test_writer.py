import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvsim_traces import Manifest, TraceError, TraceWriter, open_trace
from making import Recording, files_of

SMALL = Recording(steps=5)


def started(path: Path, capture: str, **changes: Any) -> TraceWriter:
    manifest = SMALL.manifest(capture, **changes)
    writer = TraceWriter(path, manifest)
    writer.write_prompt(**SMALL.prompt_arguments(manifest.arrays))
    return writer


def test_scaled_halves_are_copied(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", SMALL.manifest("heads", [])) as writer:
        for rows in SMALL.attention:
            writer.append(attention=(rows * 32768).astype(np.float16), scaled=True)
    trace = open_trace(tmp_path / "t")
    for step in range(1, 6):
        np.testing.assert_array_equal(trace.attention_rows(step), SMALL.stored(step))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_are_rounded_once(tmp_path: Path, dtype: type) -> None:
    with TraceWriter(tmp_path / "t", SMALL.manifest("heads", [])) as writer:
        for rows in SMALL.attention:
            writer.append(attention=rows.astype(dtype))
    trace = open_trace(tmp_path / "t")
    for step, rows in enumerate(SMALL.attention, 1):
        want = (rows.astype(dtype).astype(np.float64) * 32768).astype(np.float16)
        np.testing.assert_array_equal(trace.stored_rows(step), want)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("inf"), "cannot be written as JSON"),
        ("\ud800", "cannot be written as JSON"),
        (object(), "cannot be written as JSON"),
        ("x" * 2**24, "is larger than 16777216 bytes"),
        (json.loads("[" * 70 + "]" * 70), "nested deeper than 64 levels"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(TraceError, match=rf"t/zarr\.json: metadata .*{message}"):
        TraceWriter(tmp_path / "t", SMALL.manifest("heads", [], extra={"later": value}))
    assert not list(tmp_path.iterdir())


def test_metadata_of_64_levels(tmp_path: Path) -> None:
    # The value lies three levels down: attributes, kvsim, later.
    deep: Any = 1
    for _ in range(61):
        deep = [deep]
    path = SMALL.write(tmp_path / "t", "scores", [], extra={"later": deep})
    assert open_trace(path).manifest.extra == {"later": deep}
    with pytest.raises(TraceError, match="nested deeper than 64 levels"):
        SMALL.write(tmp_path / "u", "scores", [], extra={"later": [deep]})


def test_negative_zeros_are_stored_as_zeros(tmp_path: Path) -> None:
    row = SMALL.attention[0].copy()
    row[..., 0] = -0.0
    row /= row.sum(axis=-1, keepdims=True)
    with TraceWriter(tmp_path / "t", SMALL.manifest("heads", [])) as writer:
        writer.append(attention=row)
    assert not np.signbit(open_trace(tmp_path / "t").stored_rows(1)).any()


def test_default_row_sums(tmp_path: Path) -> None:
    SMALL.write(tmp_path / "heads", "heads")
    np.testing.assert_allclose(open_trace(tmp_path / "heads").row_sums(2), SMALL.attention[1].sum(axis=-1), atol=1e-6)
    SMALL.write(tmp_path / "qk", "qk", ["row_sums"])
    np.testing.assert_array_equal(open_trace(tmp_path / "qk").row_sums(2), np.ones((3, 4), np.float32))


def test_sink_logits_allow_small_sums(tmp_path: Path) -> None:
    manifest = SMALL.manifest("heads", [], sink_logits=True)
    with TraceWriter(tmp_path / "t", manifest) as writer:
        for rows in SMALL.attention:
            writer.append(attention=rows * np.float32(0.25))
    trace = open_trace(tmp_path / "t")
    np.testing.assert_allclose(trace.row_sums(1), 0.25, atol=1e-6)
    np.testing.assert_allclose(trace.attention_rows(5).sum(axis=-1), 0.25, atol=1e-3)


def test_early_end_trims(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", SMALL.manifest("heads", [], planned_steps=400)) as writer:
        for rows in SMALL.attention:
            writer.append(attention=rows)
    trace = open_trace(tmp_path / "t")
    assert (trace.num_steps, trace.manifest.planned_steps, trace.manifest.complete) == (5, 5, True)
    np.testing.assert_array_equal(trace.attention_rows(5), SMALL.stored(5))


def test_uncommitted_steps_are_not_seen(tmp_path: Path) -> None:
    writer = started(tmp_path / "t", "qkv")
    arrays = writer.manifest.arrays
    writer.append(**SMALL.step_arguments(1, arrays))
    with pytest.raises(TraceError, match="committed_steps: is 0"):
        open_trace(tmp_path / "t")
    writer.commit()
    writer.append(**SMALL.step_arguments(2, arrays))
    assert (writer.committed_steps, writer.num_steps) == (1, 2)
    trace = open_trace(tmp_path / "t")
    assert trace.num_steps == 1
    assert not trace.manifest.complete
    np.testing.assert_array_equal(trace.keys(0), SMALL.keys[0, :, :14])
    writer.commit()
    assert open_trace(tmp_path / "t").num_steps == 2
    # The trace that was opened before is what it was.
    np.testing.assert_array_equal(trace.queries(1), SMALL.queries[0])


def test_pieces_commit_by_themselves(tmp_path: Path) -> None:
    recording = Recording(steps=40)
    manifest = recording.manifest("heads", [])
    with TraceWriter(tmp_path / "t", manifest) as writer:
        seen = []
        for step in range(1, 41):
            writer.append(**recording.step_arguments(step, manifest.arrays))
            seen.append(writer.committed_steps)
    assert seen == [0] * 15 + [16] * 16 + [32] * 9


def interrupted(path: Path, arrays: list[str], calls: list[tuple[str, dict[str, Any]]]) -> None:
    """A recording that makes these calls and is then interrupted."""
    with pytest.raises(KeyboardInterrupt), TraceWriter(path, SMALL.manifest("heads", arrays)) as writer:
        make_then_raise(writer, calls)


def make_then_raise(writer: TraceWriter, calls: list[tuple[str, dict[str, Any]]]) -> None:
    for name, arguments in calls:
        getattr(writer, name)(**arguments)
    raise KeyboardInterrupt


def test_a_commit_is_on_disk_before_it_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a power cut needs and a kill does not show: file, then name, then directory, then manifest."""
    writer = started(tmp_path / "t", "qkv")
    writer.append(**SMALL.step_arguments(1, writer.manifest.arrays))
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        events.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    writer.commit()
    monkeypatch.undo()
    root = tmp_path / "t"
    announced = events.index(("rename", str(root / "zarr.json")))
    assert events[announced - 1] == ("sync", str(root / "zarr.json.tmp"))
    assert events[announced + 1 :] == [("sync", str(root))]
    pieces = [path for kind, path in events if kind == "rename" and "/c." in path]
    assert {Path(path).parent.name for path in pieces} == {"tokens", "text", "text_ends", "queries", "keys", "values"}
    for path in pieces:
        place = events.index(("rename", path))
        assert ("sync", path + ".tmp") in events[:place]
        assert ("sync", str(Path(path).parent)) in events[place:announced]
    writer.close()


def test_places_of_steps_that_are_not_there_are_zero(tmp_path: Path) -> None:
    recording = Recording(steps=18)
    path = recording.write(tmp_path / "t", "heads", [])
    for name in ("attention", "row_sums"):
        stored = open_trace(path).stored(name)
        # Steps 17 and 18 are in a piece whose buffer held steps 1..16 before.
        last = list(stored.chunks())[-1].view(stored.layout.numpy_dtype).reshape(stored.layout.chunk)
        assert last[:2].any()
        assert not last[2:].any()


def test_exception_keeps_what_is_whole(tmp_path: Path) -> None:
    interrupted(tmp_path / "t", [], [("append", {"attention": SMALL.attention[0]})])
    trace = open_trace(tmp_path / "t")
    assert trace.num_steps == 1
    assert not trace.manifest.complete


@pytest.mark.parametrize("exists", [False, True])
def test_nothing_is_left_without_a_step(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "new" / "t"
    if exists:
        path.mkdir(parents=True)
    interrupted(path, ["tokens"], [("write_prompt", {"tokens": SMALL.tokens[:13]})])
    assert path.exists() == exists
    assert (tmp_path / "new").exists() == exists
    assert not files_of(tmp_path)


def test_closing_without_a_step(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one step"), TraceWriter(tmp_path / "t", SMALL.manifest("heads", [])):
        pass
    assert not (tmp_path / "t").exists()


def test_directory_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(TraceError, match="not an empty directory"):
            TraceWriter(path, SMALL.manifest("heads"))
    assert files_of(tmp_path) == {"file": b"x"}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    from kvsim_traces import repair_trace

    writer = started(tmp_path / "t", "heads", arrays=[])
    writer.append(attention=SMALL.attention[0])
    writer.commit()
    with pytest.raises(TraceError, match="being written by another process"):
        repair_trace(tmp_path / "t")
    writer.close()
    assert repair_trace(tmp_path / "t").ok


def test_manifest_is_copied(tmp_path: Path) -> None:
    manifest = SMALL.manifest("heads", [])
    with TraceWriter(tmp_path / "t", manifest) as writer:
        writer.append(attention=SMALL.attention[0])
        writer.manifest.notes.append("noted late")
    assert manifest.notes == []
    assert manifest.committed_steps == 0
    assert open_trace(tmp_path / "t").manifest.notes == ["noted late"]


def bad(name: str, value: Any) -> dict[str, Any]:
    return {name: value}


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.astype(np.float64)
    changed[1, 2] = value
    return changed


@pytest.mark.parametrize(
    ("capture", "change", "message"),
    [
        ("heads", bad("attention", None), "^attention: is missing"),
        ("heads", bad("scores", np.ones((3, 14))), "^scores: is superfluous"),
        ("heads", bad("row_sums", np.zeros((3, 4))), r"^row_sums of step 1: layer 0, head 0 is 0 instead of 1"),
        ("heads", bad("row_sums", np.ones((3, 3))), "^row_sums: must have shape"),
        ("heads", bad("attention", SMALL.attention[1]), r"^attention: step 1 must have shape \[3, 4, 14\]"),
        ("heads", bad("attention", np.ones((3, 4, 14), int)), "^attention: must be floating point"),
        ("heads", bad("attention", with_value(SMALL.attention[0], np.nan)), "layer 1, head 2, position 0 is NaN"),
        ("heads", bad("attention", with_value(SMALL.attention[0], -0.1)), "layer 1, head 2, position 0 is negative"),
        ("heads", bad("attention", with_value(SMALL.attention[0], 3.0)), "is infinite, or overflows float16"),
        ("heads", bad("attention", with_value(SMALL.attention[0], 0.01)), "layer 1, head 2 row sums to 0.14"),
        ("heads", {"attention": SMALL.attention[0], "scaled": True}, "^attention: scaled rows must be float16"),
        ("heads", bad("token", None), "^token: is missing"),
        ("heads", bad("token", -1), "^tokens: must lie in"),
        ("heads", bad("token", 1.5), "^tokens: must be integers"),
        ("heads", bad("text", "x"), "^text: must be bytes"),
        ("qk", bad("values", SMALL.values[:, :, 13]), "^values: is superfluous"),
        ("qkv", bad("queries", np.full((3, 4, 8), 1e6)), "^queries: value at index .* overflows"),
        ("qkv", bad("queries", SMALL.queries[0, :2]), "^queries: step 1 must have shape"),
        ("qkv", bad("keys", SMALL.keys[:, :1, 13]), r"^keys: must have shape \[3, 2, 8\]"),
        ("qkv", bad("keys", SMALL.keys[:, :, 13:15]), r"^keys: must have shape \[3, 2, 8\]"),
        ("qkv", bad("values", np.full((3, 2, 8), np.nan)), "^values: value at index .* is NaN"),
        ("scores", bad("scores", np.full((3, 14), 0.5)), "^scores of step 1: layer 0 row sums to 7"),
    ],
)
def test_bad_steps_change_nothing(tmp_path: Path, capture: str, change: dict[str, Any], message: str) -> None:
    writer = started(tmp_path / "t", capture)
    good = SMALL.step_arguments(1, writer.manifest.arrays)
    with pytest.raises(TraceError, match=message):
        writer.append(**{**good, **change})
    assert writer.num_steps == 0
    # The step is still welcome, and the rejected one has left no trace in the buffers.
    writer.append(**good)
    writer.close()
    clean = started(tmp_path / "clean", capture)
    clean.manifest.created = writer.manifest.created
    clean.append(**good)
    clean.close()
    assert files_of(tmp_path / "t") == files_of(tmp_path / "clean")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": SMALL.tokens[:5]}, r"^tokens: must be integers of shape \[13\]"),
        ({"tokens": SMALL.tokens[:13].astype(float)}, "^tokens: must be integers"),
        ({"text": SMALL.texts[:3]}, "^text: must hold 13 tokens"),
        ({"text": ["x"] * 13}, r"^text\[0\]: must be bytes"),
        ({"keys": SMALL.keys[:2]}, r"^keys: must have shape \[3, 2, 'n', 8\]"),
        ({"keys": np.zeros((3, 2, 100, 8))}, "^keys: 100 positions exceed the planned 18"),
        ({"keys": SMALL.keys.astype(int)}, "^keys: must be floating point"),
        ({"prompt_queries": np.zeros((3, 4, 14, 8))}, "^prompt_queries: must keep 1 to 13"),
        ({"prompt_mass": np.full((3, 4, 13), np.inf)}, "^prompt_mass: value at index .* is infinite"),
        ({"prompt_mass": np.zeros((3, 4, 12))}, "^prompt_mass: must have shape"),
        ({"kvzip_scores": np.zeros((3, 2, 13))}, "^kvzip_scores: is superfluous"),
    ],
)
def test_bad_prompts(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = ["tokens", "text", "text_ends", "prompt_queries", "prompt_mass"]
    with TraceWriter(tmp_path / "t", SMALL.manifest("qk", arrays)) as writer:
        with pytest.raises(TraceError, match=message):
            writer.write_prompt(**change)
        writer.write_prompt(**SMALL.prompt_arguments(writer.manifest.arrays))
        with pytest.raises(TraceError, match=r"^tokens: was given before"):
            writer.write_prompt(tokens=SMALL.tokens[:13])
        writer.append(**SMALL.step_arguments(1, writer.manifest.arrays))
        with pytest.raises(TraceError, match="before the first step"):
            writer.write_prompt(tokens=SMALL.tokens[:13])


@pytest.mark.parametrize("name", ["tokens", "keys", "prompt_mass"])
def test_prompt_must_be_there(tmp_path: Path, name: str) -> None:
    with TraceWriter(tmp_path / "t", SMALL.manifest("qk")) as writer:
        given = SMALL.prompt_arguments(writer.manifest.arrays)
        late = given.pop(name)
        writer.write_prompt(**given)
        with pytest.raises(TraceError, match=rf"^{name}: "):
            writer.append(**SMALL.step_arguments(1, writer.manifest.arrays))
        writer.write_prompt(**{name: late})
        writer.append(**SMALL.step_arguments(1, writer.manifest.arrays))


def test_vocabulary(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceError, match=r"^tokens: must lie in 0..9"),
        TraceWriter(tmp_path / "t", SMALL.manifest("heads", vocab_size=10)) as writer,
    ):
        writer.write_prompt(tokens=SMALL.tokens[:13])


def test_too_many_steps(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t", SMALL.manifest("heads", [], planned_steps=1)) as writer:
        writer.append(attention=SMALL.attention[0])
        with pytest.raises(TraceError, match=r"^append: step 2 exceeds planned_steps 1"):
            writer.append(attention=SMALL.attention[1])


def test_manifest_is_checked(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^manifest: prompt_length"):
        TraceWriter(tmp_path / "t", SMALL.manifest("heads", prompt_length=0))
    with pytest.raises(TraceError, match=r"^qk_dtype"):
        TraceWriter(tmp_path / "t", SMALL.manifest("qk"), qk_dtype="float64")
    assert not files_of(tmp_path)


def test_memory_is_a_piece(tmp_path: Path) -> None:
    manifest = Manifest("heads", 4096, 2**31 - 1, 4, 4, 4, ["attention"])
    manifest.planned_steps = 10_000
    with TraceWriter(tmp_path / "t", manifest) as writer:
        sizes = [buffer._data.nbytes for buffer in writer._buffers.values()]
        row = np.zeros((4, 4, 4097), np.float32)
        row[..., 0] = 1
        writer.append(attention=row)
    assert sum(sizes) <= 33_000_000


def test_flushing_behind_writes_the_same_trace(tmp_path: Path) -> None:
    recording = Recording(steps=40)
    manifest = recording.manifest("qkv")
    with TraceWriter(tmp_path / "behind", manifest, behind=True) as writer:
        writer.write_prompt(**recording.prompt_arguments(manifest.arrays))
        for step in range(1, 41):
            writer.append(**recording.step_arguments(step, manifest.arrays))
        assert writer.committed_steps == 0
    want = recording.write(tmp_path / "want", "qkv", created=manifest.created)
    assert files_of(tmp_path / "behind") == files_of(want)


def test_flushing_behind_commits_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(steps=40)
    manifest = recording.manifest("qk")
    now = [0.0]
    monkeypatch.setattr("kvsim_traces.writer.time.monotonic", lambda: now[0])
    with TraceWriter(tmp_path / "t", manifest, behind=True) as writer:
        writer.write_prompt(**recording.prompt_arguments(manifest.arrays))
        committed = []
        for step in range(1, 41):
            now[0] += 0.15
            writer.append(**recording.step_arguments(step, manifest.arrays))
            committed.append(writer.committed_steps)
    assert committed == [step // 7 * 7 for step in range(1, 41)]
