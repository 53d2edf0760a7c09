"""Linear layers of a decode step: a few vectors, normalised on the way, through one or two weights."""

from kvsim_kernels.linear.reference import linear

__all__ = ["linear"]
