"""Write down what left a cache of slots, and give its place to the next position."""

from kvsim_kernels.seat.reference import seat

__all__ = ["seat"]
