"""Does one policy beat another at equal cache size? Said in a sentence, with the sizes and a paired interval."""

from dataclasses import asdict, dataclass
from typing import Any

from kvsim.paired import Paired, paired

__all__ = ["FEWEST", "HIGHER", "Row", "Verdict", "verdict"]

HIGHER = {"kept_mass": True, "output_error": False, "loss": False}
"""The metrics that are compared, and whether more is better."""

FEWEST = 6
"""With fewer texts no paired test can reach 5% (2^-5 with five), so none is said to beat another."""

_WORDS = {"kept_mass": "kept mass", "output_error": "output error", "loss": "loss"}


@dataclass(frozen=True)
class Row:
    """One policy's numbers, text by text.

    Attributes
    ----------
    name : str
        Its family.
    policy : str
        The canonical string.
    size : float
        Its mean cache size.
    values : dict of str to list of float
        For each metric one number a text; the same texts in the same order as those that it is compared with.
    """

    name: str
    policy: str
    size: float
    values: dict[str, list[float]]

    def means(self) -> dict[str, Any]:
        """Give names, size and mean of each metric, for JSON and tables."""
        own = {metric: sum(values) / len(values) for metric, values in self.values.items()}
        return {"name": self.name, "policy": self.policy, "size": self.size, **own}


@dataclass(frozen=True)
class Verdict:
    """How two policies compare by one metric.

    Attributes
    ----------
    metric, name, rival : str
    beats : bool
        Whether there are `FEWEST` texts and the whole interval of the difference is on the better side.
    sizes : (float, float)
    difference : Paired or None
        Ours minus the rival's; None where the sizes are too far apart to compare.
    line : str
        The sentence.
    """

    metric: str
    name: str
    rival: str
    beats: bool
    sizes: tuple[float, float]
    difference: Paired | None
    line: str

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data, for JSON."""
        return asdict(self)


def verdict(metric: str, ours: Row, rival: Row, where: str, *, apart: float | None = 0.02, seed: int = 0) -> Verdict:
    """Compare two policies on the same texts.

    Parameters
    ----------
    metric : str
        One of `HIGHER`.
    ours, rival : Row
    where : str
        How the sentence starts.
    apart : float or None
        The larger size may exceed the smaller one by this share; None where sizes need not be equal.
    seed : int
        Of the interval.
    """
    sizes = ours.size, rival.size
    said = f"sizes {sizes[0]:.4f} and {sizes[1]:.4f}"
    start = f"{where}, {_WORDS[metric]}: {ours.name}"
    if apart is not None and max(sizes) > min(sizes) * (1 + apart):
        line = f"{start} is not compared with {rival.name}: {said} are more than {apart:.0%} apart"
        return Verdict(metric, ours.name, rival.name, False, sizes, None, line)
    found = paired(ours.values[metric], rival.values[metric], seed=seed)
    beats = _better(found, HIGHER[metric])
    interval = "" if found.low is None else f", 95% {found.low:+.5f} to {found.high:+.5f}"
    texts = f"{found.samples} text" + "s" * (found.samples > 1)
    texts += ", too few to tell" * (found.samples < FEWEST)
    numbers = f"{found.score:.5f} against {found.baseline:.5f} ({found.delta:+.5f}{interval}; {texts}; {said})"
    worse = _better(found, not HIGHER[metric])
    words = "beats" if beats else "does not beat (it is worse than)" if worse else "does not beat"
    return Verdict(metric, ours.name, rival.name, beats, sizes, found, f"{start} {words} {rival.name}: {numbers}")


def _better(found: Paired, more: bool) -> bool:
    if found.samples < FEWEST:
        return False
    if found.low is None or found.high is None:
        # One difference everywhere.
        return found.delta > 0 if more else found.delta < 0
    return found.low > 0 if more else found.high < 0
