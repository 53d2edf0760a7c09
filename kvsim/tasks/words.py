"""Words, names and numbers to plant, and the prose to hide them in."""

import functools
import random
import re
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import accumulate
from typing import Literal

__all__ = ["Kind", "distinct", "prose", "single_words"]

Kind = Literal["words", "numbers", "uuids"]


_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]['\")])) +(?=[^a-z])")


@functools.cache
def _read(name: str) -> str:
    return files("kvsim.tasks").joinpath("data", f"{name}.txt").read_text(encoding="ascii")


@functools.cache
def single_words() -> tuple[str, ...]:
    """Give about 2,000 English nouns, adjectives and verbs, sorted, without repeats."""
    return tuple(sorted({word for name in ("nouns", "adjectives", "verbs") for word in _read(name).split()}))


@functools.cache
def _parts() -> tuple[list[str], list[str]]:
    return _read("adjectives").split(), _read("nouns").split()


def _word(rng: random.Random) -> str:
    adjectives, nouns = _parts()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


_MAKE: dict[Kind, Callable[[random.Random], str]] = {"words": _word, "numbers": _number, "uuids": _uuid}


def distinct(kind: Kind, rng: random.Random) -> Iterator[str]:
    """Draw names or values for ever, no two alike.

    Parameters
    ----------
    kind : {"words", "numbers", "uuids"}
        ``amber-lantern`` (of about 600,000), seven digits, or a version 4 UUID.
    rng : random.Random
        Where they come from.
    """
    seen: set[str] = set()
    while True:
        value = _MAKE[kind](rng)
        if value not in seen:
            seen.add(value)
            yield value


@functools.cache
def _sentences() -> tuple[list[list[str]], list[int]]:
    found = [
        sentence.split() for paragraph in _read("alice").splitlines() for sentence in _SENTENCE_END.split(paragraph)
    ]
    return found, list(accumulate(map(len, found)))


def prose(words: int) -> list[str]:
    """Give the first `words` words of Alice's Adventures in Wonderland as a list of sentences, the last one cut.

    RULER hides its needles in essays by Paul Graham, which are not free; this is a novel in the public domain, 26,000
    words long. A longer text repeats it from the start, as RULER repeats the essays.
    """
    sentences, ends = _sentences()
    rounds, rest = divmod(words, ends[-1])
    whole = bisect_right(ends, rest)
    cut = rest - (ends[whole - 1] if whole else 0)
    found = sentences * rounds + sentences[:whole] + ([sentences[whole][:cut]] if cut else [])
    return [" ".join(sentence) for sentence in found]
