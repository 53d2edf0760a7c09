"""What the tasks share: seeding, filling a context to a number of tokens, errors."""

import abc
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvsim.errors import KvsimError
from kvsim.tasks.sample import CountTokens, Metric, Sample, Text, count_words

__all__ = ["Draw", "Plan", "Task", "fill"]


@dataclass(frozen=True)
class Draw:
    """Everything that decides one sample.

    Attributes
    ----------
    task : str
        Name of the task.
    index, seed : int
        Which sample.
    length : int
        Tokens that it may have, the answer's included.
    count_tokens : callable
        Counts them.
    """

    task: str
    index: int
    seed: int
    length: int
    count_tokens: CountTokens

    def rng(self, *label: object) -> random.Random:
        """Give a generator of its own for each label; it does not depend on the length."""
        return random.Random("/".join(map(str, (self.task, self.seed, self.index, *label))))


@dataclass(frozen=True)
class Plan:
    """A sample but for its size.

    Attributes
    ----------
    build : callable
        Gives the text with a number of haystack units: words, lines, documents.
    least : int
        Fewest units.
    most : int or None
        Most units there are.
    """

    build: Callable[[int], Text]
    least: int = 1
    most: int | None = None


@dataclass(frozen=True)
class Task(abc.ABC):
    """A task that makes up questions of any length.

    Parameters
    ----------
    name : str
        What it is called.
    """

    name: str

    answer_tokens: ClassVar[int]
    metric: ClassVar[Metric] = "all"

    def sample(self, index: int, length: int, count_tokens: CountTokens = count_words, *, seed: int = 0) -> Sample:
        """Make a sample whose prompt and answer have at most `length` tokens, and as nearly so as whole units allow.

        Parameters
        ----------
        index : int
            Which sample, from 0.
        length : int
            Tokens of prompt and answer together (RULER's ``max_seq_length``).
        count_tokens : callable
            Gives the tokens of a text: of ``input + prefix``. Words by default. For a chat model let it count the
            text within the chat template.
        seed : int
            Seed of all samples of the task.

        Raises
        ------
        KvsimError
            If `length` is too small (the error names the least), or the task has no such sample.
        """
        if index < 0:
            raise KvsimError(f"{self.name}: the index of a sample is at least 0, got {index}")
        plan = self._plan(Draw(self.name, index, seed, length, count_tokens))
        limit = length - self.answer_tokens

        def tokens(units: int) -> int:
            return count_tokens(plan.build(units).prompt)

        units = fill(tokens, limit, plan.least, plan.most)
        if units is None:
            least = tokens(plan.least) + self.answer_tokens
            raise KvsimError(
                f"{self.name}: length {length} is too small; sample {index} needs at least {least} tokens, "
                f"{self.answer_tokens} of them for the answer"
            )
        text = plan.build(units)
        return Sample(
            **vars(text),
            task=self.name,
            index=index,
            seed=seed,
            length=count_tokens(text.prompt) + self.answer_tokens,
            answer_tokens=self.answer_tokens,
            metric=self.metric,
        )

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """What the task asks for, in a few words."""

    @abc.abstractmethod
    def _plan(self, draw: Draw) -> Plan:
        """Draw everything that does not depend on the size."""


def fill(tokens: Callable[[int], int], limit: int, least: int = 1, most: int | None = None) -> int | None:
    """Find how many units fit into `limit` tokens.

    Parameters
    ----------
    tokens : callable
        Gives the tokens of a number of units; it should not fall as they become more.
    limit : int
        Most tokens allowed.
    least, most : int
        Fewest and most units allowed.

    Returns
    -------
    int or None
        Units that fit where one more does not (or `most`); None if `least` do not fit.

    Raises
    ------
    KvsimError
        If the tokens do not grow with the units.
    """
    low, at_low = least, tokens(least)
    if at_low > limit:
        return None
    high, step = low, 1
    while True:
        if low == most:
            return low
        high = low + step if most is None else min(low + step, most)
        at_high = tokens(high)
        if at_high > limit:
            break
        slope = (at_high - at_low) / (high - low)
        step = math.ceil((limit - at_high) / slope) + 1 if slope > 0 else 2 * step
        low, at_low = high, at_high
        if low > 64 * limit + 4096:
            raise KvsimError("count_tokens does not grow with the text")
    halve = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halve and at_high > at_low:
            middle = low + (high - low) * (limit - at_low) // (at_high - at_low)
            middle = min(max(middle, low + 1), high - 1)
        halve = not halve
        at_middle = tokens(middle)
        if at_middle > limit:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return low
