"""The write gate: a score for every key, from the key before and after RoPE."""

from kvsim_kernels.write_gate.reference import write_gate

__all__ = ["write_gate"]
