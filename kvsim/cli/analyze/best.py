"""How the tables write a best alpha."""

from collections.abc import Sequence

from kvsim.alphas import at_edge

__all__ = ["EDGE", "best_alpha"]

EDGE = "(edge): the last alpha tried is the best; one beyond it may be better"


def best_alpha(best: Sequence[float], tried: Sequence[float], gap: str = " ") -> str:
    """Write the alphas that share the best value, ``any`` where all do; one at the edge of those tried says so."""
    if len(best) == len(tried):
        return "any"
    shown = ", ".join(f"{alpha:g}" for alpha in best)
    return f"{shown}{gap}(edge)" if at_edge(best, tried) else shown
