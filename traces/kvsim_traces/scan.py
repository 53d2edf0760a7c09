"""Going through every byte of a trace and saying what is wrong with which piece."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvsim_traces.errors import TraceError
from kvsim_traces.files import ASIDE_SUFFIX, os_reason
from kvsim_traces.layout import METADATA_NAME, POSITION_ARRAYS, PROMPT_ARRAYS, STEP_ARRAYS
from kvsim_traces.manifest import Manifest
from kvsim_traces.paths import path_kind
from kvsim_traces.reader import Trace, open_array
from kvsim_traces.stored import StoredArray

_MOST_PROBLEMS: Final = 100

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Damage:
    """Something wrong with committed data.

    Attributes
    ----------
    message : str
        Starts with the file.
    steps : int
        How many steps at the front of the trace are untouched by it; 0 if none.
    """

    message: str
    steps: int


@dataclass(frozen=True)
class Scan:
    """What a trace's directory holds.

    Attributes
    ----------
    damage : list of Damage
        What is wrong with committed data.
    leftovers : list of Path
        Files a killed writer left aside.
    surplus : list of Path
        Pieces that hold only uncommitted steps.
    orphans : list of Path
        Directories of arrays that a killed `store_gates` moved in before the manifest listed them.
    unknown : list of Path
        Anything a trace does not have.
    blocking : list of Path
        Directories that have the names of leftovers or surplus pieces.
    arrays : dict of str to StoredArray
        The arrays whose metadata is sound.
    pieces : int
        Pieces gone through.
    """

    damage: list[Damage]
    leftovers: list[Path]
    surplus: list[Path]
    orphans: list[Path]
    unknown: list[Path]
    blocking: list[Path]
    arrays: dict[str, StoredArray]
    pieces: int


def scan_trace(path: Path, manifest: Manifest, progress: Progress | None = None) -> Scan:
    """Check every file, every checksum and every row of a trace.

    Parameters
    ----------
    path : Path
        Its directory.
    manifest : Manifest
        Its manifest, at least one step committed.
    progress : callable, optional
        Called with the pieces and steps done and their number.

    Returns
    -------
    Scan
        What was found; problems do not raise.

    Raises
    ------
    TraceError
        If the directory cannot be listed.
    """
    result = Scan([], [], [], [], [], [], {}, 0)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise TraceError(f"{path}: cannot be listed: {os_reason(error)}") from error
    for name in names:
        if name == METADATA_NAME + ASIDE_SUFFIX:
            result.leftovers.append(path / name)
        elif name == "gates" and name not in manifest.arrays and path_kind(path / name, follow=False) == "directory":
            result.orphans.append(path / name)
        elif name != METADATA_NAME and name not in manifest.arrays:
            result.unknown.append(path / name)
    for name in manifest.arrays:
        try:
            stored = result.arrays[name] = open_array(path, name, manifest)
        except TraceError as error:
            result.damage.append(Damage(str(error), 0))
            continue
        listing = stored.listing
        result.leftovers.extend(stored.directory / one for one in listing.leftovers)
        result.unknown.extend(stored.directory / one for one in listing.unknown)
        result.surplus.extend(
            stored.directory / one for number, one in listing.pieces.items() if number >= stored.pieces
        )
    for found in (result.leftovers, result.surplus):
        result.blocking.extend(one for one in found if path_kind(one, follow=False) == "directory")
        found[:] = [one for one in found if one not in result.blocking]
    bad: set[tuple[str, int]] = set()
    # Rows can be read up to the first piece of steps that is missing.
    readable = manifest.committed_steps
    total = sum(len(stored.listing.pieces) for stored in result.arrays.values()) + manifest.committed_steps
    done = 0
    for name, stored in result.arrays.items():
        for number, message in _pieces(stored):
            done += 1
            if message:
                bad.add((name, number))
                if name in STEP_ARRAYS and number not in stored.listing.pieces:
                    readable = min(readable, number * stored.layout.piece_rows)
                result.damage.append(Damage(message, _untouched(result.arrays, manifest, name, number)))
            if progress is not None:
                progress(done, total)
    if len(result.arrays) == len(manifest.arrays):
        trace = Trace(path, manifest, result.arrays, verify=True)
        for damage in _contents(trace, bad, readable):
            result.damage.append(damage)
            if len(result.damage) >= _MOST_PROBLEMS:
                break
    if progress is not None:
        progress(total, total)
    return replace(result, pieces=done)


def _pieces(stored: StoredArray) -> Iterator[tuple[int, str]]:
    """Yield each piece and what is wrong with it."""
    found = [number for number in stored.listing.pieces if number < stored.pieces]
    missing = next((number for number in range(stored.pieces) if number not in stored.listing.pieces), None)
    if missing is not None:
        count = stored.pieces - len(found)
        yield missing, f"{stored.path(missing)}: is missing; {count} of {stored.pieces} pieces are"
    for number in sorted(found):
        try:
            stored.check_piece(number)
        except TraceError as error:
            yield number, str(error)
        else:
            yield number, ""


def _untouched(arrays: dict[str, StoredArray], manifest: Manifest, name: str, piece: int) -> int:
    """Return how many steps come before a piece."""
    if name in PROMPT_ARRAYS:
        return 0
    rows = piece * arrays[name].layout.piece_rows
    if name in STEP_ARRAYS:
        return rows
    if name != "text":
        return max(0, rows - manifest.prompt_length)
    try:
        ends = arrays["text_ends"].whole()
    except (KeyError, TraceError):
        return 0
    return max(0, int((ends <= rows).sum()) - manifest.prompt_length)


def _contents(trace: Trace, bad: set[tuple[str, int]], readable: int) -> Iterator[Damage]:
    """Yield what is wrong with numbers whose checksums are right."""
    per_step = [name for name in STEP_ARRAYS if trace.has(name)]
    reported: set[tuple[str, int]] = set()
    for step in range(1, readable + 1):
        where = {name: (step - 1) // trace.stored(name).layout.piece_rows for name in per_step}
        if bad.intersection(where.items()):
            continue
        for name in per_step:
            try:
                if name == "queries":
                    trace.queries(step)
                elif name == "row_sums":
                    trace.row_sums(step)
                elif ("row_sums", where.get("row_sums", 0)) not in reported:
                    trace.stored_rows(step)
            except TraceError as error:
                if (name, where[name]) not in reported:
                    reported.add((name, where[name]))
                    yield Damage(str(error), where[name] * trace.stored(name).layout.piece_rows)
    broken = {name for name, _ in bad}
    for name in POSITION_ARRAYS:
        if trace.has(name) and name not in broken:
            for layer in range(trace.num_layers):
                yield from _attempt(lambda name=name, layer=layer: getattr(trace, name)(layer))  # type: ignore[misc]
    for name in PROMPT_ARRAYS:
        if trace.has(name) and name not in broken:
            yield from _attempt(getattr(trace, name))
    if "tokens" not in broken:
        yield from _attempt(lambda: trace.tokens)
    if trace.has("text") and not broken & {"text", "text_ends"}:
        yield from _attempt(lambda: trace.token_bytes(0))


def _attempt(read: Callable[[], object]) -> Iterator[Damage]:
    try:
        read()
    except TraceError as error:
        yield Damage(str(error), 0)
