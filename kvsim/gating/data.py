"""Texts from a file, cut into samples of tokens."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.errors import KvsimError

__all__ = ["Samples", "check_length", "order", "read_texts", "samples_of"]

Samples = npt.NDArray[np.int64]
"""[N, length] tokens."""

_BATCH = 16


def read_texts(path: str | Path) -> list[str]:
    """Read a .txt file as one text, or a .jsonl file as one text a line, each an object with ``text``.

    Raises
    ------
    KvsimError
        If the file is of another kind, cannot be read, is not UTF-8, or holds a line that is no such object, or
        nothing.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise KvsimError(f"{path}: training text is a .txt file, or a .jsonl file with a 'text' on each line")
    try:
        whole = path.read_text(encoding="utf-8")
    except OSError as error:
        raise KvsimError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise KvsimError(f"{path}: not UTF-8 text") from None
    texts = [whole]
    if path.suffix == ".jsonl":
        # Not splitlines: JSON strings may hold the other separators as they are.
        lines = enumerate(whole.split("\n"), start=1)
        texts = [_text(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise KvsimError(f"{path}: holds no text")
    return texts


def _text(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise KvsimError(f"{where}: is not JSON ({error})") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise KvsimError(f"{where}: must be an object whose 'text' is a string")
    return text


def samples_of(tokenizer: Any, texts: list[str], *, length: int, instruction: str) -> Samples:
    """Cut texts into samples of equal length, the instruction's tokens before each.

    Texts are joined with a blank line between them, so that short ones are not lost, and cut into pieces that follow
    each other; what is left at the end is dropped.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizer
        Special tokens that it begins a text with come first.
    texts : list of str
    length : int
        Tokens of a sample.
    instruction : str
        What each starts with; may be empty.

    Raises
    ------
    KvsimError
        If the instruction leaves no room, or the texts are shorter than one sample.
    """
    start = list(tokenizer(instruction).input_ids) if instruction else []
    ends = getattr(tokenizer, "eos_token_id", None)
    if start and start[-1] == ends:
        start = start[:-1]
    room = length - len(start)
    if room < 1:
        raise KvsimError(f"length {length}: the instruction alone has {len(start)} tokens")
    tokens: list[int] = []
    for first in range(0, len(texts), _BATCH):
        joined = "\n\n".join(texts[first : first + _BATCH]) + ("\n\n" if first + _BATCH < len(texts) else "")
        tokens += tokenizer(joined, add_special_tokens=False, verbose=False).input_ids
    count = len(tokens) // room
    if not count:
        raise KvsimError(f"the text has {len(tokens)} tokens, a sample of length {length} takes {room}")
    pieces = np.array(tokens[: count * room], np.int64).reshape(count, room)
    return np.hstack([np.tile(np.array(start, np.int64), (count, 1)), pieces])


def check_length(model: Any, length: int) -> None:
    """Make sure that samples are no longer than what a model is made for.

    Raises
    ------
    KvsimError
        If its config's ``max_position_embeddings`` is less than `length`.
    """
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and length > most:
        raise KvsimError(f"length {length}: the model takes at most {most} tokens")


def order(count: int, step: int, batch: int, seed: int) -> list[int]:
    """Say which samples an update takes: all of them, shuffled anew each time they have all been taken.

    Parameters
    ----------
    count : int
        Samples.
    step : int
        The update, from 0. Nothing else is remembered, so a run that resumes goes on as it would have.
    batch : int
        Samples in an update.
    seed : int
    """
    return [_shuffled(count, place // count, seed)[place % count] for place in range(step * batch, (step + 1) * batch)]


def _shuffled(count: int, epoch: int, seed: int) -> list[int]:
    found: list[int] = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count).tolist()
    return found


def digest(samples: Samples) -> str:
    """Sha256 of samples and their shape."""
    return hashlib.sha256(str(samples.shape).encode() + np.ascontiguousarray(samples, "<i8").tobytes()).hexdigest()
