"""Traces of real model runs: what each decode step attended to, as a Zarr v3 group.

`record` makes one with torch, `import_npz` makes one from anyone's arrays, `open_trace` reads one memory-mapped.
torch is imported only when `record` is asked for.
"""

from typing import TYPE_CHECKING, Any

from kvsim_traces.description import describe
from kvsim_traces.errors import CaptureError, TraceError
from kvsim_traces.exporter import export_npz
from kvsim_traces.gates import store_gates
from kvsim_traces.importer import import_npz
from kvsim_traces.maintenance import RepairReport, VerifyReport, repair_trace, verify_trace
from kvsim_traces.manifest import LayerInfo, Manifest
from kvsim_traces.reader import Trace, open_trace
from kvsim_traces.writer import TraceWriter

if TYPE_CHECKING:
    from kvsim_traces.recorder import record

__all__ = [
    "CaptureError",
    "LayerInfo",
    "Manifest",
    "RepairReport",
    "Trace",
    "TraceError",
    "TraceWriter",
    "VerifyReport",
    "describe",
    "export_npz",
    "import_npz",
    "open_trace",
    "record",
    "repair_trace",
    "store_gates",
    "verify_trace",
]


def __getattr__(name: str) -> Any:
    if name == "record":
        from kvsim_traces.recorder import record

        return record
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
