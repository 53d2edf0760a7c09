"""One decode step of the dual cache: the new key into the ring, the one it displaces to the global pages or away."""

from kvsim_kernels.promote.reference import EXHAUSTED, TABLE_FULL, promote

__all__ = ["EXHAUSTED", "TABLE_FULL", "promote"]
