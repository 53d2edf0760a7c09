"""The facts about a trace, as JSON data."""

import os
from typing import Any

from kvsim_traces.errors import TraceError
from kvsim_traces.files import os_reason
from kvsim_traces.reader import Trace


def describe(trace: Trace) -> dict[str, Any]:
    """Return the facts about a trace that ``kvsim trace info`` shows, as JSON data.

    Parameters
    ----------
    trace : Trace
        The trace.

    Returns
    -------
    dict
        ``path``, ``hash``, ``num_positions``, ``eligible_layers``, ``bytes`` on disk, the manifest's fields under
        ``manifest``, and under ``arrays`` each one's ``shape``, ``dtype``, ``pieces`` and ``bytes``.

    Raises
    ------
    TraceError
        If a file has gone since the trace was opened.
    """
    arrays = {}
    for name in trace.manifest.arrays:
        stored = trace.stored(name)
        try:
            size = sum(os.path.getsize(stored.path(piece)) for piece in range(stored.pieces))
        except OSError as error:
            raise TraceError(f"{error.filename or stored.directory}: {os_reason(error)}") from error
        shape = list(stored.layout.shape)
        arrays[name] = {"shape": shape, "dtype": stored.layout.dtype, "pieces": stored.pieces, "bytes": size}
    return {
        "path": str(trace.path),
        "hash": trace.hash,
        "num_positions": trace.num_positions,
        "eligible_layers": list(trace.eligible_layers),
        "bytes": sum(array["bytes"] for array in arrays.values()),
        "arrays": arrays,
        "manifest": trace.manifest.to_json(),
    }
