"""RULER's needle-in-a-haystack tasks: single, multi-key, multi-value and multi-query."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from kvsim.tasks.sample import Span, Text
from kvsim.tasks.task import Draw, Plan, Task
from kvsim.tasks.words import Kind, distinct, prose

__all__ = ["DEPTHS", "NOISE", "Niah", "spread"]

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

DEPTHS = tuple(round(100 * i / 39) for i in range(40))
"""Depths in percent that a needle in prose may have: 40 of them, evenly spread."""

NEEDLE = re.compile(r"One of the special magic \w+ for (\S+) is: (\S+)\.(?=\s)")


def spread(sentences: list[str], needles: list[str], depths: list[float]) -> str:
    """Put needles between sentences, each after its depth (percent, rising) of them, rounded down."""
    parts, start = [], 0
    for needle, depth in zip(needles, depths, strict=True):
        place = int(len(sentences) * depth / 100)
        parts += [*sentences[start:place], needle]
        start = place
    return " ".join(parts + sentences[start:])


@dataclass(frozen=True)
class Niah(Task):
    """Sentences that give a name a magic value are hidden in a haystack; some of the values are asked for.

    Source: Hsieh et al. 2024 (RULER), Section 3 and Appendix B; the wording is RULER's. Differences: the prose is
    another (`kvsim.tasks.words.prose`), names are drawn from other lists of words, and names and values never repeat in
    a sample.

    Parameters
    ----------
    haystack : {"noise", "essay", "needle"}
        Five short sentences repeated, prose, or needles that are not asked for.
    keys, values : {"words", "numbers", "uuids"}
        What names and values are.
    num_keys, num_values, num_queries : int
        Names with planted values, values for each of them, and names asked for.
    """

    haystack: Literal["noise", "essay", "needle"] = "essay"
    keys: Kind = "words"
    values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1

    answer_tokens: ClassVar[int] = 128

    @property
    def summary(self) -> str:
        """See `Task.summary`."""
        asked, planted = self.num_queries * self.num_values, self.num_keys * self.num_values
        among = f" of {planted}" if planted > asked else ""
        what = self.values if asked > 1 or among else self.values[:-1]
        whose = f" for {self.num_queries} name{'s' * (self.num_queries > 1)}" if asked > 1 else ""
        where = {"noise": "five repeated sentences", "essay": "a novel", "needle": "needles alone"}
        return f"{asked}{among} {what}{whose}, hidden in {where[self.haystack]}"

    def _plan(self, draw: Draw) -> Plan:
        rng = draw.rng("needles")
        keys, values = distinct(self.keys, rng), distinct(self.values, rng)
        names = [next(keys) for _ in range(self.num_keys)]
        planted = {name: [next(values) for _ in range(self.num_values)] for name in names}
        needles = [self._needle(name, value) for name in names for value in planted[name]]
        rng.shuffle(needles)
        asked = rng.sample(names, self.num_queries)
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        others: list[str] = []

        def context(units: int) -> tuple[str, list[float]]:
            if self.haystack == "essay":
                return spread(prose(units), needles, [float(depth) for depth in depths]), [*map(float, depths)]
            while self.haystack == "needle" and len(others) < units:
                others.append(self._needle(next(keys), next(values)))
            lines = [NOISE] * units if self.haystack == "noise" else others[:units]
            gaps = sorted(draw.rng("gaps", units).sample(range(units), len(needles)))
            for gap, needle in reversed([*zip(gaps, needles, strict=True)]):
                lines.insert(gap, needle)
            return "\n".join(lines), [100 * gap / units for gap in gaps]

        def build(units: int) -> Text:
            hidden, at = context(units)
            first = min(depth for needle, depth in zip(needles, at, strict=True) if _key(needle) in asked)
            return self._text(hidden, asked, [value for name in asked for value in planted[name]], first)

        return Plan(build, least=1 if self.haystack == "essay" else len(needles))

    def _needle(self, name: str, value: str) -> str:
        return f"One of the special magic {self.values} for {name} is: {value}."

    def _text(self, hidden: str, asked: list[str], outputs: list[str], depth: float) -> Text:
        query = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])}, and {asked[-1]}"
        if len(outputs) == 1:
            thing = self.values[:-1]
            lead = f"A special magic {thing} is hidden"
            question = f"What is the special magic {thing} for {query} mentioned in the provided text?"
            prefix = f" The special magic {thing} for {query} mentioned in the provided text is"
        else:
            thing = self.values
            lead = f"Some special magic {thing} are hidden"
            question = f"What are all the special magic {thing} for {query} mentioned in the provided text?"
            prefix = f" The special magic {thing} for {query} mentioned in the provided text are"
        text = (
            f"{lead} within the following text. Make sure to memorize it. I will quiz you about the {thing} afterwards."
            f"\n{hidden}\n{question}"
        )
        spans: dict[bool, list[Span]] = {True: [], False: []}
        for needle in NEEDLE.finditer(text):
            spans[needle[1] in asked].append(needle.span(2))
        return Text(text, prefix, tuple(outputs), depth, tuple(spans[True]), tuple(spans[False]))


def _key(needle: str) -> str:
    return needle.partition(" for ")[2].partition(" is: ")[0]
