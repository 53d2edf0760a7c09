"""Does a replay predict what the model will answer? Live scores beside what replays said of the same samples."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsim.correlation import spearman
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse

__all__ = ["PREDICTORS", "auc", "predict_rows", "prediction"]

PREDICTORS = {
    "open_kept_mass": 1,
    "open_survival": 1,
    "open_output_error": -1,
    "closed_kept_mass": 1,
    "closed_survival": 1,
    "closed_output_error": -1,
}
"""What a replay says, and whether more of it should mean a better answer."""


def predict_rows(
    model: Any,
    tokenizer: Any,
    task: Any,
    policies: Items[Policy | str],
    *,
    length: int,
    indices: Items[int],
    seed: int = 0,
    chat: bool = False,
    answer_tokens: int | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Answer samples live under every policy, and replay the policies on the full cache's answer to the same samples.

    The recording is the full cache's own run: the question, and the answer that the model gives with everything in
    view. Open and closed loop replay the policies on it; neither sees what the policies' own runs wrote.

    Parameters
    ----------
    model, tokenizer, task, policies, length, indices, seed, chat, answer_tokens
        As for `kvsim.evaluate.evaluate`.

    Yields
    ------
    list of dict
        A row for each policy of a sample: ``task``, ``length``, ``index``, ``policy``, ``score``, ``full_score``,
        ``exact`` (whether the closed loop settled), ``passes``, the keys of `PREDICTORS` (survival None without
        needles), and ``live_kept_mass``, ``live_survival``.
    """
    from kvsim.engines.reference import run as replay_reference
    from kvsim.evaluate import answer_row, ask, counter, stop_tokens
    from kvsim.live import decode, prefill
    from kvsim.live.closed_loop import closed_loop

    parsed = [parse(one) if isinstance(one, str) else one for one in policies]
    count, stops = counter(tokenizer, chat=chat), stop_tokens(model, tokenizer)
    for index in indices:
        sample = task.sample(index, length, count, seed=seed)
        question = ask(tokenizer, sample, chat=chat)
        prefix = prefill(model, question.tokens)
        runs = decode(
            model,
            [prefix] * (len(parsed) + 1),
            ["full", *parsed],
            steps=answer_tokens or sample.answer_tokens,
            stop=stops,
        )
        full, recording = runs[0], runs[0].sequence.trace
        recording.end()
        loops = closed_loop(model, prefix, full.tokens, parsed)
        full_score = answer_row(tokenizer, question, full, prefix)["score"]
        needles = sorted({position for needle in question.needles for position in needle})
        rows = []
        for policy, run, loop in zip(parsed, runs[1:], loops, strict=True):
            live = answer_row(tokenizer, question, run, prefix)
            replayed = replay_reference(recording, policy.plan(recording))
            assert replayed.evicted_at is not None
            row = {
                "task": task.name,
                "length": length,
                "index": index,
                "policy": run.policy,
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
            for name, metrics, evicted_at in (
                ("open", replayed.metrics, replayed.evicted_at),
                ("closed", loop.result.outcome.metrics, loop.result.evicted_at),
            ):
                row[f"{name}_kept_mass"] = float(metrics["kept_mass"].mean())
                row[f"{name}_output_error"] = float(metrics["output_error"].mean())
                row[f"{name}_survival"] = float(np.mean(evicted_at[:, needles] < 0)) if needles else None
            rows.append(row)
        yield rows


def prediction(rows: Items[Mapping[str, Any]], *, resamples: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Say how well each predictor orders policies of one budget, and tells their right answers from wrong ones.

    Parameters
    ----------
    rows : sequence of mapping
        From `predict_rows`; every sample with the same policies.
    resamples : int
        Bootstrap samples over the questions, for the 95% intervals.
    seed : int

    Returns
    -------
    list of dict
        For each task, length and budget, and each predictor: ``rank_correlation`` (Spearman, over policies, of the
        mean score with the mean predictor) with ``_low`` and ``_high``; ``auc``: the chance that of two policies on
        ONE sample, of which one scored higher, the predictor is on its side (ties count half), averaged over all such
        pairs; ``pairs``, their number. None where undefined (equal scores everywhere, no needles).

    Raises
    ------
    KvsimError
        If a sample lacks a policy.
    """
    found: list[dict[str, Any]] = []
    for task, length, budget in dict.fromkeys(map(_setting, rows)):
        own = [row for row in rows if _setting(row) == (task, length, budget)]
        policies = list(dict.fromkeys(row["policy"] for row in own))
        samples = list(dict.fromkeys(row["index"] for row in own))
        by_key = {(row["index"], row["policy"]): row for row in own}
        if len(by_key) != len(policies) * len(samples):
            raise KvsimError(f"{task} at {length}: every sample must have a row of every policy")
        scores = _table(by_key, samples, policies, "score")
        for name, sign in PREDICTORS.items():
            if any(row.get(name) is None for row in own):
                continue
            values = sign * _table(by_key, samples, policies, name)
            pairs, share = auc(scores, values)
            rho = _rank(scores.mean(axis=0), values.mean(axis=0))
            rng = np.random.default_rng(seed)
            drawn = [rng.integers(len(samples), size=len(samples)) for _ in range(resamples)]
            rhos = [one for d in drawn if (one := _rank(scores[d].mean(axis=0), values[d].mean(axis=0))) is not None]
            low, high = np.quantile(rhos, [0.025, 0.975]).tolist() if rho is not None and rhos else (None, None)
            found.append(
                {
                    "task": task,
                    "length": length,
                    "budget": budget,
                    "samples": len(samples),
                    "policies": len(policies),
                    "predictor": name,
                    "rank_correlation": rho,
                    "rank_correlation_low": low,
                    "rank_correlation_high": high,
                    "auc": share,
                    "pairs": pairs,
                }
            )
    return found


def auc(scores: npt.NDArray[np.float64], values: npt.NDArray[np.float64]) -> tuple[int, float | None]:
    """Chance that, of two policies with different scores on one sample, the better one has the higher value.

    Parameters
    ----------
    scores, values : array
        [samples, policies].

    Returns
    -------
    pairs : int
        How many such pairs there are.
    share : float or None
        Ties of the value count half; None without pairs.
    """
    better = scores[:, :, None] > scores[:, None, :]
    higher = values[:, :, None] > values[:, None, :]
    equal = values[:, :, None] == values[:, None, :]
    pairs = int(better.sum())
    return pairs, float((higher[better].sum() + equal[better].sum() / 2) / pairs) if pairs else None


def _setting(row: Mapping[str, Any]) -> tuple[str, int, str]:
    # Policies are compared at one budget only: that more memory keeps more and answers better is no prediction.
    return row["task"], row["length"], str(parse(row["policy"]).budget)


def _table(by_key: Mapping[Any, Any], samples: Items[Any], policies: Items[str], name: str) -> Any:
    return np.array([[by_key[sample, policy][name] for policy in policies] for sample in samples], np.float64)


def _rank(scores: Any, values: Any) -> float | None:
    rho = spearman(scores, values)
    return None if rho is None or np.isnan(rho) else float(rho)
