"""A write gate's scores of a recording's keys, and how they are stored in it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, store_gates

from kvsim.errors import PolicyError
from kvsim.rope import keys_before
from kvsim.write_gate import WriteGate, load_gate

__all__ = ["gate_scores", "store_gate_scores"]


def gate_scores(trace: Trace, gate: WriteGate, layers: Sequence[int], where: str) -> npt.NDArray[np.float32]:
    """Score every position of a recording, from its keys before and after the rotary embedding.

    Parameters
    ----------
    trace : Trace
        With keys; those before the embedding are turned back where they are not stored.
    gate : WriteGate
        Of the recording's model.
    layers : sequence of int
        Recorded layers to score.
    where : str
        The gate's file, for errors.

    Returns
    -------
    array of float32
        [layers, Hk, L0+T] gates in [0, 1].

    Raises
    ------
    PolicyError
        If the gate is for other layers or heads than the recording has, or the rotation of its keys is not known.
    CaptureError
        If the recording holds no keys.
    """
    if not trace.has("keys"):
        trace.stored("keys")
    theirs, ours = (gate.num_kv_heads, gate.head_dim), (trace.num_kv_heads, trace.head_dim)
    if theirs != ours:
        raise PolicyError(
            f"{where}: is for {theirs[0]} KV heads of dimension {theirs[1]}, but {trace.path} has {ours[0]} of "
            f"dimension {ours[1]}"
        )
    missing = [layer for layer in layers if layer not in gate.layers]
    if missing:
        raise PolicyError(f"{where}: has no gate for layer {missing[0]} of {trace.path} (layers: {list(gate.layers)})")
    scores = np.empty((len(layers), trace.num_kv_heads, trace.num_positions), np.float32)
    for own, layer in zip(scores, layers, strict=True):
        own[:] = gate.score_layer(gate.layers.index(layer), keys_before(trace, layer), trace.keys(layer))
    return scores


def store_gate_scores(path: str | Path, file: str | Path) -> tuple[Trace, WriteGate]:
    """Score a recording with the gate in a file and store the scores in it, in place of any others.

    Layers that policies do not evict from, and the gate does not know, get 1: everything is admitted there.

    Parameters
    ----------
    path : str or Path
        The recording's directory.
    file : str or Path
        The gate's file.

    Returns
    -------
    trace : Trace
        The recording, with ``gates`` and the gate's hash in its manifest.
    gate : WriteGate
        The gate.

    Raises
    ------
    PolicyError, CaptureError
        As `gate_scores`, or if the file is no gate.
    TraceError
        If the recording is incomplete, or the scores cannot be written.
    """
    gate = load_gate(file)

    def scores(trace: Trace) -> npt.NDArray[np.float32]:
        layers = [layer for layer in range(trace.num_layers) if layer in gate.layers or layer in trace.eligible_layers]
        found = np.ones((trace.num_layers, trace.num_kv_heads, trace.num_positions), np.float32)
        found[layers] = gate_scores(trace, gate, layers, str(file))
        return found

    return store_gates(path, scores, name=Path(file).name, digest=gate.hash), gate
