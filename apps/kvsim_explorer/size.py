"""What counts as a large recording: work over all of its rows waits for a click there."""

from kvsim import Trace

__all__ = ["LARGE", "is_large"]

LARGE = 4_000_000
"""Attention of that many steps, layers and positions takes a few seconds to go through."""


def is_large(trace: Trace, share: float = 1.0) -> bool:
    """Whether going through a share of a recording's steps takes so long that it is to be asked for."""
    return trace.num_steps * len(trace.eligible_layers) * trace.num_positions * share > LARGE
