"""Verifying a trace, and finishing or mending one that a killed writer or a bad disk left behind."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvsim_traces.errors import TraceError
from kvsim_traces.files import lock_directory, os_reason, sync_directory, write_json
from kvsim_traces.layout import METADATA_NAME, array_shape
from kvsim_traces.manifest import Manifest
from kvsim_traces.paths import local_path, path_kind
from kvsim_traces.reader import Trace, read_manifest
from kvsim_traces.scan import Progress, Scan, scan_trace
from kvsim_traces.writer import group_metadata

_BLOCKS: Final = "is a directory where a trace has a file; move it away"


@dataclass(frozen=True)
class VerifyReport:
    """What `verify_trace` found.

    Attributes
    ----------
    path : Path
        The trace.
    problems : list of str
        What is wrong, each starting with the file; empty for a sound, complete trace.
    complete : bool
        Whether the manifest says that the recording was closed.
    committed_steps, planned_steps : int
        As the manifest says; 0 if it cannot be read.
    pieces : int
        Pieces whose every checksum was checked.
    actions : list of str
        Always empty: verifying changes nothing.
    """

    path: Path
    problems: list[str]
    complete: bool = False
    committed_steps: int = 0
    planned_steps: int = 0
    pieces: int = 0
    actions: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    @property
    def summary(self) -> str:
        """One line for people."""
        state = "complete" if self.complete else "incomplete"
        steps = f"{self.committed_steps} of {self.planned_steps} steps committed, {state}"
        return f"{self.path}: {'ok' if self.ok else f'{len(self.problems)} problems'}; {steps}"


@dataclass(frozen=True)
class RepairReport:
    """What `repair_trace` did.

    Attributes
    ----------
    path : Path
        The trace.
    actions : list of str
        What was changed; empty if nothing was.
    problems : list of str
        What is still wrong.
    committed_steps : int
        Steps the trace has now.
    """

    path: Path
    actions: list[str]
    problems: list[str]
    committed_steps: int

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong any more."""
        return not self.problems

    @property
    def summary(self) -> str:
        """One line for people."""
        if self.problems:
            return f"{self.path}: {len(self.problems)} problems remain; {len(self.actions)} actions"
        if not self.actions:
            return f"{self.path}: nothing to repair; {self.committed_steps} steps, complete"
        return f"{self.path}: repaired; {self.committed_steps} steps, complete"


def verify_trace(path: str | Path, *, progress: Progress | None = None) -> VerifyReport:
    """Check every file, checksum and row of a trace, and the rows stored beside it; nothing is changed.

    Parameters
    ----------
    path : str or Path
        The trace's directory.
    progress : callable, optional
        Called with the units done and their number.

    Returns
    -------
    VerifyReport
        Also for a trace whose manifest cannot be read.
    """
    directory = Path(path)
    try:
        directory = local_path(path)
        manifest = read_manifest(directory)
    except TraceError as error:
        return VerifyReport(directory, [str(error)])
    problems = []
    file = directory / METADATA_NAME
    steps = f"{manifest.committed_steps} of {manifest.planned_steps} steps are committed"
    pieces = 0
    if not manifest.committed_steps:
        problems.append(f"{file}: committed_steps: is 0; the recording stopped before its first commit")
    else:
        if not manifest.complete:
            problems.append(f"{file}: complete: the recording was not closed; {steps}; repair finishes it")
        try:
            found = scan_trace(directory, manifest, progress)
        except TraceError as error:
            return VerifyReport(directory, [*problems, str(error)])
        problems += [damage.message for damage in found.damage]
        left = [*found.leftovers, *found.orphans]
        problems += [f"{one}: is left over from an interrupted write; repair removes it" for one in left]
        problems += [f"{one}: holds only uncommitted steps; repair removes it" for one in found.surplus]
        problems += [f"{one}: is not part of a trace" for one in found.unknown]
        problems += [f"{one}: {_BLOCKS}" for one in found.blocking]
        if not found.damage:
            try:
                Trace(directory, manifest, found.arrays, verify=True).check_side_rows()
            except TraceError as error:
                problems.append(f"{error}; reading the trace ignores it, delete it or move it away")
        pieces = found.pieces
    return VerifyReport(
        directory, problems, manifest.complete, manifest.committed_steps, manifest.planned_steps, pieces
    )


def repair_trace(path: str | Path, *, truncate: bool = False, progress: Progress | None = None) -> RepairReport:
    """Finish a trace that was not closed, and remove what a killed writer left beside it.

    Committed steps are dropped only with `truncate`, and then back to the last step before the first damaged piece. A
    trace with damage is not touched without it.

    Parameters
    ----------
    path : str or Path
        The trace's directory.
    truncate : bool
        Whether to cut a damaged trace.
    progress : callable, optional
        Called with the units done and their number.

    Returns
    -------
    RepairReport
        No actions for a sound, complete trace.

    Raises
    ------
    TraceError
        If the manifest cannot be read, another process writes the trace, or the disk fails.
    """
    directory = local_path(path)
    manifest = read_manifest(directory)
    file = directory / METADATA_NAME
    if not manifest.committed_steps:
        problem = f"{file}: committed_steps: is 0; there is nothing to keep, delete the directory"
        return RepairReport(directory, [], [problem], 0)
    try:
        lock = lock_directory(directory)
        try:
            # Read again: a writer may have finished before the lock was ours.
            manifest = read_manifest(directory)
            found = scan_trace(directory, manifest, progress)
            return _repair(directory, manifest, found, truncate)
        finally:
            os.close(lock)
    except OSError as error:
        raise TraceError(f"{error.filename or directory}: {os_reason(error)}; repair stopped") from error


def _repair(directory: Path, manifest: Manifest, found: Scan, truncate: bool) -> RepairReport:
    committed = manifest.committed_steps
    keep = min([committed, *(damage.steps for damage in found.damage)])
    problems = [damage.message for damage in found.damage]
    if problems and not (truncate and keep):
        can = f"truncate would keep {keep} of {committed} steps" if keep else "no step precedes the damage"
        return RepairReport(directory, [], [*problems, f"{directory}: nothing was changed; {can}"], committed)
    unknown = [f"{one}: is not part of a trace; repair leaves it alone" for one in found.unknown]
    shapes = _shapes(found, manifest, keep)
    cut = keep < committed or not manifest.complete
    surplus = _surplus(found, shapes) if cut else found.surplus
    blocking = [*found.blocking, *(one for one in surplus if path_kind(one, follow=False) == "directory")]
    if blocking:
        blocks = [f"{one}: {_BLOCKS}" for one in sorted(set(blocking))]
        return RepairReport(directory, [], [*blocks, f"{directory}: nothing was changed"], committed)
    # First, as what was left aside lies where the metadata are written: it may be a link or a pipe.
    actions = _remove(found.leftovers)
    notes = list(manifest.notes)
    if keep < committed:
        actions.append(f"cut from {committed} to {keep} steps, before the first damaged piece ({problems[0]})")
        notes.append(f"repair cut this trace from {committed} to {keep} steps: {len(problems)} damaged pieces")
    elif not manifest.complete:
        notes.append(f"repair finished this trace after {committed} of {manifest.planned_steps} planned steps")
    if cut:
        actions += _finish(directory, manifest, found, shapes, keep, notes)
    actions += _remove(surplus)
    for one in found.orphans:
        shutil.rmtree(one)
        actions.append(f"removed {one}")
    return RepairReport(directory, actions, unknown, keep)


def _remove(files: list[Path]) -> list[str]:
    for one in files:
        one.unlink(missing_ok=True)
    for parent in sorted({one.parent for one in files}):
        sync_directory(parent)
    return [f"removed {one}" for one in files]


def _shapes(found: Scan, manifest: Manifest, keep: int) -> dict[str, tuple[int, ...]]:
    """Return each array's shape for `keep` steps."""
    shapes = {}
    for name, stored in found.arrays.items():
        free = stored.layout.shape[2] if name == "prompt_queries" else 0
        if name == "text":
            free = int(found.arrays["text_ends"].front(manifest.prompt_length + keep)[-1])
        shapes[name] = array_shape(name, manifest, keep, free)
    return shapes


def _finish(
    directory: Path, manifest: Manifest, found: Scan, shapes: dict[str, tuple[int, ...]], keep: int, notes: list[str]
) -> list[str]:
    """Trim the shapes to `keep` steps and mark the trace complete; safe to be killed anywhere in between."""
    actions = []
    file = directory / METADATA_NAME
    if keep < manifest.committed_steps:
        manifest.committed_steps, manifest.complete = keep, False
        write_json(file, group_metadata(manifest))
    for name, stored in found.arrays.items():
        resized = stored.layout.resized(shapes[name])
        if resized != stored.layout:
            write_json(directory / name / METADATA_NAME, resized.metadata())
            actions.append(f"trimmed {name} from {list(stored.layout.shape)} to {list(resized.shape)}")
    manifest.notes = notes
    manifest.planned_steps, manifest.complete = keep, True
    manifest.validate(str(file))
    write_json(file, group_metadata(manifest))
    actions.append(f"marked complete with {keep} steps")
    return actions


def _surplus(found: Scan, shapes: dict[str, tuple[int, ...]]) -> list[Path]:
    """Return the pieces that hold nothing of what is kept."""
    surplus = []
    for name, stored in found.arrays.items():
        pieces = stored.layout.pieces(stored.layout.resized(shapes[name]).length)
        surplus += [stored.path(number) for number in stored.listing.pieces if number >= pieces]
    return sorted(surplus)
