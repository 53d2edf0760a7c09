import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import kvsim_traces.remote
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


@pytest.mark.parametrize(
    "address",
    [
        "zip://a",
        "tar://a",
        "zip://a::file:///nope",
        "github://a",
        "reference://a/b",
        "dir://a/b",
        "memory://",
        "file:///nope/t",
        "file://" + "x" * 300,
        "memory://a\0b",
        "memory://\ud800",
    ],
)
def test_addresses_that_lead_nowhere(tmp_path: Path, remote: Any, address: str) -> None:
    with pytest.raises(TraceError) as caught:
        open_trace(address)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    assert not (tmp_path / "cache").exists()


def test_errors_of_many_lines_become_one(tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **options: Any) -> None:
        raise KeyError("one\ntwo" + "x" * 1000)

    for name in ("size", "cat_file", "ls", "open"):
        monkeypatch.setattr(type(remote), name, failing)
        with pytest.raises(TraceError, match=r"^memory://bucket/t: cannot be read: KeyError: ") as caught:
            open_trace("memory://bucket/t")
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400
        monkeypatch.undo()
        monkeypatch.setenv("KVSIM_CACHE", str(tmp_path / "cache"))


def test_a_listing_without_sizes(tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(remote), "ls", lambda self, path, detail: [{"name": f"{path}/c.0", "type": "file"}])
    with pytest.raises(TraceError, match=r"^memory://bucket/t: cannot be read: KeyError"):
        open_trace("memory://bucket/t")
    monkeypatch.undo()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["missing piece", "truncated piece", "missing metadata", "missing manifest", "file"])
def test_an_incomplete_copy_is_fetched_again(tmp_path: Path, remote: Any, damage: str) -> None:
    copy = open_trace("memory://bucket/t").path
    if damage == "missing piece":
        (copy / "keys" / "c.0.0.0.0").unlink()
    elif damage == "truncated piece":
        os.truncate(copy / "keys" / "c.0.0.0.0", 100)
    elif damage == "missing metadata":
        (copy / "keys" / "zarr.json").unlink()
    elif damage == "missing manifest":
        (copy / "zarr.json").unlink()
    else:
        shutil.rmtree(copy)
        copy.write_text("x")
    assert open_trace("memory://bucket/t").path == copy
    assert files_of(copy) == files_of(tmp_path / "t")
    assert os.listdir(copy.parent) == [copy.name]


def test_first_openings_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process has copied the whole trace before the first puts its copy into place."""
    monkeypatch.setenv("KVSIM_CACHE", str(tmp_path / "cache"))
    path = RECORDING.write(tmp_path / "t", "qkv")
    ready, one_by_one = threading.Barrier(4), threading.Lock()
    real = kvsim_traces.remote.replace_directory
    there = set()

    def waiting(new: Path, target: Path, *rest: Any) -> None:
        ready.wait(30)
        with one_by_one:
            real(new, target, *rest)
            there.add(target.stat().st_ino)

    monkeypatch.setattr(kvsim_traces.remote, "replace_directory", waiting)
    with ThreadPoolExecutor(4) as pool:
        traces = list(pool.map(lambda _: open_trace(f"file://{path}"), range(4)))
    assert {trace.path for trace in traces} == {traces[0].path}
    assert len(there) == 1, "a whole copy was replaced, which another process may be opening"
    assert files_of(traces[0].path) == files_of(path)
    assert os.listdir(traces[0].path.parent) == ["t"]


def test_names_longer_than_a_file_may_have(tmp_path: Path, remote: Any) -> None:
    remote.put(str(tmp_path / "t"), "/bucket/" + "x" * 300, recursive=True)
    assert open_trace("memory://bucket/" + "x" * 300).hash == open_trace(tmp_path / "t").hash


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
