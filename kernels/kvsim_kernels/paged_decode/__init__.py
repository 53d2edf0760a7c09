"""Attention of one new query over pages of a pool, every row with a length of its own."""

from kvsim_kernels.paged_decode.reference import PAGE, page_slots, paged_decode

__all__ = ["PAGE", "page_slots", "paged_decode"]
