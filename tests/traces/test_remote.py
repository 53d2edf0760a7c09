from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from kvsim_traces import TraceError, open_trace
from making import Recording, files_of

RECORDING = Recording(steps=6)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path / "cache"))
    system = fsspec.filesystem("memory")
    system.put(str(RECORDING.write(tmp_path / "t", "qkv")), "/bucket/t", recursive=True)
    yield system
    system.rm("/bucket", recursive=True)


def test_a_remote_trace_opens_like_a_local_one(tmp_path: Path, remote: Any) -> None:
    local = open_trace(tmp_path / "t")
    trace = open_trace("memory://bucket/t")
    assert trace.hash == local.hash
    assert trace.path.is_relative_to(tmp_path / "cache")
    assert files_of(trace.path) == files_of(tmp_path / "t")


def test_the_copy_is_used_again_until_the_trace_changes(
    tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_trace("memory://bucket/t").path
    monkeypatch.setattr("kvsim_traces.remote._copy", None)
    assert open_trace("memory://bucket/t").path == first
    monkeypatch.undo()
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path / "cache"))
    other = Recording(steps=6, seed=1).write(tmp_path / "other", "qkv", created="2030-01-01")
    remote.put(str(other) + "/", "/bucket/t/", recursive=True)
    changed = open_trace("memory://bucket/t")
    assert changed.path != first
    assert changed.hash == open_trace(other).hash


def test_what_is_not_there(tmp_path: Path, remote: Any) -> None:
    for address in ("memory://bucket/none", "nosuchscheme://bucket/t"):
        with pytest.raises(TraceError, match=f"^{address}"):
            open_trace(address)
    assert not (tmp_path / "cache").exists()


def test_sizes_are_checked(tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = type(remote).ls

    def lying(self: Any, path: str, detail: bool = True, **options: Any) -> Any:
        entries = real(self, path, detail=True, **options)
        return [{**entry, "size": entry["size"] + 1} for entry in entries]

    monkeypatch.setattr(type(remote), "ls", lying)
    with pytest.raises(TraceError, match="listed with"):
        open_trace("memory://bucket/t")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[",
        b'{"attributes": {"kvsim": {"arrays": ["../../../etc"]}}}',
        b'{"attributes": {"kvsim": {"arrays": "keys"}}}',
        b'{"attributes": {"kvsim": {"arrays": [1]}}}',
    ],
)
def test_names_are_checked_before_anything_is_copied(tmp_path: Path, remote: Any, text: bytes) -> None:
    remote.pipe("/bucket/t/zarr.json", text)
    with pytest.raises(TraceError, match=r"zarr\.json: attributes\.kvsim\.arrays"):
        open_trace("memory://bucket/t")
    assert not (tmp_path / "cache").exists()


def test_huge_metadata(tmp_path: Path, remote: Any) -> None:
    remote.pipe("/bucket/t/zarr.json", b" " * (2**24 + 1))
    with pytest.raises(TraceError, match="bytes of metadata exceed"):
        open_trace("memory://bucket/t")


def test_only_a_traces_own_files_are_copied(remote: Any) -> None:
    remote.pipe("/bucket/t/keys/extra.bin", b"x")
    remote.pipe("/bucket/t/keys/c.0.tmp", b"x")
    trace = open_trace("memory://bucket/t")
    assert not list(trace.path.rglob("extra.bin"))
    assert not list(trace.path.rglob("*.tmp"))


def test_a_truncated_piece_is_found_on_opening(remote: Any) -> None:
    data = remote.cat("/bucket/t/keys/c.0.0.0.0")
    remote.pipe("/bucket/t/keys/c.0.0.0.0", data[:-1])
    with pytest.raises(TraceError, match=r"keys/c\.0\.0\.0\.0: size"):
        open_trace("memory://bucket/t")
