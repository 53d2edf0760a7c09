"""Gather the keys and values that admission lets into the global cache, head by head."""

from kvsim_kernels.gather_admitted.reference import Admitted, gather_admitted

__all__ = ["Admitted", "gather_admitted"]
