"""Scores of answers from 0 to 100, as RULER computes them."""

import re
from collections.abc import Sequence

from kvsim.errors import KvsimError
from kvsim.tasks.rouge import rouge_l
from kvsim.tasks.sample import Sample

__all__ = ["postprocess", "score", "string_match_all", "string_match_part", "task_score"]


def postprocess(prediction: str) -> str:
    """Clean an answer as RULER does: control characters become line ends, white space around it goes."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Give the percentage of the references that the answer has in it, whatever the case (RULER's main score)."""
    said = prediction.lower()
    return 100 * sum(reference.lower() in said for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """Give 100 if the answer has any of the references in it, whatever the case, else 0 (RULER's score for QA)."""
    said = prediction.lower()
    return 100.0 * any(reference.lower() in said for reference in references)


def score(prediction: str, sample: Sample) -> float:
    """Score what a model generated after a sample's prompt.

    Parameters
    ----------
    prediction : str
        The generated text, without the prefix.
    sample : Sample
        What it answers. Metric ``all`` is `string_match_all`, ``part`` is `string_match_part`, ``rouge_l`` is 100 times
        the F of `kvsim.tasks.rouge.rouge_l`.

    Returns
    -------
    float
        0 to 100, not rounded.
    """
    said = postprocess(prediction)
    if sample.metric == "rouge_l":
        return 100 * rouge_l(said, sample.outputs[0]).f
    match = string_match_all if sample.metric == "all" else string_match_part
    return match(said, sample.outputs)


def task_score(scores: Sequence[float]) -> float:
    """Give a task's score as RULER reports it: the mean over samples, rounded to two decimals.

    Raises
    ------
    KvsimError
        If there are no scores.
    """
    if not scores:
        raise KvsimError("a task without samples has no score")
    return round(sum(scores) / len(scores), 2)
