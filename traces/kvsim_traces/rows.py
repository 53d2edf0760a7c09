"""Attention rows from queries and keys, and the rows kept beside a trace."""

import contextlib
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import os_reason, read_json, sync_directory, write_json
from kvsim_traces.layout import METADATA_NAME, ArrayLayout, array_shape, plan
from kvsim_traces.manifest import LayerInfo, Manifest
from kvsim_traces.pieces import PieceBuffer
from kvsim_traces.stored import StoredArray

_ATTRIBUTE: Final = "kvsim_rows"


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
        If rows of this trace are there, but damaged.
    """
    path = rows_path(trace)
    if not path.is_dir():
        return None
    attributes = read_json(path / METADATA_NAME).get("attributes")
    if not isinstance(attributes, dict) or attributes.get(_ATTRIBUTE) != {"source": source}:
        return None
    layout = _rows_layout(manifest)
    if read_json(path / layout.name / METADATA_NAME) != layout.metadata():
        return None
    return StoredArray(layout, path / layout.name, manifest.committed_steps, verify=verify).check_files()


def write_rows(
    trace: Path,
    manifest: Manifest,
    source: str,
    row: Callable[[int], NDArray[np.float32]],
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Store computed rows beside a trace: built aside, then renamed.

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
        If it cannot be written; nothing is left then.
    """
    target = rows_path(trace)
    aside = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    layout = _rows_layout(manifest)
    steps = manifest.committed_steps
    try:
        shutil.rmtree(aside, ignore_errors=True)
        (aside / layout.name).mkdir(parents=True)
        buffer = PieceBuffer(layout, aside / layout.name)
        for step in range(1, steps + 1):
            rows = row(step)
            slot = buffer.slot()
            slot[..., : rows.shape[-1]] = rows
            buffer.advance()
            if buffer.full or step == steps:
                buffer.flush()
            if progress is not None:
                progress(step, steps)
        write_json(aside / layout.name / METADATA_NAME, layout.metadata())
        group = {"zarr_format": 3, "node_type": "group", "attributes": {_ATTRIBUTE: {"source": source}}}
        write_json(aside / METADATA_NAME, group)
        _replace(aside, target)
    except OSError as error:
        raise TraceError(f"{error.filename or target}: {os_reason(error)}; no rows are stored") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _replace(new: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.{os.getpid()}.old.tmp")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    os.rename(new, target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)
