"""``python -m kvsim.text_loss``: the command without typer, rich or polars, for machines that have torch alone."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvsim_traces.files import write_whole

from kvsim.errors import KvsimError
from kvsim.gating.data import check_length, read_texts, samples_of
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget
from kvsim.text_loss import compare, text_losses
from kvsim.version import __version__

__all__ = ["main", "measure", "table_lines"]


def measure(
    model: Any,
    tokenizer: Any,
    data: Path,
    policies: list[Policy],
    *,
    length: int,
    prefill: int,
    texts: int,
    skip: int = 0,
    compression_ratio: str | None = None,
    budget: str | None = None,
    one_pass: bool = True,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure policies on the pieces of a file's texts; see `kvsim.text_loss`.

    Parameters
    ----------
    model, tokenizer
        As `kvsim_traces.loading.load_model` gives them.
    data : Path
        .txt, or .jsonl with a ``text`` on each line; joined and cut into pieces (`kvsim.gating.data.samples_of`).
    policies : list of Policy
    length, prefill : int
        Tokens of a piece, and how many of them are its prompt.
    texts, skip : int
        Take at most so many pieces, after skipping some.
    compression_ratio, budget, one_pass
        As for `kvsim.text_loss.text_losses`.
    seed : int
        Of the intervals.
    progress : callable, optional
        Called with (texts done, texts in all).

    Returns
    -------
    dict
        ``data``, ``length``, ``prefill``, ``texts``, ``skip``, ``budget``, ``version``, ``results``
        (`kvsim.text_loss.compare`) and ``losses``, [texts][policies].

    Raises
    ------
    KvsimError
        If numbers are out of range, the file has no such piece, or the model is not made for so many tokens.
    """
    for name, number, least in (("length", length, 3), ("prefill", prefill, 1), ("texts", texts, 1), ("skip", skip, 0)):
        if number < least:
            raise KvsimError(f"{name} must be at least {least}, got {number}")
    if prefill > length - 2:
        raise KvsimError(f"prefill must leave 2 of the {length} tokens of a text, got {prefill}")
    check_length(model, length)
    pieces = samples_of(tokenizer, read_texts(data), length=length, instruction="")[skip : skip + texts]
    if not len(pieces):
        raise KvsimError(f"{data}: has no piece of {length} tokens after the first {skip}")
    found = list(
        text_losses(
            model, pieces.tolist(), policies, prompt=prefill, compression_ratio=compression_ratio, budget=budget,
            one_pass=one_pass, progress=progress,
        )
    )  # fmt: skip
    return {
        "data": str(data),
        "length": length,
        "prefill": prefill,
        "texts": len(found),
        "skip": skip,
        "budget": str(choose_budget(compression_ratio, budget)),
        "version": __version__,
        "results": compare(found, seed=seed),
        "losses": [[one.loss for one in row] for row in found],
    }


def table_lines(report: dict[str, Any]) -> list[str]:
    """Give a report as lines of text."""
    rows = report["results"]
    wide = max(len("policy"), *(len(row["policy"]) for row in rows))
    lines = [f"{'policy':{wide}}    loss    ppl  cache  share  minus first [95%]"]
    for row in rows:
        other, beside = row["against_first"], ""
        if other is not None:
            beside = f"  {other['delta']:+.4f}"
            if other["low"] is not None:
                beside += f" [{other['low']:+.4f}, {other['high']:+.4f}]"
        lines.append(
            f"{row['policy']:{wide}}  {row['loss']:.4f} {row['perplexity']:6.2f} {row['cache_tokens']:6.0f} "
            f"{row['cache_share']:6.3f}{beside}"
        )
    lines.append(
        f"{report['texts']} texts of {report['length']} tokens, the first {report['prefill']} a prompt; loss in nats a "
        "token; cache: tokens that a query sees, mean of steps and heads; share: of a full cache"
    )
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Load, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.text_loss", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True, type=Path, help=".txt, or .jsonl with a 'text' on each line")
    parser.add_argument("--policy", required=True, action="append", help="repeatable; the first is the baseline")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--compression-ratio")
    parser.add_argument("--budget")
    parser.add_argument("--step-by-step", action="store_true", help="decode even where one masked pass is the same")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the report as JSON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    from kvsim_traces.loading import load_model

    try:
        policies = [parse(text) for text in options.policy]
        model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
        report = measure(
            model, tokenizer, options.data, policies, length=options.length, prefill=options.prefill,
            texts=options.texts, skip=options.skip, compression_ratio=options.compression_ratio,
            budget=options.budget, one_pass=not options.step_by_step, seed=options.seed,
            progress=lambda done, total: print(f"{done}/{total} texts", file=sys.stderr, flush=True),
        )  # fmt: skip
    except (KvsimError, ValueError) as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    text = json.dumps(report, indent=2, allow_nan=False)
    if options.out is not None:
        write_whole(options.out, [text.encode() + b"\n"])
    print(text if options.json else "\n".join(table_lines(report)))
    return 0
