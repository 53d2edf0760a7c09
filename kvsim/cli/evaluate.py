"""``kvsim eval``."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.folding import PolicyText
from kvsim.cli.models import Chat, Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, PolicyTexts, Quiet, Ratios, at_ratios, budget_notes
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say, stderr
from kvsim.errors import KvsimError, unknown_name
from kvsim.evaluations import cells, comparisons, engine_of, full_refresh, key_of, read_evaluations, write_evaluations
from kvsim.policy import Policy, parse
from kvsim.results_file import locked
from kvsim.tasks import Task, find_task, needle_at

__all__ = ["evaluate"]

SAVE_SECONDS = 20.0

Rows = list[dict[str, Any]]


def evaluate(
    model: ModelPath,
    task: Annotated[list[str], typer.Option("--task", metavar="TASK", help="A task of `kvsim tasks`; repeatable.")],
    policy: PolicyTexts,
    samples: Annotated[int, typer.Option(help="Samples of each task.")] = 50,
    length: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Tokens of prompt and answer; repeatable; 1024.")
    ] = None,
    compression_ratio: Ratios = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of the samples.")] = 0,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Tokens to generate; the task's own number by default.")
    ] = None,
    depths: Annotated[
        int | None,
        typer.Option(metavar="N", help="For the task needle: a grid of lengths x N depths, from 0% to 100%."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Questions for qa_1 (SQuAD) or qa_2 (HotpotQA).")
    ] = None,
    chat: Chat = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Parquet file; what it holds already is not run again.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", metavar="ENGINE", help="plain, or triton: kernels on a CUDA GPU; kept mass is not measured."
        ),
    ] = "plain",
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Answer tasks under policies in a real model, and compare them with the full cache, sample by sample.

    The full cache always takes part, and so does full refresh where a policy refreshes lazily.
    Decoding is greedy. Scores are 0 to 100.
    With --depths, the mean F of ROUGE-L for each length and depth of the needle is printed instead.

    Example: kvsim eval --model SmolLM2-135M-Instruct --chat --task niah_single_1 --policy ema:0.95 --samples 50
    """
    need_torch("kvsim eval", "live")
    from kvsim.live.decode import ENGINES

    if samples < 1:
        raise KvsimError(f"--samples must be at least 1, got {samples}")
    if engine not in ENGINES:
        raise unknown_name("engine", engine, ENGINES)
    tasks = _tasks(task, file, depths)
    lengths = list(dict.fromkeys(length or [1024]))
    policies = _policies(at_ratios(policy, compression_ratio))
    with contextlib.nullcontext() if out is None else locked(out):
        known = {} if out is None else {key_of(row): row for row in read_evaluations(out)}
        network, tokenizer = load(model, dtype=dtype, device=device, quiet=quiet or as_json)

        from kvsim_traces.facts import weights_hash

        from kvsim.evaluate import evaluate as answers_of

        identity = weights_hash(network)
        asked: list[tuple[Any, ...]] = []
        before = {key for key, row in known.items() if engine_of(row) == engine}

        def missing(key: dict[str, Any]) -> bool:
            asked.append(key_of(key))
            return asked[-1] not in before

        save, answered = _saver(known, out), 0
        try:
            for one, tokens in itertools.product(tasks, lengths):
                answers = answers_of(
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
                    engine=engine,
                )
                with progress_bar(f"{one.name} at {tokens}", quiet=quiet or as_json) as advance:
                    for done, found in enumerate(answers, start=1):
                        known.update((key_of(row), row) for row in found)
                        answered += len(found)
                        advance(done, samples)
                        save(SAVE_SECONDS, answered)
        finally:
            save(0, answered)
    rows = [known[key] for key in asked]
    reused = sum(key in before for key in asked)
    if reused and not quiet:
        say(f"{reused} of {len(asked)} answers taken from {out}", to=stderr)
    table = comparisons(rows) if depths is None else cells(rows)
    if as_json:
        print_json({"results" if depths is None else "grid": table, "answers": rows})
        return
    names = _names(policies)
    way = "live" if engine == "plain" else f"live, engine {engine}"
    if depths is None:
        _print(table, names)
        say(
            f"{way}, greedy; differences on the same samples; "
            "p: McNemar's exact test, or permutations for partial scores"
        )
    else:
        _print_grid(table, names)
        say(f"{way}, greedy; mean F of ROUGE-L, 0 to 1, by depth of the needle and length in tokens")
    say(budget_notes(compression_ratio))


def _tasks(names: list[str], file: Path | None, depths: int | None) -> list[Task]:
    found = list(dict.fromkeys(find_task(name, file) for name in names))
    if depths is None:
        return found
    if [one.name for one in found] != ["needle"]:
        raise KvsimError(f"--depths makes a grid of the task needle alone, got {', '.join(one.name for one in found)}")
    if depths < 2:
        raise KvsimError(f"--depths must be at least 2, got {depths}")
    return [needle_at(100 * place / (depths - 1)) for place in range(depths)]


def _policies(given: list[Policy]) -> list[Policy]:
    """Put the full cache first, and full refresh before what is compared with it."""
    beside = [parse("full")]
    for policy in given:
        lazy = full_refresh(policy)
        beside += [policy] if lazy is None else [lazy, policy]
    return list(dict.fromkeys(beside))


def _saver(known: dict[tuple[Any, ...], dict[str, Any]], out: Path | None) -> Callable[[float, int], None]:
    """Give a function that writes the rows if more were answered, and the last time is so many seconds ago."""
    last, written = time.monotonic(), 0

    def save(every: float, answered: int) -> None:
        nonlocal last, written
        if out is not None and answered > written and time.monotonic() - last >= every:
            write_evaluations(list(known.values()), out)
            last, written = time.monotonic(), answered

    return save


def _names(policies: list[Policy]) -> dict[str, str]:
    """Name policies without the budget, if all have one."""
    one = len({policy.budget for policy in policies if policy.budget is not None}) <= 1
    return {str(policy): str(dataclasses.replace(policy, budget=None) if one else policy) for policy in policies}


def _print(rows: Rows, names: dict[str, str]) -> None:
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        what = "mean of the tasks" if task == "Avg" else task
        say(f"{what} at {length} tokens, {own[0]['samples']} sample{'s' if own[0]['samples'] != 1 else ''}")
        table = narrow_table("policy")
        titles = ["score", "needle\nheld", "kept\nmass", "less full cache\n[95%]", "p"]
        lazy = any(row["refresh_delta"] is not None for row in own)
        titles += ["less full refresh\n[95%]", "p"] if lazy else []
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
        for row in own:
            line = [f"{row['score']:.1f}", _cell(row["survival"]), _cell(row["kept_mass"])]
            for name in ("full", "refresh") if lazy else ("full",):
                line += _difference(row, name)
            table.add_row(PolicyText(names[row["policy"]]), *line)
        print_table(table)


def _print_grid(rows: Rows, names: dict[str, str]) -> None:
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = {(row["length"], row["depth"]): row for row in rows if row["policy"] == policy}
        mean = sum(row["rouge_l_f"] for row in own.values()) / len(own)
        say(f"{names[policy]}: {mean:.2f}, {rows[0]['samples']} samples a cell")
        table = narrow_table("depth")
        for length in lengths:
            table.add_column(str(length), justify="right", no_wrap=True)
        for depth in dict.fromkeys(depth for _, depth in own):
            table.add_row(f"{depth:.3g}%", *(f"{own[length, depth]['rouge_l_f']:.2f}" for length in lengths))
        print_table(table)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _difference(row: dict[str, Any], name: str) -> list[str]:
    delta = row[f"{name}_delta"]
    if delta is None:
        return ["-", "-"]
    low, high, p = row[f"{name}_low"], row[f"{name}_high"], row[f"{name}_p"]
    interval = "" if low is None else f" [{low:+.1f}, {high:+.1f}]"
    return [f"{delta + 0.0:+.1f}{interval}", "<.001" if p < 0.001 else f"{p:.3f}"]
