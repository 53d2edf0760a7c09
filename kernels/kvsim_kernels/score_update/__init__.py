"""From logits to scores, and from scores to the state by which slots are kept (InertiaKV Eq. 1 and 4)."""

from kvsim_kernels.score_update.reference import score_update, unscored_update

__all__ = ["score_update", "unscored_update"]
