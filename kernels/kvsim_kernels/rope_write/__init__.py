"""Turn a step's queries and keys by their positions, and write keys and values into their slots."""

from kvsim_kernels.rope_write.reference import rope_write

__all__ = ["rope_write"]
