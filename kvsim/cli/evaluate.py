"""``kvsim eval``."""

import contextlib
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvsim.cli.models import Chat, Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, Quiet
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget

__all__ = ["evaluate"]

SAVE_SECONDS = 20.0


def evaluate(
    model: ModelPath,
    task: Annotated[list[str], typer.Option(metavar="TASK", help="A task of `kvsim tasks`; repeatable.")],
    policy: Annotated[list[str], typer.Option(metavar="POLICY", help="Policy string such as ema:0.9; repeatable.")],
    samples: Annotated[int, typer.Option(help="Samples of each task.")] = 50,
    length: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Tokens of prompt and answer; repeatable; 1024.")
    ] = None,
    compression_ratio: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED, in [0, 1); repeatable; 0.9 by default."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens to generate; the task's own number by default.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Questions for qa_1 (SQuAD) or qa_2 (HotpotQA).")
    ] = None,
    chat: Chat = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Parquet file; what it holds already is not run again.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer tasks under policies in a real model, and compare them with the full cache, sample by sample.

    The full cache always takes part, and so does full refresh where a policy refreshes lazily.
    Decoding is greedy. Scores are 0 to 100.

    Example: kvsim eval --model SmolLM2-135M-Instruct --chat --task niah_single_1 --policy ema:0.95 --samples 50
    """
    need_torch("kvsim eval", "live")
    if samples < 1:
        raise KvsimError(f"--samples must be at least 1, got {samples}")
    from kvsim.tasks import find_task

    tasks = [find_task(name, file) for name in task]
    lengths = length or [1024]
    policies = _policies(policy, compression_ratio or ["0.9"])
    from kvsim.evaluations import comparisons, key_of, read_evaluations, write_evaluations

    held = [] if out is None else read_evaluations(out)
    network, tokenizer = load(model, dtype=dtype, device=device, quiet=quiet or as_json)

    from kvsim_traces.facts import weights_hash

    from kvsim.evaluate import evaluate as run
    from kvsim.results_file import locked

    identity = weights_hash(network)
    known = {key_of(row): row for row in held}

    def missing(key: dict[str, Any]) -> bool:
        return key_of(key) not in known

    rows: list[dict[str, Any]] = []
    saved = time.monotonic()
    with contextlib.nullcontext() if out is None else locked(out):
        for one, tokens in itertools.product(tasks, lengths):
            answers = run(
                network,
                tokenizer,
                one,
                policies,
                length=tokens,
                indices=range(samples),
                seed=seed,
                chat=chat,
                model_hash=identity,
                answer_tokens=answer_tokens,
                wanted=missing,
            )
            with progress_bar(f"{one.name} at {tokens}", quiet=quiet or as_json) as advance:
                for done, found in enumerate(answers, start=1):
                    known.update((key_of(row), row) for row in found)
                    advance(done, samples)
                    if out is not None and found and time.monotonic() - saved > SAVE_SECONDS:
                        write_evaluations(list(known.values()), out)
                        saved = time.monotonic()
        if out is not None:
            write_evaluations(list(known.values()), out)
    names = {str(one) for one in policies}
    for row in known.values():
        asked = row["policy"] in names and row["task"] in {one.name for one in tasks} and row["length"] in lengths
        same = row["model_hash"] == identity and row["seed"] == seed and row["chat"] == chat
        if asked and same and row["index"] < samples and answer_tokens in (None, row["answer_tokens"]):
            rows.append(row)
    table = comparisons(rows)
    if as_json:
        print_json({"results": table, "answers": rows})
        return
    _print(table)


def _policies(given: list[str], ratios: list[str]) -> list[Policy]:
    """Give the policies with their budgets, the full cache first and full refresh before what is compared with it."""
    from kvsim.evaluations import full_refresh

    found = {"full": parse("full")}
    for ratio in ratios:
        budget = choose_budget(ratio, None)
        for text in given:
            policy = parse(text).with_budget(budget)
            lazy = full_refresh(policy)
            found |= {str(one): one for one in (lazy, policy) if one is not None}
    return list(found.values())


def _print(rows: list[dict[str, Any]]) -> None:
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        say(f"{task} at {length} tokens, {own[0]['samples']} samples")
        table = narrow_table("policy")
        titles = ["score", "needle\nheld", "kept\nmass", "less full cache\n[95%]", "p"]
        lazy = any(row["refresh_delta"] is not None for row in own)
        titles += ["less full refresh\n[95%]", "p"] if lazy else []
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
        for row in own:
            cells = [f"{row['score']:.1f}", _cell(row["survival"]), _cell(row["kept_mass"])]
            for name in ("full", "refresh") if lazy else ("full",):
                cells += _difference(row, name)
            table.add_row(Text(row["policy"]), *cells)
        print_table(table)
    say("live, greedy; differences on the same samples; p: McNemar's exact test, or permutations for partial scores")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _difference(row: dict[str, Any], name: str) -> list[str]:
    delta = row[f"{name}_delta"]
    if delta is None:
        return ["-", "-"]
    low, high, p = row[f"{name}_low"], row[f"{name}_high"], row[f"{name}_p"]
    interval = "" if low is None else f" [{low:+.1f}, {high:+.1f}]"
    return [f"{delta + 0.0:+.1f}{interval}", "<.001" if p < 0.001 else f"{p:.3f}"]
