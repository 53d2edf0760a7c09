"""Attention probabilities themselves: the row of one query, and the mass a prompt's positions receive."""

from kvsim_kernels.attention_rows.reference import attention_row, prompt_mass

__all__ = ["attention_row", "prompt_mass"]
