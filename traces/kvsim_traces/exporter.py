"""Writing a trace's arrays into an .npz file, which NumPy and `import_npz` read."""

import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvsim_traces.errors import TraceError
from kvsim_traces.files import os_reason, sync_directory
from kvsim_traces.importer import MANIFEST_NAME
from kvsim_traces.layout import POSITION_ARRAYS
from kvsim_traces.paths import hidden_directory, local_path, path_kind
from kvsim_traces.reader import Trace

# The oldest date a zip archive can hold: equal traces give equal files.
_DATE: Final = (1980, 1, 1, 0, 0, 0)


def export_npz(trace: Trace, file: str | Path, *, progress: Callable[[int, int], None] | None = None) -> Path:
    """Write a trace's arrays into an uncompressed .npz file, step by step.

    Parameters
    ----------
    trace : Trace
        The trace.
    file : str or Path
        The file to create. It gets ``prompt_length``, ``num_heads``, ``num_kv_heads``, the ``manifest`` as JSON bytes,
        and every array of the trace under its own name: ``attention`` and ``scores`` as float32 probabilities, zero
        beyond a step's position, the rest as stored.
    progress : callable, optional
        Called with the arrays done and their number.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    TraceError
        If the file exists, the trace is damaged or the disk fails. No file is left then.
    """
    target = local_path(file)
    if path_kind(target, follow=False) != "missing":
        raise TraceError(f"{target}: exists")
    manifest = trace.manifest
    numbers = ("prompt_length", "num_heads", "num_kv_heads")
    try:
        with hidden_directory(target) as aside:
            with open(aside / "npz", "xb") as stream:
                with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                    for name in numbers:
                        number = np.array(getattr(manifest, name), np.int64)
                        _write(archive, name, number.dtype, (), iter([number]))
                    text = np.frombuffer(json.dumps(manifest.to_json()).encode(), np.uint8)
                    _write(archive, MANIFEST_NAME, text.dtype, text.shape, iter([text]))
                    for done, name in enumerate(manifest.arrays, 1):
                        _write(archive, name, *_array(trace, name))
                        if progress is not None:
                            progress(done, len(manifest.arrays))
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(aside / "npz", target)
            sync_directory(target.parent)
    except OSError as error:
        raise TraceError(f"{error.filename or target}: {os_reason(error)}; nothing was exported") from error
    return target


def _write(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], parts: Iterator[NDArray[Any]]
) -> None:
    info = zipfile.ZipInfo(f"{name}.npy", _DATE)
    with archive.open(info, "w", force_zip64=True) as stream:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(stream, header)
        for part in parts:
            stream.write(np.ascontiguousarray(part, dtype).tobytes())


def _array(trace: Trace, name: str) -> tuple[np.dtype[Any], tuple[int, ...], Iterator[NDArray[Any]]]:
    """Return an array's type, shape and parts along axis 0."""
    stored = trace.stored(name)
    shape = stored.layout.shape
    steps, positions = trace.num_steps, trace.num_positions
    if name in ("attention", "scores"):
        return np.dtype("<f4"), (steps, *shape[1:-1], positions), _rows(trace, name)
    dtype = stored.layout.numpy_dtype
    if name in ("row_sums", "queries"):
        return dtype, (steps, *shape[1:]), (stored.row(step) for step in range(steps))
    if name in POSITION_ARRAYS:
        return dtype, (*shape[:2], positions, shape[3]), (stored.layer(layer) for layer in range(trace.num_layers))
    whole = trace.gates() if name == "gates" else stored.whole()
    return dtype, whole.shape, iter([whole])


def _rows(trace: Trace, name: str) -> Iterator[NDArray[np.float32]]:
    for step in range(1, trace.num_steps + 1):
        rows = trace.attention_rows(step) if name == "attention" else trace.score_rows(step)
        padding = [(0, 0)] * (rows.ndim - 1) + [(0, trace.num_positions - rows.shape[-1])]
        yield np.pad(rows, padding)
