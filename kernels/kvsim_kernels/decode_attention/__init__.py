"""Attention of one new query over a cache of slots, with its logits for whoever scores the slots."""

from kvsim_kernels.decode_attention.reference import Attended, decode_attention, visible_slots

__all__ = ["Attended", "decode_attention", "visible_slots"]
