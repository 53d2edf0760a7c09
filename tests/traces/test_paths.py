"""Paths that cannot be used are errors of one line, whatever they are given to."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvsim_traces import (
    TraceError,
    TraceWriter,
    describe,
    export_npz,
    import_npz,
    open_trace,
    repair_trace,
    verify_trace,
)
from kvsim_traces.bench import bench_trace
from kvsim_traces.paths import check_new_directory, hidden_directory
from making import Recording

RECORDING = Recording(steps=2)


def verified(path: Path) -> None:
    report = verify_trace(path)
    assert not report.ok
    raise TraceError(*report.problems)


USES: dict[str, Callable[[Path, Path], Any]] = {
    "open": lambda path, trace: open_trace(path),
    "verify": lambda path, trace: verified(path),
    "repair": lambda path, trace: repair_trace(path),
    "import": lambda path, trace: import_npz(path, trace.with_name("out")),
    "import out": lambda path, trace: import_npz(trace.with_name("in.npz"), path),
    "export": lambda path, trace: export_npz(open_trace(trace), path),
    "write": lambda path, trace: TraceWriter(path, RECORDING.manifest("scores", [])),
    "bench": lambda path, trace: bench_trace(path),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    np.savez(tmp_path / "in.npz", **RECORDING.npz("scores"))
    return RECORDING.write(tmp_path / "t", "scores", [])


def one_line(use: str, path: Path, trace: Path) -> str:
    before = sorted(os.listdir(trace.parent))
    with pytest.raises(TraceError) as caught:
        USES[use](path, trace)
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(trace.parent)) == before
    return str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_unusable_paths(trace: Path, tmp_path: Path, use: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in ("x" * 300, "x" * 300 + "/y", "loop/y", "in.npz/y", "\ud800", "a\0b"):
        message = one_line(use, tmp_path / path, trace)
        if path.startswith("x"):
            assert "File name too long" in message
        if path.startswith("loop"):
            assert "Too many levels of symbolic links" in message


@pytest.mark.parametrize("use", USES)
def test_directories_that_must_not_be_searched(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    real = {name: getattr(os, name) for name in ("stat", "mkdir", "open", "lstat")}

    def guarded(name: str) -> Callable[..., Any]:
        def function(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and os.fspath(path).startswith(f"{tmp_path}/secret"):
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return real[name](path, *args, **options)

        return function

    for name in real:
        monkeypatch.setattr(os, name, guarded(name))
    assert "Permission denied" in one_line(use, tmp_path / "secret" / "x", trace)


@pytest.mark.parametrize("where", ["t", "t/scores"])
def test_directories_that_must_not_be_listed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if Path(path) == tmp_path / where:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    message = f"{tmp_path / where}: cannot be (listed|read): Permission denied"
    assert re.match(message, verify_trace(trace).problems[0])
    if where == "t":
        with pytest.raises(TraceError, match=message):
            repair_trace(trace)
        with pytest.raises(TraceError, match=message):
            TraceWriter(trace, RECORDING.manifest("scores", []))
    else:
        with pytest.raises(TraceError, match=message):
            open_trace(trace)
        assert re.match(message, repair_trace(trace).problems[0])


def test_a_file_that_goes_while_its_trace_is_described(trace: Path) -> None:
    opened = open_trace(trace)
    (trace / "scores" / "c.0.0.0").unlink()
    with pytest.raises(TraceError, match=r"scores/c\.0\.0\.0: (No such file|is missing)"):
        describe(opened)


def test_a_working_directory_that_is_gone(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(TraceError, match="t: cannot be found: the working directory"):
        open_trace("t")


def test_the_longest_names_work(trace: Path, tmp_path: Path) -> None:
    name = "\N{SNOWMAN}" * 85
    assert import_npz(tmp_path / "in.npz", tmp_path / name).num_steps == 2
    export_npz(open_trace(trace), tmp_path / ("x" * 255))
    open_trace(RECORDING.write(tmp_path / ("y" * 250), "qk", [])).store_rows()
    assert not [one for one in os.listdir(tmp_path) if one.startswith(".")]


def test_hidden_directories_are_unique_and_removed(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "t"
    with hidden_directory(target, parents=True) as one, hidden_directory(target, parents=True) as other:
        assert one != other
        assert one.parent == other.parent == target.parent
        assert not list(target.parent.glob("[!.]*"))
    assert not list(tmp_path.iterdir())
    with hidden_directory(target, parents=True):
        target.mkdir()
    assert os.listdir(target.parent) == ["t"]


def test_new_directories(tmp_path: Path) -> None:
    assert not check_new_directory(tmp_path / "none")
    assert check_new_directory(tmp_path)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(TraceError, match="exists and is not an empty directory; so"):
            check_new_directory(path, "; so")
