"""The bytes behind each token, so that the concatenated text of a trace is the text itself.

Decoding tokens one at a time loses what lies between them: a character split over two byte-level tokens decodes to
replacement characters, and SentencePiece drops a leading space. Here each token becomes the bytes it stands for.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@cache
def byte_alphabet() -> dict[str, int]:
    """Map the printable character that GPT-2's byte-level BPE writes for a byte back to that byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in set(plain)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _parts(node: Any) -> Iterator[dict[str, Any]]:
    """Every component of a tokenizers decoder or pre-tokenizer description."""
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _parts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _parts(value)


def token_style(tokenizer: Any) -> str:
    """How a tokenizer spells bytes and spaces in its tokens.

    Returns
    -------
    str
        "byte" for byte-level BPE, "sentencepiece" for ``\u2581`` and ``<0xNN>``, "other" where only decoding helps.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        if hasattr(tokenizer, "byte_decoder"):
            return "byte"
        return "sentencepiece" if hasattr(tokenizer, "sp_model") else "other"
    description = json.loads(backend.to_str())
    parts = list(_parts([description.get("decoder"), description.get("pre_tokenizer")]))
    types = {part.get("type") for part in parts}
    if "ByteLevel" in types:
        return "byte"
    replaces_space = any(
        part.get("type") == "Replace" and part.get("pattern", {}).get("String") == _SPACE for part in parts
    )
    return "sentencepiece" if replaces_space or types & {"Metaspace", "ByteFallback"} else "other"


class TokenText:
    """What each token of a tokenizer stands for; reading the tokenizer once pays where tokens come one at a time.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A transformers tokenizer, fast or slow.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._style = token_style(tokenizer)
        self._added = {int(i): str(token) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._special = set(getattr(tokenizer, "all_special_ids", ()))
        self._known = len(tokenizer)
        self._seen: dict[int, bytes] = {}

    def __call__(self, ids: Sequence[int]) -> list[bytes]:
        """Give the bytes of each token; see `token_bytes`."""
        for i in ids:
            if i not in self._seen:
                self._seen[i] = self._one(i) if 0 <= i < self._known else b""
        return [self._seen[i] for i in ids]

    def _one(self, token_id: int) -> bytes:
        """Bytes of one token that lies within the vocabulary."""
        token = self._added.get(token_id)
        if token is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token_id in self._special or (self._style == "byte" and token_id in self._added):
            return token.encode()
        if self._style == "byte":
            alphabet = byte_alphabet()
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if self._style == "sentencepiece":
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> list[bytes]:
    """Bytes of each token.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A transformers tokenizer, fast or slow.
    ids : sequence of int
        Token ids.

    Returns
    -------
    list of bytes
        Special tokens are their literal text; fragments of a character are its bytes, not replacement characters; an
        id that the tokenizer does not know (padding of the vocabulary) is empty.
    """
    return TokenText(tokenizer)(ids)
