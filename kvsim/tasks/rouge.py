"""ROUGE-L: how much of a reference an answer says, in the reference's order."""

import re
from dataclasses import dataclass

__all__ = ["RougeL", "rouge_l"]


@dataclass(frozen=True)
class RougeL:
    """Precision, recall and their harmonic mean, each in [0, 1].

    Attributes
    ----------
    precision, recall, f : float
        Of the longest common subsequence.
    """

    precision: float
    recall: float
    f: float


def rouge_l(prediction: str, reference: str) -> RougeL:
    """Score an answer by the longest common subsequence (LCS) of its words with those of a reference.

    Precision is LCS over the answer's words, recall LCS over the reference's, F = 2PR / (P + R). A word is a run of
    letters and digits in lower case; everything else parts words. The text is one sequence, not split into sentences.

    Source: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries", Section 3.1, with beta = 1.

    Parameters
    ----------
    prediction, reference : str
        Texts. If either has no words, everything is 0.
    """
    said, wanted = _words(prediction), _words(reference)
    row = [0] * (len(wanted) + 1)
    for word in said:
        before = row
        row = [0]
        for place, other in enumerate(wanted):
            row.append(before[place] + 1 if word == other else max(before[place + 1], row[place]))
    if not row[-1]:
        return RougeL(0.0, 0.0, 0.0)
    precision, recall = row[-1] / len(said), row[-1] / len(wanted)
    return RougeL(precision, recall, 2 * precision * recall / (precision + recall))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
