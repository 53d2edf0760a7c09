"""Which scorers a recording can give: those that are named, or all there are."""

from collections.abc import Sequence

from kvsim_traces import Trace

from kvsim.errors import PolicyError
from kvsim.grammar import format_part, parse_part
from kvsim.plan import ScoreSource
from kvsim.scorers import SCORERS, Scorer

__all__ = ["VARIANTS", "candidates", "reason", "require_heads"]

VARIANTS = ("attention:heads=max", "knorm:sign=plus")
"""Settings of scorers that stand beside their defaults when all scorers are asked for."""


def candidates(scorers: Sequence[Scorer | str] | None = None) -> tuple[dict[str, Scorer], dict[str, str]]:
    """List scorers by their canonical text.

    Parameters
    ----------
    scorers : sequence of Scorer or str, optional
        Those to take, as after ``score=``; by default every registered one with its default settings, and `VARIANTS`.

    Returns
    -------
    found : dict
        Canonical text to scorer, without repeats.
    left_out : dict
        Name to reason: registered scorers that have no default, such as `learned`.

    Raises
    ------
    PolicyError
        If a named scorer does not exist, or none is named.
    """
    if scorers is not None:
        named = [parse_part(one, SCORERS, "score") if isinstance(one, str) else one for one in scorers]
        if not named:
            raise PolicyError("name at least one scorer")
        return {format_part(one): one for one in named}, {}
    found: dict[str, Scorer] = {}
    left_out: dict[str, str] = {}
    for text in [*sorted(SCORERS), *VARIANTS]:
        try:
            scorer = parse_part(text, SCORERS, "score")
        except PolicyError as error:
            left_out[text] = str(error)
        else:
            found[format_part(scorer)] = scorer
    return dict(sorted(found.items())), left_out


def require_heads(trace: Trace, source: ScoreSource, label: str) -> None:
    """Refuse a score made of single heads' attention on a recording of head means.

    Raises
    ------
    PolicyError
        If the recording is a `scores` capture and the score is not a function of the head mean.
    """
    by_head = source.kind == "attention" and (source.heads != "mean" or source.weight is not None)
    if by_head and trace.capture == "scores":
        raise PolicyError(f"{label}: needs attention of single heads, but {trace.path} is a 'scores' capture")


def reason(error: Exception, trace: Trace, prefix: str) -> str:
    """Give an error's text without `prefix` and with the recording's name for its path."""
    text = str(error).removeprefix(f"{prefix}: ").removeprefix(f"{trace.path}: ")
    return text.replace(str(trace.path), trace.path.name)
