"""Scores of cached keys that no query takes part in: their norms, and how far they are from their mean."""

from kvsim_kernels.key_scores.reference import KINDS, key_scores

__all__ = ["KINDS", "key_scores"]
