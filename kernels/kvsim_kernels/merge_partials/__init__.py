"""Put two attentions of the same queries over disjoint sets of keys together."""

from kvsim_kernels.merge_partials.reference import merge_partials

__all__ = ["merge_partials"]
