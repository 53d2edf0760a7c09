"""Tasks under policies in a real model: what each one answered, and what it still held of the needle."""

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces.recorder import eos_tokens

from kvsim.errors import unknown_name
from kvsim.live import LiveRun, decode, prefill_under
from kvsim.live.decode import ENGINES
from kvsim.live.fast.decode import check_machine
from kvsim.live.prefix import Prefix
from kvsim.policy import Policy, parse
from kvsim.questions import Question, ask, counter
from kvsim.replay import choose_budget
from kvsim.tasks import Task, score
from kvsim.version import __version__

__all__ = ["ROWS", "answer_row", "evaluate", "survival"]

ROWS = 16
"""Rows that the engine ``triton`` decodes together; its fused step takes no more."""

GRAPH_STEPS = 64
"""Steps from which on capturing a CUDA graph for a batch takes less time than it saves."""


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
    engine: str = "plain",
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
    engine : {"plain", "triton"}
        See `kvsim.live.decode`. ``triton`` takes `ROWS` samples at a time and decodes those rows together whose
        policies differ in the budget only. Evicted keys are gone then, so ``kept_mass`` is None.

    Yields
    ------
    list of dict
        For each policy: the key (`kvsim.evaluations.EVAL_KEY`), ``chat``, ``score`` (0 to 100), ``answer``,
        ``prompt_length``, ``steps``, ``kept_mass``, ``survival`` (see there), ``near_ties`` and ``engine``.

    Raises
    ------
    KvsimError
        If there is no such engine, or it cannot run here or runs no such policy.
    """
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(choose_budget()) for one in policies]
    count, stops = counter(tokenizer, chat=chat), eos_tokens(model, tokenizer)
    together = 1 if engine == "plain" else ROWS
    for start in range(0, len(indices), together):
        questions: list[Question] = []
        jobs: list[_Job] = []
        for place, index in enumerate(indices[start : start + together]):
            sample = task.sample(index, length, count, seed=seed)
            questions.append(ask(tokenizer, sample, chat=chat))
            for policy in parsed:
                key = {
                    "model_hash": model_hash,
                    "task": task.name,
                    "length": length,
                    "seed": seed,
                    "index": index,
                    "question_hash": questions[-1].hash,
                    "policy": str(policy),
                    "depth": sample.depth,
                    "answer_tokens": sample.answer_tokens if answer_tokens is None else answer_tokens,
                    "version": __version__,
                }
                if wanted is None or wanted(key):
                    jobs.append(_Job(place, policy, key))
        if jobs and engine == "triton":
            check_machine(next(model.parameters()).device)
        prefixes = _read(model, questions, jobs)
        rows: list[list[dict[str, Any]]] = [[] for _ in questions]
        for job, run in zip(jobs, _decoded(model, prefixes, jobs, stops, engine), strict=True):
            rows[job.place].append(job.key | {"chat": chat} | answer_row(tokenizer, questions[job.place], run))
        yield from rows


@dataclasses.dataclass(frozen=True)
class _Job:
    """One of the questions at hand, under a policy."""

    place: int
    policy: Policy
    key: dict[str, Any]


def _read(model: Any, questions: Items[Question], jobs: Items[_Job]) -> list[Prefix]:
    """Read the questions of jobs, each once for an admission; give every job its prompt."""
    found: dict[int, Prefix] = {}
    for place in dict.fromkeys(job.place for job in jobs):
        numbers = [number for number, job in enumerate(jobs) if job.place == place]
        policies = [jobs[number].policy for number in numbers]
        found.update(zip(numbers, prefill_under(model, questions[place].tokens, policies), strict=True))
    return [found[number] for number in range(len(jobs))]


def _decoded(model: Any, prefixes: Items[Prefix], jobs: Items[_Job], stops: Items[int], engine: str) -> list[LiveRun]:
    """Answer jobs, in their order."""
    if not jobs:
        return []
    if engine == "plain":
        return decode(model, prefixes, [job.policy for job in jobs], steps=jobs[0].key["answer_tokens"], stop=stops)
    from kvsim.live.fast import decode_fast

    alike: dict[tuple[str, int], list[int]] = {}
    for number, job in enumerate(jobs):
        bare = str(dataclasses.replace(job.policy, budget=None))
        alike.setdefault((bare, job.key["answer_tokens"]), []).append(number)
    runs: dict[int, LiveRun] = {}
    for (_, steps), numbers in alike.items():
        for start in range(0, len(numbers), ROWS):
            batch = numbers[start : start + ROWS]
            found = decode_fast(
                model, [prefixes[number] for number in batch], [jobs[number].policy for number in batch],
                steps=steps, stop=stops, graphs=None if steps >= GRAPH_STEPS else False,
            )  # fmt: skip
            runs.update(zip(batch, found, strict=True))
    return [runs[number] for number in range(len(jobs))]


def answer_row(tokenizer: Any, question: Question, run: LiveRun) -> dict[str, Any]:
    """Score one answer."""
    text = tokenizer.decode(run.tokens, skip_special_tokens=True)
    return {
        "score": score(text, question.sample),
        "answer": text,
        "prompt_length": len(question.tokens),
        "steps": len(run.tokens),
        "kept_mass": run.result().summary()["kept_mass"] if run.engine == "plain" else None,
        "survival": survival(run.evicted_at, question),
        "near_ties": run.near_ties,
        "engine": run.engine,
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
