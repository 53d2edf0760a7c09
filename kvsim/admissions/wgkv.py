"""Write-Gated KV."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvsim.admission import Admission
from kvsim.admissions.base import Admit, check_window, register
from kvsim.context import Context
from kvsim.errors import PolicyError
from kvsim.gate_scores import gate_scores
from kvsim.write_gate import load_gate


@register
@dataclass(frozen=True)
class Wgkv(Admit):
    """Admit what a trained write gate scores at least tau, per layer and KV head (WG-KV 3.1, 3.2).

    ``kvsim train-gate`` makes the file. Gates of the same file that the recording stores are used as they are; else
    they are computed from its keys, those before the rotary embedding turned back where they are not stored. g and tau
    are compared in float32: 0 admits everything, more than 1 nothing.

    Attributes
    ----------
    file : str
        The safetensors file of the gate.
    tau : float, optional
        Threshold, at least 0; the file's by default.
    window : int, optional
        Recent positions that every query sees; those of the file's training by default.
    """

    name: ClassVar[str] = "wgkv"
    file: str
    tau: float | None = field(default=None, kw_only=True)
    window: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.tau is not None and self.tau < 0:
            raise PolicyError(f"tau of 'wgkv' must be 0 or more, got {self.tau}")
        if self.window is not None:
            check_window(self.name, self.window)

    def admission(self, context: Context) -> Admission:
        """See `Admit.admission`."""
        gate, trace, layers = load_gate(self.file), context.trace, context.groups.layers
        stored = trace.manifest.gate
        if stored is not None and stored["hash"] == gate.hash:
            scores = trace.gates()[list(layers)]
        else:
            scores = gate_scores(trace, gate, layers, self.file)
        scores = scores.reshape(context.groups.count, -1)
        # No gate is above 1, and float32 ends before float64 does.
        tau = np.float32(min(2.0, gate.tau if self.tau is None else self.tau))
        window = gate.window if self.window is None else self.window
        return Admission(window, scores >= tau, scores.astype(np.float64))
