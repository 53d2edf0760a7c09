"""The write gate of a decode step: one key a row, turned back to what it was before RoPE on the way."""

from kvsim_kernels.write_gate_step.reference import unrotated, write_gate_step

__all__ = ["unrotated", "write_gate_step"]
