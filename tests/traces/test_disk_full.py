"""A full disk is a clear error, and costs nothing that was committed."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvsim_traces import TraceError, TraceWriter, export_npz, import_npz, open_trace, repair_trace, verify_trace
from making import Recording, files_of

RECORDING = Recording(steps=40)


class Disk:
    """A disk with so many bytes left: `os.write` past them writes what fits, then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
        self.left = 10**12
        self._number = number
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: Any) -> int:
        if not self.left:
            raise OSError(self._number, os.strerror(self._number))
        done = self._write(descriptor, memoryview(data)[: self.left])
        self.left -= done
        return done


def record(path: Path, disk: Disk, left: int) -> tuple[TraceWriter, str]:
    """Record until the disk, with `left` bytes from the 20th step on, is full."""
    manifest = RECORDING.manifest("qkv")
    writers = []

    def run() -> None:
        with TraceWriter(path, manifest) as writer:
            writers.append(writer)
            writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
            for step in range(1, 41):
                if step == 20:
                    disk.left = left
                writer.append(**RECORDING.step_arguments(step, manifest.arrays))

    with pytest.raises(TraceError) as caught:
        run()
    return writers[-1], str(caught.value)


@pytest.mark.parametrize("left", [0, 1, 1000, 20_000, 40_000])
def test_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    disk = Disk(monkeypatch)
    path = tmp_path / "t"
    writer, message = record(path, disk, left)
    disk.left = 10**12
    assert writer.committed_steps >= 16
    assert message.startswith(f"{path}/")
    assert message.endswith(
        f": disk full (No space left on device); {writer.committed_steps} of 40 steps are committed"
    )
    assert not list(path.rglob("*.tmp"))
    trace = open_trace(path)
    assert trace.num_steps == writer.committed_steps
    assert not trace.manifest.complete
    for step in range(1, trace.num_steps + 1):
        np.testing.assert_array_equal(trace.queries(step), RECORDING.queries[step - 1])
    assert repair_trace(path).ok
    assert verify_trace(path).ok


def test_nothing_is_left_when_not_even_a_step_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    manifest = RECORDING.manifest("qkv")

    def run() -> None:
        with TraceWriter(tmp_path / "t", manifest) as writer:
            writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
            writer.append(**RECORDING.step_arguments(1, manifest.arrays))
            writer.commit()

    for left in range(0, 30_000, 997):
        disk.left = left
        with pytest.raises(TraceError, match="disk full"):
            run()
        assert not list(tmp_path.iterdir())


def test_a_commit_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    manifest = RECORDING.manifest("heads")
    with TraceWriter(tmp_path / "t", manifest) as writer:
        writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
        for step in range(1, 16):
            writer.append(**RECORDING.step_arguments(step, manifest.arrays))
        disk.left = 100
        with pytest.raises(TraceError, match="disk full"):
            writer.append(**RECORDING.step_arguments(16, manifest.arrays))
        with pytest.raises(TraceError, match="failed earlier"):
            writer.append(**RECORDING.step_arguments(17, manifest.arrays))
        disk.left = 10**12
        writer.commit()
        assert writer.committed_steps == 16
        for step in range(17, 41):
            writer.append(**RECORDING.step_arguments(step, manifest.arrays))
    want = RECORDING.write(tmp_path / "want", "heads", created=manifest.created)
    assert open_trace(tmp_path / "t").hash == open_trace(want).hash


def test_a_step_is_never_half_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values each need a new block of positions for the step, but the disk has room for one of them."""
    monkeypatch.setattr("kvsim_traces.layout._BLOCK_BYTES", 1)
    recording = Recording(prompt=16, steps=3)
    disk = Disk(monkeypatch)
    manifest = recording.manifest("qkv", [])
    with TraceWriter(tmp_path / "t", manifest) as writer:
        writer.write_prompt(**recording.prompt_arguments(manifest.arrays))
        disk.left = writer._layouts["keys"].file_bytes(recording.layers) + 10
        with pytest.raises(TraceError, match=r"values/.*disk full"):
            writer.append(**recording.step_arguments(1, manifest.arrays))
        disk.left = 10**12
        writer.commit()
        for step in (1, 2, 3):
            writer.append(**recording.step_arguments(step, manifest.arrays))
    want = recording.write(tmp_path / "want", "qkv", [])
    assert open_trace(tmp_path / "t").hash == open_trace(want).hash


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES])
def test_other_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk = Disk(monkeypatch, number)
    _, message = record(tmp_path / "t", disk, 100)
    full = number in (errno.EDQUOT, errno.EFBIG)
    assert ("disk full" in message) == full
    assert os.strerror(number) in message
    assert "of 40 steps are committed" in message


def test_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "in.npz", **RECORDING.npz("heads"))
    disk = Disk(monkeypatch)
    for left in (0, 100, 30_000, 60_000):
        disk.left = left
        with pytest.raises(TraceError, match="disk full"):
            import_npz(tmp_path / "in.npz", tmp_path / "new" / "t")
        assert [one.name for one in tmp_path.iterdir()] == ["in.npz"]


def test_rows_beside_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = open_trace(RECORDING.write(tmp_path / "t", "qk"))
    disk = Disk(monkeypatch)
    disk.left = 1000
    with pytest.raises(TraceError, match=r"disk full .*; no rows are stored"):
        trace.store_rows()
    assert [one.name for one in tmp_path.iterdir()] == ["t"]


def test_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    record(tmp_path / "t", disk, 0)
    before = files_of(tmp_path)
    disk.left = 0
    with pytest.raises(TraceError, match="disk full"):
        repair_trace(tmp_path / "t")
    assert files_of(tmp_path) == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() or mount is None:
        pytest.skip("mounting needs root")
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=256k", "none", str(path)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_real_full_disk(small_disk: Path) -> None:
    def run() -> None:
        with TraceWriter(small_disk / "t", RECORDING.manifest("heads", [])) as writer:
            for step in range(1, 41):
                if step == 20:
                    free = os.statvfs(small_disk)
                    (small_disk / "filler").write_bytes(b"x" * (free.f_bavail * free.f_bsize))
                writer.append(attention=RECORDING.attention[step - 1])

    with pytest.raises(TraceError, match=r"disk full \(No space left on device\); 16 of 40"):
        run()
    trace = open_trace(small_disk / "t")
    assert trace.num_steps == 16
    with pytest.raises(TraceError, match="disk full"):
        export_npz(trace, small_disk / "out.npz")
    assert not list(small_disk.rglob("*.tmp"))
    (small_disk / "filler").unlink()
    assert repair_trace(small_disk / "t").ok
    assert verify_trace(small_disk / "t").ok


@pytest.mark.parametrize("left", [0, 1000, 20_000])
def test_a_writer_that_flushes_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    disk = Disk(monkeypatch)
    manifest = RECORDING.manifest("qkv")

    def run() -> None:
        with TraceWriter(tmp_path / "t", manifest, behind=True) as writer:
            writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
            for step in range(1, 41):
                if step == 20:
                    writer.commit()
                    disk.left = left
                writer.append(**RECORDING.step_arguments(step, manifest.arrays))

    with pytest.raises(TraceError, match=r"disk full \(No space left on device\); 19 of 40 steps are committed"):
        run()
    disk.left = 10**12
    assert not list(tmp_path.rglob("*.tmp"))
    assert open_trace(tmp_path / "t").num_steps == 19
    assert repair_trace(tmp_path / "t").ok


def test_a_flush_behind_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be flushed is never committed, however often it is tried."""
    manifest = RECORDING.manifest("heads")
    flush, failing = os.fsync, []

    def fsync(descriptor: int) -> None:
        if failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    def run() -> None:
        with TraceWriter(tmp_path / "t", manifest, behind=True) as writer:
            writer.write_prompt(**RECORDING.prompt_arguments(manifest.arrays))
            for step in range(1, 41):
                if step == 11:
                    writer.commit()
                    failing.append(1)
                writer.append(**RECORDING.step_arguments(step, manifest.arrays))
                if step == 18:
                    with pytest.raises(TraceError, match="Input/output error"):
                        writer.commit()
                    failing.clear()
                    writer.commit()

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(TraceError, match=r"t/.*Input/output error; 10 of 40 steps are committed"):
        run()
    assert not list(tmp_path.rglob("*.tmp"))
    assert open_trace(tmp_path / "t").num_steps == 10
