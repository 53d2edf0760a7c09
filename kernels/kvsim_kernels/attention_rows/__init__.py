"""Attention probabilities themselves: one query's row, of one layer or many, and the mass that positions receive."""

from kvsim_kernels.attention_rows.reference import attention_row, layer_rows, prompt_mass

__all__ = ["attention_row", "layer_rows", "prompt_mass"]
