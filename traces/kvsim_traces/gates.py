"""Adding the scores of a write gate to a trace that is there already."""

import copy
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import lock_directory, os_reason, sync_directory, write_json
from kvsim_traces.layout import METADATA_NAME, array_shape, plan
from kvsim_traces.manifest import Manifest
from kvsim_traces.paths import hidden_directory, local_path, path_kind
from kvsim_traces.pieces import PieceBuffer
from kvsim_traces.reader import Trace, open_arrays, open_trace, read_manifest
from kvsim_traces.values import check_finite, floats
from kvsim_traces.writer import group_metadata

__all__ = ["store_gates"]

_NAME = "gates"


def store_gates(path: str | Path, scores: Callable[[Trace], ArrayLike], *, name: str, digest: str) -> Trace:
    """Store a write gate's scores in a trace, in place of any others; the trace's hash stays what it is.

    The array is built beside the trace and renamed into it, and only then does the manifest list it: killed at any
    moment, the trace is readable, with the new gates, the old ones or none.

    Parameters
    ----------
    path : str or Path
        The trace's directory; the recording is complete.
    scores : callable
        Given the trace, opened without the gates that it holds now, gives [K, Hk, L0+T] numbers in [0, 1].
    name, digest : str
        The gate's name and its hash, for the manifest's field ``gate``.

    Returns
    -------
    Trace
        Opened again.

    Raises
    ------
    TraceError
        If the recording is not complete, another process writes it, the scores do not fit, or the disk fails.
    """
    directory = local_path(path)
    read_manifest(directory)
    try:
        lock = lock_directory(directory)
        try:
            _store(directory, read_manifest(directory), scores, {"name": name, "hash": digest})
        finally:
            os.close(lock)
    except OSError as error:
        raise TraceError(f"{error.filename or directory}: {os_reason(error)}; no gates are stored") from error
    return open_trace(directory)


def _store(directory: Path, manifest: Manifest, scores: Callable[[Trace], ArrayLike], gate: dict[str, str]) -> None:
    file, target = directory / METADATA_NAME, directory / _NAME
    if not manifest.complete:
        raise TraceError(f"{file}: complete: the recording was not closed; repair it first")
    if path_kind(target, follow=False) not in ("missing", "directory"):
        raise TraceError(f"{target}: is in the way and not replaced, for it is not a directory")
    bare = copy.copy(manifest)
    bare.arrays, bare.gate = [one for one in manifest.arrays if one != _NAME], None
    trace = Trace(directory, bare, open_arrays(directory, bare), verify=True)
    found = _checked(scores(trace), array_shape(_NAME, manifest, manifest.committed_steps))
    with hidden_directory(directory) as aside:
        _build(aside / _NAME, found)
        if _NAME in manifest.arrays:
            write_json(file, group_metadata(bare))
        if path_kind(target, follow=False) == "directory":
            os.rename(target, aside / "old")
        os.rename(aside / _NAME, target)
        sync_directory(directory)
        full = copy.copy(bare)
        full.arrays, full.gate = [*bare.arrays, _NAME], gate
        full.validate(str(file))
        write_json(file, group_metadata(full))


def _checked(scores: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    given = floats(_NAME, scores)
    if given.shape != shape:
        raise TraceError(f"{_NAME}: must have shape {list(shape)}, got {list(given.shape)}")
    check_finite(given, _NAME, ("layer", "KV head", "position"))
    if given.min() < 0 or given.max() > 1:
        raise TraceError(f"{_NAME}: must lie in 0..1, got {given.min():.6g}..{given.max():.6g}")
    return given.astype(np.float32)


def _build(directory: Path, gates: NDArray[np.float32]) -> None:
    layout = plan(_NAME, "float32", gates.shape)
    directory.mkdir()
    buffer = PieceBuffer(layout, directory)
    for layer in gates:
        buffer.slot()[:] = layer
        buffer.advance()
        if buffer.full:
            buffer.flush()
    buffer.flush()
    write_json(directory / METADATA_NAME, layout.metadata())
