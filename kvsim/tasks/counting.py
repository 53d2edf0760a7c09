"""RULER's aggregation tasks: the words that are there most often."""

from dataclasses import dataclass
from string import ascii_lowercase
from typing import ClassVar

from kvsim.tasks.sample import Text
from kvsim.tasks.task import Draw, Plan, Task
from kvsim.tasks.words import distinct, single_words

__all__ = ["CommonWords", "FrequentWords"]

SHORT = 4096
"""Below this many tokens RULER makes the words of `cwe` rarer."""


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list of words, some of which are there often; they are asked for.

    As in RULER, common words are there 30 times and others 3 times, after an example with 10 and 3; below 4,096 tokens
    6 times and once, after an example with 3 and 1.

    Source: Hsieh et al. 2024 (RULER), Section 3 and Appendix B; the wording is RULER's. Difference: the list of words
    is another. A sample that needs more than its 2,000 words goes on with pairs such as ``amber-lantern``.

    Parameters
    ----------
    freq_cw, freq_ucw : int
        How often a common and an uncommon word are there, from 4,096 tokens on.
    num_cw : int
        Common words.
    num_fewshot : int
        Examples before the question.
    """

    freq_cw: int = 30
    freq_ucw: int = 3
    num_cw: int = 10
    num_fewshot: int = 1

    answer_tokens: ClassVar[int] = 120

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        return "the most common words of a list"

    def _plan(self, draw: Draw) -> Plan:
        short = draw.length < SHORT
        examples = ""
        for shot in range(self.num_fewshot):
            common, context = self._list(draw, f"example {shot}", *((20, 3, 1) if short else (40, 10, 3)))
            shown = self._text(context, common)
            examples += f"{shown.prompt} {_numbered(common)}\n"
        often, rarely = (6, 1) if short else (self.freq_cw, self.freq_ucw)

        def build(units: int) -> Text:
            common, context = self._list(draw, "question", units, often, rarely)
            return self._text(context, common, examples)

        return Plan(build, least=self.num_cw + 1)

    def _list(self, draw: Draw, label: str, size: int, often: int, rarely: int) -> tuple[list[str], str]:
        rng = draw.rng(label)
        words = rng.sample(single_words(), len(single_words()))
        pairs = distinct("words", rng)
        while len(words) < size:
            words.append(next(pairs))
        common = words[: self.num_cw]
        whole = common * often + words[self.num_cw : size] * rarely
        draw.rng(label, size).shuffle(whole)
        return common, _numbered(whole)

    def _text(self, context: str, common: list[str], examples: str = "") -> Text:
        return Text(
            f"{examples}Below is a numbered list of words. In these words, some appear more often than others. "
            f"Memorize the ones that appear most often.\n{context}\n"
            f"Question: What are the {self.num_cw} most common words in the above list?",
            f" Answer: The top {self.num_cw} words that appear most often in the list are:",
            tuple(common),
        )


def _numbered(words: list[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords(Task):
    """Made-up words of six letters whose frequencies follow a Zeta distribution; ranks 2 to 4 are asked for.

    A text drawn for N words has the word of rank k ``int(N k^-alpha / zeta(alpha))`` times; rank 1 is three dots,
    which the question tells the model to ignore. There is a word for every 50 tokens, at least four.

    Source: Hsieh et al. 2024 (RULER), Section 3 and Appendix B; the wording is RULER's. Difference: N is never one at
    which rank 5 is there as often as rank 4, which happens in very short texts.

    Parameters
    ----------
    alpha : float
        Of the Zeta distribution, above 1.
    """

    alpha: float = 2.0

    answer_tokens: ClassVar[int] = 50

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        return "the most frequent made-up words"

    def _plan(self, draw: Draw) -> Plan:
        vocabulary = max(4, (draw.length - self.answer_tokens) // 50)
        rng = draw.rng("words")
        coded: list[str] = []
        seen: set[str] = set()
        while len(coded) < vocabulary - 1:
            word = "".join(rng.choices(ascii_lowercase, k=6))
            if word not in seen:
                seen.add(word)
                coded.append(word)
        words = ["...", *coded]

        def build(units: int) -> Text:
            counts = self._counts(units, vocabulary)
            while vocabulary > 4 and counts[3] == counts[4]:
                units -= 1
                counts = self._counts(units, vocabulary)
            text = [word for word, count in zip(words, counts, strict=True) for _ in range(count)]
            draw.rng("order", units).shuffle(text)
            return Text(
                "Read the following coded text and track the frequency of each coded word. Find the three most "
                f"frequently appeared coded words. {' '.join(text)}\nQuestion: Do not provide any explanation. "
                "Please ignore the dots '....'. "
                "What are the three most frequently appeared words in the above coded text?",
                " Answer: According to the coded text above, the three most frequently appeared words are:",
                tuple(words[1:4]),
            )

        least = next(units for units in range(1, 10_000_000) if self._counts(units, 4)[3])
        return Plan(build, least)

    def _counts(self, size: int, vocabulary: int) -> list[int]:
        from scipy.special import zeta

        whole = float(zeta(self.alpha))
        return [int(size * rank**-self.alpha / whole) for rank in range(1, vocabulary + 1)]
