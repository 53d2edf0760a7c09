"""Attention rows from queries and keys, and the rows kept beside a trace."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import os_reason, read_json, write_json
from kvsim_traces.layout import METADATA_NAME, ArrayLayout, array_shape, plan
from kvsim_traces.manifest import LayerInfo, Manifest
from kvsim_traces.paths import hidden_directory, path_kind, replace_directory
from kvsim_traces.pieces import PieceBuffer
from kvsim_traces.stored import StoredArray, check_directory
from kvsim_traces.values import check_floats

_ATTRIBUTE: Final = "kvsim_rows"
_RECOMPUTED: Final = 8
"""Steps of stored rows that verifying computes again."""


def attention_row(queries: NDArray[Any], keys: NDArray[Any], layer: LayerInfo) -> NDArray[np.float32]:
    """Compute one step's attention row from its query and the keys (softmax of scaled dot products).

    Parameters
    ----------
    queries : ndarray of float, shape [H, d]
        Post-RoPE queries of one step and layer.
    keys : ndarray of float64, shape [Hk, n, d]
        Post-RoPE keys of the positions up to and including the step's own; head h reads KV head ``h // (H / Hk)``.
    layer : LayerInfo
        Scaling, softcap and window of the layer. A sliding layer's row is 0 for positions up to ``p_t - window``, a
        chunked layer's before the chunk of p_t.

    Returns
    -------
    ndarray of float32, shape [H, n]
        The softmax computed in float64, rounded once.
    """
    heads, dim = queries.shape
    kv_heads, length = keys.shape[:2]
    window = layer.sliding_window
    first = 0
    if layer.type == "sliding_attention" and window is not None:
        first = max(0, length - window)
    elif layer.type == "chunked_attention" and window is not None:
        first = (length - 1) // window * window
    grouped = queries.astype(np.float64).reshape(kv_heads, heads // kv_heads, dim)
    logits = grouped @ keys[:, first:].transpose(0, 2, 1)
    logits *= 1 / math.sqrt(dim) if layer.scaling is None else layer.scaling
    if layer.softcap is not None:
        logits = layer.softcap * np.tanh(logits / layer.softcap)
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    row = np.zeros((heads, length), np.float32)
    row[:, first:] = logits.reshape(heads, length - first)
    return row


def rows_path(trace: Path) -> Path:
    """Return where a trace's computed rows lie: ``<name>.rows`` beside it."""
    return trace.with_name(trace.name + ".rows")


def _rows_layout(manifest: Manifest) -> ArrayLayout:
    return plan("attention", "float32", array_shape("attention", manifest, manifest.committed_steps))


def open_rows(trace: Path, manifest: Manifest, source: str, *, verify: bool) -> StoredArray | None:
    """Open the rows stored beside a trace, if they were computed from this very trace.

    Parameters
    ----------
    trace : Path
        The trace's directory.
    manifest : Manifest
        Its manifest.
    source : str
        Its hash.
    verify : bool
        Whether to check checksums.

    Returns
    -------
    StoredArray or None
        float32 rows, shape [T, K, H, L0+T]; None if there are none, or they belong to another trace.

    Raises
    ------
    TraceError
        If what is there is not rows of this trace, or damaged. The trace can do without.
    """
    path = rows_path(trace)
    if path_kind(path, follow=False) == "missing" or _source(path) != source:
        return None
    layout = _rows_layout(manifest)
    check_directory(path / layout.name)
    file = path / layout.name / METADATA_NAME
    if read_json(file) != layout.metadata():
        raise TraceError(f"{file}: is not what this version writes for this trace")
    return StoredArray(layout, path / layout.name, manifest.committed_steps, verify=verify).check_files()


def _source(path: Path) -> str:
    """Return the hash of the trace that rows were computed from."""
    check_directory(path)
    file = path / METADATA_NAME
    attributes = read_json(file).get("attributes")
    marker = attributes.get(_ATTRIBUTE) if isinstance(attributes, dict) else None
    if not isinstance(marker, dict) or not isinstance(marker.get("source"), str):
        raise TraceError(f"{file}: attributes.{_ATTRIBUTE}.source: is missing; these are not rows that kvsim stored")
    return str(marker["source"])


def side_row(
    stored: StoredArray, step: int, layers: list[int] | None, length: int, sums: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return a step's stored rows, checked like any rows.

    Parameters
    ----------
    stored : StoredArray
        From `open_rows`.
    step : int
        t, from 1.
    layers : list of int or None
        Which layers; all if None.
    length : int
        L0 + t.
    sums : ndarray of float32, shape [K, H]
        What the rows should sum to.

    Raises
    ------
    TraceError
        If they are damaged, not finite, negative or do not sum to `sums`.
    """
    rows: NDArray[np.float32] = stored.row(step - 1, layers)[..., :length].astype(np.float32)
    where = f"{stored.path((step - 1) // stored.layout.piece_rows)}: attention of step {step}"
    check_floats(rows, sums if layers is None else sums[layers], where, layers)
    return rows


def check_side_rows(
    stored: StoredArray,
    lengths: Sequence[int],
    sums: Callable[[int], NDArray[np.float32]],
    computed: Callable[[int], NDArray[np.float32]],
) -> None:
    """Check all rows stored beside a trace, some of them by computing them again.

    Parameters
    ----------
    stored : StoredArray
        From `open_rows`.
    lengths : sequence of int
        L0 + t of every step.
    sums, computed : callable
        Give step t's row sums, and its rows from queries and keys.

    Raises
    ------
    TraceError
        Naming the first thing that is wrong.
    """
    steps = len(lengths)
    again = {1 + place * (steps - 1) // (_RECOMPUTED - 1) for place in range(_RECOMPUTED)}
    for piece in range(stored.pieces):
        stored.check_piece(piece)
    for step, length in enumerate(lengths, 1):
        rows = side_row(stored, step, None, length, sums(step))
        # Another library's exponential may round the last bit the other way.
        if step in again and not np.allclose(rows, computed(step), rtol=1e-4, atol=1e-5):
            where = stored.path((step - 1) // stored.layout.piece_rows)
            raise TraceError(f"{where}: attention of step {step}: differs from what queries and keys give")


def write_rows(
    trace: Path,
    manifest: Manifest,
    source: str,
    row: Callable[[int], NDArray[np.float32]],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Store computed rows beside a trace: built in a hidden directory, then renamed.

    Parameters
    ----------
    trace : Path
        The trace's directory.
    manifest : Manifest
        Its manifest.
    source : str
        Its hash, stored with the rows.
    row : callable
        Gives step t's rows, t from 1; float32, shape [K, H, L0 + t].
    progress : callable, optional
        Called with the steps done and their number.

    Returns
    -------
    Path
        The directory, a Zarr group with the array ``attention`` [T, K, H, L0+T] of float32.

    Raises
    ------
    TraceError
        If something else than stored rows is there, or they cannot be written; nothing is left then.
    """
    target = rows_path(trace)
    if path_kind(target, follow=False) != "missing":
        _replaceable(target)
    try:
        with hidden_directory(target) as aside:
            new = aside / "new"
            _build(new, manifest, source, row, progress)
            replace_directory(new, target, aside, _replaceable)
    except OSError as error:
        raise TraceError(f"{error.filename or target}: {os_reason(error)}; no rows are stored") from error
    return target


def _build(
    new: Path,
    manifest: Manifest,
    source: str,
    row: Callable[[int], NDArray[np.float32]],
    progress: Callable[[int, int], None] | None,
) -> None:
    layout = _rows_layout(manifest)
    steps = manifest.committed_steps
    (new / layout.name).mkdir(parents=True)
    buffer = PieceBuffer(layout, new / layout.name)
    for step in range(1, steps + 1):
        rows = row(step)
        slot = buffer.slot()
        slot[..., : rows.shape[-1]] = rows
        buffer.advance()
        if buffer.full or step == steps:
            buffer.flush()
        if progress is not None:
            progress(step, steps)
    write_json(new / layout.name / METADATA_NAME, layout.metadata())
    group = {"zarr_format": 3, "node_type": "group", "attributes": {_ATTRIBUTE: {"source": source}}}
    write_json(new / METADATA_NAME, group)


def _replaceable(path: Path) -> bool:
    """Return that rows may replace what lies at a path, or say why not."""
    try:
        _source(path)
    except TraceError as error:
        raise TraceError(f"{path}: is in the way and not replaced, for kvsim did not make it ({error})") from None
    return True
