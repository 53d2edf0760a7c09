"""Tokens as something that can be read: fragments of characters in hex, newlines and blanks as signs."""

import re
from dataclasses import dataclass
from typing import Literal

from kvsim_traces import Trace

__all__ = ["Displayed", "display", "display_token"]

Kind = Literal["text", "blank", "special", "bytes", "number"]

_SPECIAL = re.compile(
    r"<\|[^<>|]+\|>|<｜[^<>｜]+｜>|</?s>|<(?:bos|eos|pad|unk|mask|cls|sep)>|<(?:start|end)_of_[a-z]+>"
    r"|\[/?(?:INST|CLS|SEP|PAD|MASK|UNK|BOS|EOS)\]|<<?/?SYS>?>"
)
# Characters without a shape of their own, or that turn the direction of their neighbours.
_UNSEEN = re.compile(
    "[\u0080-\u009f\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


@dataclass(frozen=True)
class Displayed:
    """A token to be read.

    Attributes
    ----------
    text : str
        Its text: a newline as ``↵`` and the newline, other control characters as their pictures, unseen characters as
        ``⟨U+200B⟩``, bytes that are no character on their own as ``⟨0xE2⟩``.
    kind : {"text", "blank", "special", "bytes", "number"}
        ``blank``: spaces alone. ``special``: it has the form of a special token, such as ``<|im_start|>``; recordings
        do not say which are. ``bytes``: some of it is no valid UTF-8. ``number``: the recording has no text, and this
        is its id or position.
    """

    text: str
    kind: Kind


def display(trace: Trace) -> list[Displayed]:
    """Give every token of a recording to be read: its text, else its id, else its position."""
    if trace.has("text"):
        ids = trace.tokens
        known: dict[bytes, Displayed] = {}
        found = []
        for position in range(trace.num_positions):
            data = trace.token_bytes(position)
            if not data:
                number = "" if ids is None else f" {ids[position]}"
                found.append(Displayed(f"⟨empty{number}⟩", "number"))
                continue
            if data not in known:
                known[data] = display_token(data)
            found.append(known[data])
        return found
    numbers = range(trace.num_positions) if trace.tokens is None else trace.tokens.tolist()
    return [Displayed(f"{number}", "number") for number in numbers]


def display_token(data: bytes) -> Displayed:
    r"""Give the bytes of one token to be read.

    Examples
    --------
    >>> display_token(b"\xe2\x80").text
    '⟨0xE2 0x80⟩'
    """
    text, whole = _decoded(data)
    if whole and _SPECIAL.fullmatch(text):
        return Displayed(text, "special")
    if not text.strip(" "):
        return Displayed(text, "blank")
    text = "".join(map(_picture, text))
    return Displayed(_UNSEEN.sub(lambda found: f"⟨U+{ord(found[0]):04X}⟩", text), "text" if whole else "bytes")


def _decoded(data: bytes) -> tuple[str, bool]:
    """Decode, with bytes that are no UTF-8 in hex; say whether there were none."""
    parts, rest, whole = [], data, True
    while rest:
        try:
            parts.append(rest.decode())
            break
        except UnicodeDecodeError as error:
            whole = False
            parts.append(rest[: error.start].decode())
            end = error.start
            # One sign for neighbours that are all broken.
            while end < len(rest) and _is_broken(rest, end):
                end += 1
            parts.append("⟨" + " ".join(f"0x{byte:02X}" for byte in rest[error.start : end]) + "⟩")
            rest = rest[end:]
    return "".join(parts), whole


def _is_broken(data: bytes, at: int) -> bool:
    for length in range(1, 5):
        try:
            data[at : at + length].decode()
        except UnicodeDecodeError:
            continue
        return False
    return True


def _picture(char: str) -> str:
    if char == "\n":
        return "↵\n"
    if char == "\t":
        return "⇥\t"
    if ord(char) < 32:
        return chr(0x2400 + ord(char))
    return "␡" if char == "\x7f" else char
