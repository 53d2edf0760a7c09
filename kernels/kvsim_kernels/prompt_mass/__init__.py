"""The attention that each position of a prompt receives, summed over queries, without the rows."""

from kvsim_kernels.attention_rows.reference import prompt_mass

__all__ = ["prompt_mass"]
