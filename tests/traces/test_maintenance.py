import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from kvsim_traces import TraceError, TraceWriter, open_trace, repair_trace, verify_trace
from making import Recording, files_of

RECORDING = Recording(prompt=30, steps=40, layers=2)


def stopped(
    path: Path, capture: str, commit: int, more: int = 0, arrays: list[str] | None = None, **changes: Any
) -> Path:
    """A recording that a killed writer left: `commit` steps committed, `more` only flushed."""
    manifest = RECORDING.manifest(capture, planned_steps=60)
    writer = TraceWriter(path, manifest)
    writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
    for step in range(1, commit + 1):
        writer.append(**RECORDING.step_arguments(step, manifest.arrays))
    writer.commit()
    old = (path / "zarr.json").read_bytes()
    for step in range(commit + 1, commit + more + 1):
        writer.append(**RECORDING.step_arguments(step, manifest.arrays))
    if more:
        writer.commit()
        (path / "zarr.json").write_bytes(old)
    writer._release()
    return path


def agrees(path: Path, steps: int) -> None:
    """The trace holds exactly the first steps of the recording."""
    trace = open_trace(path)
    group = zarr.open_group(path, mode="r")
    assert trace.num_steps == steps
    for step in range(1, steps + 1):
        if trace.has("attention"):
            np.testing.assert_array_equal(trace.attention_rows(step), RECORDING.stored(step))
        if trace.has("queries"):
            np.testing.assert_array_equal(trace.queries(step), RECORDING.queries[step - 1])
    for name in ("keys", "values"):
        if trace.has(name):
            np.testing.assert_array_equal(group[name][...], getattr(RECORDING, name)[:, :, : 30 + steps])
    np.testing.assert_array_equal(group["tokens"][...], RECORDING.tokens[: 30 + steps])
    assert [trace.token_bytes(index) for index in range(30 + steps)] == RECORDING.texts[: 30 + steps]
    assert group["text"].shape == (sum(map(len, RECORDING.texts[: 30 + steps])),)
    for name in ("attention", "queries", "row_sums"):
        if name in group:
            assert group[name].shape[0] == steps


@pytest.mark.parametrize("more", [0, 3, 20])
@pytest.mark.parametrize("commit", [1, 16, 19])
@pytest.mark.parametrize("capture", ["heads", "qkv"])
def test_repair_finishes_a_stopped_recording(tmp_path: Path, capture: str, commit: int, more: int) -> None:
    path = stopped(tmp_path / "t", capture, commit, more)
    first = next(iter(open_trace(path).manifest.arrays))
    for name in ("zarr.json.tmp", f"{first}/zarr.json.tmp", f"{first}/c.1.0.0.0.tmp"):
        (path / name).write_text("partial")
    report = verify_trace(path)
    assert not report.ok
    assert not report.complete
    assert report.committed_steps == commit
    assert f"complete: the recording was not closed; {commit} of 60 steps are committed" in report.problems[0]
    assert sum("left over" in problem for problem in report.problems) == 3
    repaired = repair_trace(path)
    assert repaired.ok
    assert repaired.committed_steps == commit
    assert f"marked complete with {commit} steps" in repaired.actions
    assert not list(path.rglob("*.tmp"))
    after = verify_trace(path)
    assert after.ok, after.problems
    assert after.complete
    agrees(path, commit)


def test_healthy_trace_is_left_alone(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qkv")
    before = files_of(path)
    report = repair_trace(path)
    assert report.ok
    assert report.actions == []
    assert report.summary.endswith("nothing to repair; 40 steps, complete")
    assert files_of(path) == before
    assert verify_trace(path).summary.endswith("ok; 40 of 40 steps committed, complete")


def test_surplus_and_leftovers_of_a_complete_trace(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "heads")
    before = files_of(path)
    (path / "attention" / "c.9.0.0.0").write_text("late")
    (path / "tokens" / "c.0.tmp").write_text("partial")
    report = verify_trace(path)
    assert len(report.problems) == 2
    assert len(repair_trace(path).actions) == 2
    assert files_of(path) == before


def test_unknown_files_are_reported_and_kept(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "heads")
    for name in ("README.md", "attention/c.1", "attention/c.0.1.0.0", "attention/notes.tmp"):
        (path / name).write_text("mine")
    before = files_of(path)
    report = verify_trace(path)
    assert sorted(problem.split(": ")[0] for problem in report.problems) == sorted(
        str(path / name) for name in ("README.md", "attention/c.1", "attention/c.0.1.0.0", "attention/notes.tmp")
    )
    repaired = repair_trace(path)
    assert not repaired.ok
    assert not repaired.actions
    assert files_of(path) == before
    assert open_trace(path).num_steps == 40


@pytest.mark.parametrize("name", ["zarr.json.tmp", "attention/zarr.json.tmp", "tokens/c.0.tmp", "attention/c.9.0.0.0"])
@pytest.mark.parametrize("what", ["link", "dangling link", "pipe", "directory"])
@pytest.mark.parametrize("complete", [True, False])
def test_links_and_directories_in_the_way(tmp_path: Path, name: str, what: str, complete: bool) -> None:
    path = RECORDING.write(tmp_path / "t", "heads") if complete else stopped(tmp_path / "t", "heads", 19)
    (tmp_path / "victim").write_text("precious")
    if what == "directory":
        (path / name).mkdir()
        (path / name / "mine").write_text("precious")
    elif what == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).symlink_to(tmp_path / ("victim" if what == "link" else "nowhere"))
    before = files_of(path)
    report = verify_trace(path)
    (said,) = [problem for problem in report.problems if problem.startswith(f"{path / name}: ")]
    repaired = repair_trace(path)
    if what == "directory":
        blocks = f"{path / name}: is a directory where a trace has a file; move it away"
        assert said == blocks
        assert repaired.problems == [blocks, f"{path}: nothing was changed"]
        assert files_of(path) == before
    else:
        assert repaired.ok
        assert f"removed {path / name}" in repaired.actions
        assert verify_trace(path).ok
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_directory_instead_of_a_committed_piece_is_not_cut_away(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "heads")
    (path / "attention" / "c.1.0.0.0").unlink()
    (path / "attention" / "c.1.0.0.0").mkdir()
    before = files_of(path)
    report = repair_trace(path, truncate=True)
    assert report.problems[0] == (
        f"{path / 'attention' / 'c.1.0.0.0'}: is a directory where a trace has a file; move it away"
    )
    assert not report.actions
    assert files_of(path) == before


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[7] ^= 0x20
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("capture", "name", "keep"),
    [
        ("heads", "attention/c.1.0.0.0", 16),
        ("heads", "attention/c.2.0.0.0", 32),
        ("qkv", "queries/c.2.0.0.0", 32),
        ("qkv", "keys/c.0.0.4.0", 34),
    ],
)
@pytest.mark.parametrize("how", ["flip", "remove", "truncate"])
def test_truncate_keeps_what_precedes_the_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capture: str, name: str, keep: int, how: str
) -> None:
    # The smallest blocks of positions, 16 each.
    monkeypatch.setattr("kvsim_traces.layout._BLOCK_BYTES", 1)
    path = RECORDING.write(tmp_path / "t", capture)
    if how == "flip":
        flip(path / name)
    elif how == "remove":
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:-9])
    before = files_of(path)
    assert not verify_trace(path).ok
    refused = repair_trace(path)
    assert not refused.ok
    assert refused.committed_steps == 40
    assert f"nothing was changed; truncate would keep {keep} of 40 steps" in refused.problems[-1]
    assert files_of(path) == before
    cut = repair_trace(path, truncate=True)
    assert cut.ok
    assert cut.actions[0].startswith(f"cut from 40 to {keep} steps")
    assert verify_trace(path).ok
    agrees(path, keep)
    assert f"cut this trace from 40 to {keep} steps" in open_trace(path).manifest.notes[0]


@pytest.mark.parametrize("name", ["attention/c.0.0.0.0", "prompt_mass/c.0.0.0", "tokens/c.0", "text/c.0"])
def test_damage_before_the_first_step_cannot_be_cut(tmp_path: Path, name: str) -> None:
    path = RECORDING.write(tmp_path / "t", "heads")
    flip(path / name)
    before = files_of(path)
    report = repair_trace(path, truncate=True)
    assert not report.ok
    assert "no step precedes the damage" in report.problems[-1]
    assert files_of(path) == before


def test_nothing_committed(tmp_path: Path) -> None:
    path = stopped(tmp_path / "t", "heads", 0)
    for problems in (verify_trace(path).problems, repair_trace(path).problems):
        assert "committed_steps: is 0" in problems[0]


def test_all_damage_is_reported(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "qkv")
    names = ["queries/c.0.0.0.0", "queries/c.2.0.0.0", "values/c.0.0.0.0", "tokens/c.0"]
    for name in names:
        flip(path / name)
    problems = verify_trace(path).problems
    assert [any(f"{name}: " in problem for problem in problems) for name in names] == [True] * 4
    assert len(problems) == 4


def test_a_killed_close_is_readable_and_repaired(tmp_path: Path) -> None:
    """Shapes are trimmed array by array; any mixture of trimmed and planned ones is a trace."""
    path = stopped(tmp_path / "t", "heads", 19)
    done = stopped(tmp_path / "done", "heads", 19)
    repair_trace(done)
    for name in ("attention", "tokens"):
        (path / name / "zarr.json").write_bytes((done / name / "zarr.json").read_bytes())
        agrees_before = open_trace(path)
        assert agrees_before.num_steps == 19
    assert repair_trace(path).ok
    agrees(path, 19)


def test_repair_can_be_killed_while_it_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvsim_traces.maintenance as maintenance

    real = maintenance.write_json
    for stop in range(1, 12):
        path = RECORDING.write(tmp_path / f"t{stop}", "heads")
        flip(path / "attention" / "c.1.0.0.0")
        calls = []

        def failing(file: Path, value: dict[str, Any], calls: list[Path] = calls, stop: int = stop) -> None:
            calls.append(file)
            if len(calls) == stop:
                raise KeyboardInterrupt
            real(file, value)

        monkeypatch.setattr(maintenance, "write_json", failing)
        try:
            repair_trace(path, truncate=True)
        except KeyboardInterrupt:
            pass
        else:
            assert stop > 5
        monkeypatch.undo()
        assert repair_trace(path, truncate=True).ok
        assert verify_trace(path).ok
        agrees(path, 16)


def test_progress_and_errors(tmp_path: Path) -> None:
    path = RECORDING.write(tmp_path / "t", "heads")
    seen: list[tuple[int, int]] = []
    verify_trace(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    with pytest.raises(TraceError, match="is missing"):
        repair_trace(tmp_path / "none")
