"""Tasks under policies in a real model: what each one answered, and what it still held of the needle."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces.recorder import eos_tokens

from kvsim.live import LiveRun, decode, prefill
from kvsim.policy import Policy, parse
from kvsim.questions import Question, ask, counter
from kvsim.replay import choose_budget
from kvsim.tasks import Task, score
from kvsim.version import __version__

__all__ = ["answer_row", "evaluate", "survival"]


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
        All of them decode a sample in one batch, from one prefill. Without a budget: compression_ratio 0.9.
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
        For each policy: the key (`kvsim.evaluations.EVAL_KEY`), ``chat``, ``score`` (0 to 100), ``answer``,
        ``prompt_length``, ``steps``, ``kept_mass``, ``survival`` (see there) and ``near_ties``.
    """
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(choose_budget()) for one in policies]
    count, stops = counter(tokenizer, chat=chat), eos_tokens(model, tokenizer)
    for index in indices:
        sample = task.sample(index, length, count, seed=seed)
        question = ask(tokenizer, sample, chat=chat)
        steps = sample.answer_tokens if answer_tokens is None else answer_tokens
        keys = [
            {
                "model_hash": model_hash,
                "task": task.name,
                "length": length,
                "seed": seed,
                "index": index,
                "question_hash": question.hash,
                "policy": str(policy),
                "depth": sample.depth,
                "answer_tokens": steps,
                "version": __version__,
            }
            for policy in parsed
        ]
        chosen = [place for place, key in enumerate(keys) if wanted is None or wanted(key)]
        if not chosen:
            yield []
            continue
        prefix = prefill(model, question.tokens)
        runs = decode(model, [prefix] * len(chosen), [parsed[place] for place in chosen], steps=steps, stop=stops)
        yield [
            keys[place] | {"chat": chat} | answer_row(tokenizer, question, run)
            for place, run in zip(chosen, runs, strict=True)
        ]


def answer_row(tokenizer: Any, question: Question, run: LiveRun) -> dict[str, Any]:
    """Score one answer."""
    text = tokenizer.decode(run.tokens, skip_special_tokens=True)
    return {
        "score": score(text, question.sample),
        "answer": text,
        "prompt_length": len(question.tokens),
        "steps": len(run.tokens),
        "kept_mass": run.result().summary()["kept_mass"],
        "survival": survival(run.evicted_at, question),
        "near_ties": run.near_ties,
    }


def survival(evicted_at: npt.NDArray[np.int32], question: Question) -> float | None:
    """Share of the asked values' tokens that is still held after the last step, averaged over groups; None without any.

    Parameters
    ----------
    evicted_at : array
        [G, L0 + T]; see `kvsim.Result.evicted_at`.
    question : Question
        What was asked.
    """
    positions = question.needle_positions
    return float(np.mean(evicted_at[:, positions] < 0)) if positions else None
