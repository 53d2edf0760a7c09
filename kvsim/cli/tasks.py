"""``kvsim tasks``."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.models import load_tokenizer, need_torch
from kvsim.cli.options import AsJson
from kvsim.cli.output import narrow_table, print_json, print_table, say
from kvsim.questions import counter
from kvsim.tasks import RULER, TASKS, Sample, count_words, find_task
from kvsim.tasks.sample import CountTokens
from kvsim.tasks.task import Task

__all__ = ["tasks"]


def tasks(
    name: Annotated[str | None, typer.Argument(help="A task, to print a sample of it.")] = None,
    length: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens of prompt and answer.")] = 1024,
    index: Annotated[int, typer.Option(metavar="N", help="Which sample, from 0.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all samples.")] = 0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Model folder or .gguf file whose tokenizer counts tokens; without it words count."
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Questions for qa_1 (SQuAD) or qa_2 (HotpotQA).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks that a policy can be tried on, or print a sample of one.

    Example: kvsim tasks niah_multikey_1 --length 512 --seed 0
    """
    if name is None:
        _print_list(as_json=as_json)
        return
    task = find_task(name, file)
    count = count_words if tokenizer is None else _counter(tokenizer)
    sample = task.sample(index, length, count, seed=seed)
    if as_json:
        print_json({**sample.to_dict(), "tokens": "words" if tokenizer is None else str(tokenizer)})
    else:
        _print_sample(sample, length, words=tokenizer is None)


def _print_list(*, as_json: bool) -> None:
    entries = [_entry(task) for task in TASKS.values()]
    if as_json:
        print_json({"tasks": entries})
        return
    table = narrow_table("task")
    for column in ("what it asks for", "scored by"):
        table.add_column(column)
    table.add_column("answer\ntokens", justify="right")
    for entry in entries:
        table.add_row(entry["name"], entry["summary"], entry["metric"], str(entry["answer_tokens"]))
    print_table(table)
    say("scores are 0 to 100; all: share of the answers found; part: any answer found; rouge_l: F of ROUGE-L")
    say("kvsim tasks NAME --length 512 prints a sample; from niah_single_1 to qa_2 the tasks are RULER's")


def _entry(task: Task) -> dict[str, Any]:
    return {
        "name": task.name,
        "summary": task.summary,
        "metric": task.metric,
        "answer_tokens": task.answer_tokens,
        "ruler": task.name in RULER,
    }


def _print_sample(sample: Sample, length: int, *, words: bool) -> None:
    say(sample.input)
    say(f"prefix:{sample.prefix}", style="bold")
    for output in sample.outputs:
        say(f"output: {output}")
    for what, spans in (("needle", sample.needle_spans), ("distractor", sample.distractor_spans)):
        for start, end in spans[:10]:
            say(f"{what}: characters {start} to {end}, {sample.input[start:end]!r}")
        if len(spans) > 10:
            say(f"{what}: {len(spans) - 10} more")
    depth = "" if sample.depth is None else f", depth {sample.depth:.0f}%"
    unit = "words (no --tokenizer)" if words else "tokens"
    say(
        f"{sample.task}, sample {sample.index}, seed {sample.seed}: {sample.length} of {length} {unit}, "
        f"{sample.answer_tokens} of them for the answer{depth}"
    )


def _counter(model: Path) -> CountTokens:
    """Give a function that counts tokens with a model's tokenizer."""
    need_torch("--tokenizer", "record")
    tokenizer = load_tokenizer(model)
    return counter(tokenizer, chat=False)
