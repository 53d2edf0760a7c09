"""Tasks under policies in a real model: what each one answered, and what it still held of the needle."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvsim.errors import KvsimError
from kvsim.live import LiveRun, Prefix, decode, prefill
from kvsim.live.sequence import Sequence
from kvsim.policy import Policy
from kvsim.tasks import Sample, Task, score
from kvsim.version import __version__

__all__ = ["EVAL_KEY", "Question", "answer_row", "ask", "counter", "evaluate", "stop_tokens", "survival"]

EVAL_KEY = ("model_hash", "task", "length", "seed", "index", "policy", "chat", "answer_tokens", "version")
"""What a row is a function of."""


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


def counter(tokenizer: Any, *, chat: bool) -> Callable[[str], int]:
    """Give a function that counts a prompt's tokens, within the chat template if it will be wrapped in one."""
    around = len(_wrap(tokenizer, "", "", chat=chat)[0])

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=not chat).input_ids) + (around if chat else 0)

    return count


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
        If there is no template, or the tokenizer cannot place its tokens.
    """
    tokens, spans, start = _wrap(tokenizer, sample.input, sample.prefix, chat=chat)
    needles = []
    for first, last in sample.needle_spans:
        inside = [at for at, (a, b) in enumerate(spans) if a < start + last and b > start + first and b > a]
        needles.append(inside)
    return Question(sample, tokens, needles)


def _wrap(tokenizer: Any, text: str, prefix: str, *, chat: bool) -> tuple[list[int], list[tuple[int, int]], int]:
    """Give tokens, their spans of characters, and where the input starts among these."""
    start = 0
    if chat:
        if tokenizer.chat_template is None:
            raise KvsimError("--chat: the model's tokenizer has no chat template")
        message = [{"role": "user", "content": text}]
        whole = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        start = whole.rfind(text) if text else 0
        if start < 0:
            raise KvsimError("the chat template changes the text of the question, so its needles cannot be placed")
        whole += prefix
    else:
        whole = text + prefix
    if not tokenizer.is_fast:
        raise KvsimError(f"{type(tokenizer).__name__} does not say where its tokens come from; use a fast tokenizer")
    found = tokenizer(whole, add_special_tokens=not chat, return_offsets_mapping=True)
    return list(found.input_ids), [tuple(span) for span in found.offset_mapping], start


def survival(sequence: Sequence, needles: Items[Items[int]]) -> float | None:
    """Share of the needles' tokens that is still held after the last step, averaged over groups; None without any.

    Parameters
    ----------
    sequence : Sequence
        After decoding.
    needles : sequence of sequence of int
        Positions.
    """
    positions = sorted({position for needle in needles for position in needle})
    if not positions:
        return None
    return float(np.mean(sequence.evicted_at[:, positions] < 0))


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    policies: Items[Policy | str],
    *,
    length: int,
    indices: Items[int],
    seed: int = 0,
    chat: bool = False,
    model_hash: str = "",
    answer_tokens: int | None = None,
    wanted: Callable[[dict[str, Any]], bool] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Answer samples of a task under every policy, greedily; one list of rows a sample.

    Parameters
    ----------
    model, tokenizer
        As `kvsim_traces.loading.load_model` gives them.
    task : Task
        From `kvsim.tasks`.
    policies : sequence of Policy or str
        With their budgets. All of them decode a sample in one batch, from one prefill.
    length : int
        Tokens of prompt and answer.
    indices : sequence of int
        Which samples.
    seed : int
        Seed of the task.
    chat : bool
        Wrap questions in the model's chat template.
    model_hash : str
        Goes into the rows, whose key it is part of.
    answer_tokens : int, optional
        Tokens to generate, the task's own number by default.
    wanted : callable, optional
        Says of a row that has its key only whether to compute it.

    Yields
    ------
    list of dict
        For each policy: the key (`EVAL_KEY`), ``score`` (0 to 100), ``answer``, ``prompt_length``, ``steps``,
        ``kept_mass``, ``survival`` (see there), ``near_ties`` and ``depth``.
    """
    count = counter(tokenizer, chat=chat)
    stops = stop_tokens(model, tokenizer)
    for index in indices:
        sample = task.sample(index, length, count, seed=seed)
        steps = sample.answer_tokens if answer_tokens is None else answer_tokens
        keys = [
            {
                "model_hash": model_hash,
                "task": task.name,
                "length": length,
                "seed": seed,
                "index": index,
                "policy": str(policy),
                "chat": chat,
                "answer_tokens": steps,
                "version": __version__,
            }
            for policy in policies
        ]
        chosen = [place for place, key in enumerate(keys) if wanted is None or wanted(key)]
        if not chosen:
            yield []
            continue
        question = ask(tokenizer, sample, chat=chat)
        prefix = prefill(model, question.tokens)
        runs = decode(model, [prefix] * len(chosen), [policies[at] for at in chosen], steps=steps, stop=stops)
        yield [keys[at] | answer_row(tokenizer, question, run, prefix) for at, run in zip(chosen, runs, strict=True)]


def answer_row(tokenizer: Any, question: Question, run: LiveRun, prefix: Prefix) -> dict[str, Any]:
    """Score one answer."""
    sample = question.sample
    text = tokenizer.decode(run.tokens, skip_special_tokens=True)
    return {
        "score": score(text, sample),
        "answer": text,
        "prompt_length": prefix.length,
        "steps": len(run.tokens),
        "kept_mass": run.result().summary()["kept_mass"],
        "survival": survival(run.sequence, question.needles),
        "near_ties": run.near_ties,
        "depth": sample.depth,
    }


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Give the tokens that end an answer."""
    from kvsim_traces.recorder import eos_tokens

    return eos_tokens(model, tokenizer)
