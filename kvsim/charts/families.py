"""Families of policies: those that differ only in numbers of what sets the size of the cache."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvsim.policy import AXES

__all__ = ["families_of"]

SIZES = ("budget", "protect", "when", "admit", "select")
"""Axes whose numbers set how large the cache becomes."""

_AXIS = re.compile(rf"/(?=(?:{'|'.join(AXES)})=)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?%?")


@dataclass(frozen=True)
class _Piece:
    """One name of an axis with its arguments, such as ``wgkv:gate.safetensors,tau=0.1`` of ``admit``."""

    axis: str
    place: int
    name: str
    arguments: tuple[tuple[str, str], ...]

    def numbers(self) -> Iterator[tuple[tuple[str, int, str], str]]:
        """Give what is or holds a number, by where it stands."""
        for key, text in self.arguments:
            if self.axis in SIZES and _NUMBER.search(text):
                yield (self.axis, self.place, key), text

    def write(self, left_out: Iterable[tuple[str, int, str]], sign: str) -> str:
        """Write the piece with `sign` for what is left out."""
        own = {key for axis, place, key in left_out if (axis, place) == (self.axis, self.place)}
        kept = [text for key, text in self.arguments if key not in own] + [sign] * bool(own and sign)
        return ":".join(filter(None, [self.name, ",".join(kept)]))


def families_of(policies: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Group policies that differ only in numbers of the axes that set the size of the cache.

    Numbers in the names of files count, too: a sweep may have a file for each setting.

    Returns
    -------
    dict of str to (str, str)
        By policy: its family, with ``…`` where numbers differ within it and without a budget that differs; and its own
        such numbers, joined by commas, ``default`` for one that is not written out. A policy that is alone is its own
        family and has none.

    Examples
    --------
    >>> families_of(["tova/budget=10%", "tova/budget=20%", "h2o/budget=10%"])["tova/budget=20%"]
    ('tova', '20%')
    """
    found: dict[str, list[str]] = {}
    split = {policy: _split(policy) for policy in policies}
    numbers = {policy: dict(one for piece in pieces for one in piece.numbers()) for policy, pieces in split.items()}
    for policy, pieces in split.items():
        found.setdefault(_write(pieces, numbers[policy], ""), []).append(policy)
    named: dict[str, tuple[str, str]] = {}
    for members in found.values():
        keys = dict.fromkeys(key for policy in members for key in numbers[policy])
        varying = [key for key in keys if len({numbers[policy].get(key) for policy in members}) > 1]
        longest = max(members, key=lambda policy: len(numbers[policy]))
        family = _write(split[longest], varying, "…").replace("/budget=…", "")
        for policy in members:
            named[policy] = family, ", ".join(numbers[policy].get(key, "default") for key in varying)
    return named


def _split(policy: str) -> list[_Piece]:
    head, *axes = _AXIS.split(policy)
    pieces = [_Piece("", 0, head, ())]
    for part in axes:
        axis, _, value = part.partition("=")
        for place, piece in enumerate(value.split("+")):
            name, _, rest = piece.partition(":")
            texts = rest.split(",") if rest else []
            if _NUMBER.fullmatch(name):
                name, texts = "", [name]
            keys = [text.partition("=")[0] if "=" in text else str(count) for count, text in enumerate(texts)]
            pieces.append(_Piece(axis, place, name, tuple(zip(keys, texts, strict=True))))
    return pieces


def _write(pieces: Iterable[_Piece], left_out: Iterable[tuple[str, int, str]], sign: str) -> str:
    text, left_out = "", list(left_out)
    for piece in pieces:
        joint = "" if not piece.axis else f"/{piece.axis}=" if not piece.place else "+"
        text += joint + piece.write(left_out, sign)
    return text
