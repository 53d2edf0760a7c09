"""One question of a task: the text a model is given, what it should answer, and where the answer stands."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["CountTokens", "Metric", "Sample", "Span", "Text", "count_words"]

CountTokens = Callable[[str], int]
"""How many tokens a text has."""

Metric = Literal["all", "part", "rouge_l"]
"""How an answer is scored, see `kvsim.tasks.scoring.score`."""

Span = tuple[int, int]
"""Characters from the first up to, not including, the second."""


def count_words(text: str) -> int:
    """Count the words of a text, parted by white space: for when there is no tokenizer."""
    return len(text.split())


@dataclass(frozen=True)
class Text:
    """What a task writes.

    Attributes
    ----------
    input : str
        The user's turn: instructions, context and question.
    prefix : str
        The start of the assistant's turn, RULER's answer prefix (it begins with a space). A base model continues
        ``input + prefix``; with a chat template only `input` goes into the template and `prefix` is appended to it.
    outputs : tuple of str
        The answers: all of them are asked for, or (metric ``part``) any one.
    depth : float or None
        How much of the context comes before the first asked needle, in percent of its sentences, lines or documents;
        None for a task without needles.
    needle_spans : tuple of (int, int)
        Where in `input` the values that are asked for stand, as spans of characters in the order of the text; those
        of alternative answers may overlap. Empty where the answer is no place in the text (counting words; yes or no).
    distractor_spans : tuple of (int, int)
        The same for planted values that are not asked for.
    """

    input: str
    prefix: str
    outputs: tuple[str, ...]
    depth: float | None = None
    needle_spans: tuple[Span, ...] = ()
    distractor_spans: tuple[Span, ...] = ()

    @property
    def prompt(self) -> str:
        """The prompt of a base model, which is also what is counted: `input` and `prefix`."""
        return self.input + self.prefix


@dataclass(frozen=True)
class Sample(Text):
    """A text with its place in a task.

    Attributes
    ----------
    task : str
        Name of the task.
    index, seed : int
        Which sample; the same two give the same sample.
    length : int
        Tokens of the prompt plus `answer_tokens`, as RULER counts: never more than was asked for.
    answer_tokens : int
        Tokens to generate.
    metric : {"all", "part", "rouge_l"}
        How the answer is scored.
    """

    task: str = ""
    index: int = 0
    seed: int = 0
    length: int = 0
    answer_tokens: int = 0
    metric: Metric = "all"

    def to_dict(self) -> dict[str, Any]:
        """Give everything as plain data, for JSON."""
        return asdict(self)
