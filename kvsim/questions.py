"""Samples of tasks as tokens, and where among these the values stand that are asked for."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvsim.errors import KvsimError
from kvsim.tasks import Sample

__all__ = ["Question", "ask", "chat_text", "counter"]


@dataclass(frozen=True)
class Question:
    """A sample as tokens.

    Attributes
    ----------
    sample : Sample
        The text and its answers.
    tokens : list of int
        The prompt.
    needles : list of list of int
        For each value asked for, the positions of its tokens.
    """

    sample: Sample
    tokens: list[int]
    needles: list[list[int]]

    @property
    def hash(self) -> str:
        """SHA-256 of the tokens, the right answers and how they are scored."""
        facts = [self.tokens, self.sample.outputs, self.sample.metric]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @property
    def needle_positions(self) -> list[int]:
        """Positions of all values' tokens, ascending."""
        return sorted({position for needle in self.needles for position in needle})


def chat_text(tokenizer: Any, text: str) -> str:
    """Wrap a user's turn in the model's chat template, up to where the reply starts.

    Raises
    ------
    KvsimError
        If there is no template.
    """
    if tokenizer.chat_template is None:
        raise KvsimError("chat: the model's tokenizer has no chat template")
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def counter(tokenizer: Any, *, chat: bool) -> Callable[[str], int]:
    """Give a function that counts a prompt's tokens, within the chat template if it will be wrapped in one."""

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=not chat).input_ids)

    around = tokens(chat_text(tokenizer, "")) if chat else 0
    return lambda text: tokens(text) + around


def ask(tokenizer: Any, sample: Sample, *, chat: bool) -> Question:
    """Turn a sample into tokens, and say where the values that it asks for stand.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        A fast one, which knows where in the text its tokens come from.
    sample : Sample
        From `kvsim.tasks`.
    chat : bool
        Wrap the input in the model's chat template; the answer's prefix follows as the start of the reply.

    Raises
    ------
    KvsimError
        If there is no template, it changes the question's text, or the tokenizer cannot place its tokens.
    """
    if not tokenizer.is_fast:
        raise KvsimError(f"{type(tokenizer).__name__} does not say where its tokens come from; use a fast tokenizer")
    text = chat_text(tokenizer, sample.input) if chat else sample.input
    start = text.rfind(sample.input)
    if start < 0:
        raise KvsimError("the chat template changes the text of the question, so its needles cannot be placed")
    found = tokenizer(text + sample.prefix, add_special_tokens=not chat, return_offsets_mapping=True)
    needles = [
        [at for at, (a, b) in enumerate(found.offset_mapping) if max(a, start + first) < min(b, start + last)]
        for first, last in sample.needle_spans
    ]
    return Question(sample, list(found.input_ids), needles)
