"""Live answers under policies, beside what replays of the policies say of the same samples."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from typing import Any

from kvsim_traces.recorder import eos_tokens

from kvsim.engines.reference import run as replay_reference
from kvsim.evaluate import answer_row, survival
from kvsim.live import decode, prefill
from kvsim.live.closed_loop import closed_loop
from kvsim.policy import Policy, parse
from kvsim.questions import ask, counter
from kvsim.replay import choose_budget
from kvsim.result import mean_of
from kvsim.tasks import Task
from kvsim.version import __version__

__all__ = ["predict_rows"]


def predict_rows(
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
) -> Iterator[list[dict[str, Any]]]:
    """Answer samples live under every policy, and replay the policies on the full cache's answer to the same samples.

    The recording is the full cache's own run: the question, and the answer that the model gives with everything in
    view. Open and closed loop replay the policies on it; neither sees what the policies' own runs wrote.

    Parameters
    ----------
    model, tokenizer, task, policies, length, indices, seed, chat, model_hash, answer_tokens
        As for `kvsim.evaluate.evaluate`.

    Yields
    ------
    list of dict
        A row for each policy of a sample: what it is a function of (``model_hash``, ``task``, ``length``, ``seed``,
        ``index``, ``policy``, ``chat``, ``answer_tokens``, ``version``), ``score``, ``full_score``, ``answer``,
        ``exact`` (whether the closed loop settled), ``passes``, the keys of `kvsim.predictions.PREDICTORS` (survival
        None without needles), and ``live_kept_mass``, ``live_survival``.
    """
    parsed = [(parse(one) if isinstance(one, str) else one).with_budget(choose_budget()) for one in policies]
    count, stops = counter(tokenizer, chat=chat), eos_tokens(model, tokenizer)
    for index in indices:
        sample = task.sample(index, length, count, seed=seed)
        question = ask(tokenizer, sample, chat=chat)
        prefix = prefill(model, question.tokens)
        steps = sample.answer_tokens if answer_tokens is None else answer_tokens
        runs = decode(model, [prefix] * (len(parsed) + 1), [parse("full"), *parsed], steps=steps, stop=stops)
        full, recording = runs[0], runs[0].sequence.trace
        recording.end()
        loops = closed_loop(model, prefix, full.tokens, parsed)
        full_score = answer_row(tokenizer, question, full)["score"]
        rows = []
        for policy, run, loop in zip(parsed, runs[1:], loops, strict=True):
            live = answer_row(tokenizer, question, run)
            row = {
                "model_hash": model_hash,
                "task": task.name,
                "length": length,
                "seed": seed,
                "index": index,
                "policy": run.policy,
                "chat": chat,
                "answer_tokens": steps,
                "version": __version__,
                "score": live["score"],
                "full_score": full_score,
                "answer": live["answer"],
                "steps": len(full.tokens),
                "exact": loop.exact,
                "passes": len(loop.passes),
                "near_ties": loop.near_ties,
                "live_kept_mass": live["kept_mass"],
                "live_survival": live["survival"],
            }
            replayed = replay_reference(recording, policy.plan(recording))
            for name, outcome in (("open", replayed), ("closed", loop.result.outcome)):
                assert outcome.evicted_at is not None
                row[f"{name}_kept_mass"] = mean_of(outcome.metrics["kept_mass"])
                row[f"{name}_output_error"] = mean_of(outcome.metrics["output_error"])
                row[f"{name}_survival"] = survival(outcome.evicted_at, question)
            rows.append(row)
        yield rows
