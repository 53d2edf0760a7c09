"""``kvsim predict``, and ``kvsim analyze prediction``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.models import Chat, Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, PolicyTexts, Quiet, Ratios, at_ratios
from kvsim.cli.output import narrow_table, new_file, print_json, print_table, progress_bar, say, write_lines
from kvsim.errors import KvsimError
from kvsim.predictions import PREDICTORS, read_predictions
from kvsim.predictions import prediction as measure
from kvsim.tasks import find_task

__all__ = ["predict", "prediction"]


def predict(
    model: ModelPath,
    task: Annotated[list[str], typer.Option("--task", metavar="TASK", help="A task of `kvsim tasks`; repeatable.")],
    policy: PolicyTexts,
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file of JSON lines, a row a sample and policy.")],
    samples: Annotated[int, typer.Option(help="Samples of each task.")] = 20,
    length: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Tokens of prompt and answer; repeatable; 512.")
    ] = None,
    compression_ratio: Ratios = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, metavar="N", help="Seed of the samples.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to generate.")] = 32,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Every N-th sample from the I-th: one of N processes.")
    ] = "1/1",
    chat: Chat = False,
    dtype: Dtype = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """Answer tasks live under policies, and replay the policies on the full cache's own answers.

    `kvsim analyze prediction` says from the rows how well it does.

    Example: kvsim predict --model SmolLM2-135M-Instruct --chat --task niah_single_1 --policy ema:0.95 --out rows.jsonl
    """
    need_torch("kvsim predict", "live")
    if samples < 1:
        raise KvsimError(f"--samples must be at least 1, got {samples}")
    first, of = _shard(shard)
    indices = range(first - 1, samples, of)
    tasks = list(dict.fromkeys(find_task(name) for name in task))
    policies = at_ratios(policy, compression_ratio)
    lines: list[bytes] = []
    with new_file(out):
        network, tokenizer = load(model, dtype=dtype or "float32", device=device, quiet=quiet)

        from kvsim_traces.facts import weights_hash

        from kvsim.predict import predict_rows

        identity = weights_hash(network)
        for one in tasks:
            for tokens in dict.fromkeys(length or [512]):
                answers = predict_rows(
                    network,
                    tokenizer,
                    one,
                    policies,
                    length=tokens,
                    indices=indices,
                    seed=seed,
                    chat=chat,
                    model_hash=identity,
                    answer_tokens=answer_tokens,
                )
                with progress_bar(f"{one.name} at {tokens}", quiet=quiet) as advance:
                    for done, rows in enumerate(answers, start=1):
                        lines += [json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows]
                        advance(done, len(indices))
        write_lines(lines, out)
    say(f"wrote {out}: {len(lines)} rows")


def prediction(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Rows of `kvsim predict`, also as Parquet.")],
    budget: Annotated[
        list[str] | None, typer.Option(metavar="B", help="Only policies of this budget, such as 50%; repeatable.")
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="A table for each task, length and budget, with 95% intervals.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how well replays predict live answers: which policy is better, and which answer is right.

    AUC: of two policies of one budget on one sample with different scores, how often the predictor is higher (for the
    output error: lower) for the better one; 0.5 is chance. Rank: Spearman's correlation over policies of the mean
    score with the mean predictor.

    Example: kvsim analyze prediction notebooks/data/predict_smollm2.parquet --budget 50%
    """
    found = measure(read_predictions(files))
    budgets = list(dict.fromkeys(row["budget"] for row in found))
    for one in budget or []:
        if one not in budgets:
            raise KvsimError(f"--budget {one}: no rows of it (there are: {', '.join(budgets)})")
    found = [row for row in found if row["budget"] in (budget or budgets)]
    if as_json:
        print_json({"results": found})
        return
    if intervals:
        _print_settings(found)
        return
    for kept in dict.fromkeys(row["budget"] for row in found):
        own = [row for row in found if row["budget"] == kept]
        _print_overview(own, "auc", f"B = {kept}: AUC over pairs of policies on one sample, 0.5 is chance")
        _print_overview(own, "rank_correlation", f"B = {kept}: rank correlation over policies")
    say("live answers, greedy; predictors from open and closed replays of the full cache's own answers")


def _print_overview(rows: list[dict[str, Any]], measure: str, title: str) -> None:
    say(title)
    table = narrow_table("task")
    for name in ("length", "samples", "policies", "pairs", *(name.replace("_", "\n") for name in PREDICTORS)):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        own = {row["predictor"]: row for row in rows if (row["task"], row["length"]) == (task, length)}
        first = next(iter(own.values()))
        cells = [str(first[name]) for name in ("length", "samples", "policies", "pairs")]
        values = [own[name][measure] if name in own else None for name in PREDICTORS]
        table.add_row(task, *cells, *("-" if value is None else f"{value:.2f}" for value in values))
    print_table(table)


def _print_settings(found: list[dict[str, Any]]) -> None:
    for setting in dict.fromkeys((row["task"], row["length"], row["budget"]) for row in found):
        own = [row for row in found if (row["task"], row["length"], row["budget"]) == setting]
        task, length, budget = setting
        say(f"{task} at {length} tokens, B = {budget}: {own[0]['samples']} samples, {own[0]['policies']} policies")
        table = narrow_table("predictor")
        for name in ("rank", "AUC", "pairs"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in own:
            numbers = [_with_interval(row, name) for name in ("rank_correlation", "auc")]
            table.add_row(row["predictor"].replace("_", " "), *numbers, str(row["pairs"]))
        print_table(table)
    say("rank: Spearman over policies; AUC over pairs of policies on one sample, 0.5 is chance; [95% intervals]")


def _with_interval(row: dict[str, Any], name: str) -> str:
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")


def _shard(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdecimal() and of.isdecimal() and 1 <= int(first) <= int(of)):
        raise KvsimError(f"--shard must be I/N with I from 1 to N, such as 3/8, got {text!r}")
    return int(first), int(of)
