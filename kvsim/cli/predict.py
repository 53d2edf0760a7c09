"""``kvsim predict``."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvsim.cli.models import Chat, Device, Dtype, ModelPath, load, need_torch
from kvsim.cli.options import AsJson, Quiet
from kvsim.cli.output import narrow_table, print_json, print_table, progress_bar, say
from kvsim.errors import KvsimError
from kvsim.policy import parse
from kvsim.replay import choose_budget

__all__ = ["predict", "prediction"]


def predict(
    model: ModelPath,
    task: Annotated[list[str], typer.Option(metavar="TASK", help="A task of `kvsim tasks`; repeatable.")],
    policy: Annotated[list[str], typer.Option(metavar="POLICY", help="Policy string such as ema:0.9; repeatable.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="New file of JSON lines, a row a sample and policy.")],
    samples: Annotated[int, typer.Option(help="Samples of each task.")] = 20,
    length: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Tokens of prompt and answer; repeatable; 512.")
    ] = None,
    compression_ratio: Annotated[
        list[str] | None,
        typer.Option(metavar="RATIO", help="Fraction of the prompt REMOVED, in [0, 1); repeatable; 0.9 by default."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
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
    if out.exists():
        raise KvsimError(f"--out {out}: exists already; name a new file")
    from kvsim.tasks import find_task

    tasks = [find_task(name) for name in task]
    budgets = [choose_budget(ratio, None) for ratio in compression_ratio or ["0.9"]]
    policies = [parse(text).with_budget(budget) for budget in budgets for text in policy]
    network, tokenizer = load(model, dtype=dtype or "float32", device=device, quiet=quiet)

    from kvsim_traces.files import os_reason, write_whole

    from kvsim.predict import predict_rows

    indices = range(first - 1, samples, of)
    lines: list[bytes] = []
    for one in tasks:
        for tokens in length or [512]:
            answers = predict_rows(
                network,
                tokenizer,
                one,
                policies,
                length=tokens,
                indices=indices,
                seed=seed,
                chat=chat,
                answer_tokens=answer_tokens,
            )
            with progress_bar(f"{one.name} at {tokens}", quiet=quiet) as advance:
                for done, rows in enumerate(answers, start=1):
                    lines += [json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows]
                    advance(done, len(indices))
    try:
        write_whole(out, lines)
    except OSError as error:
        raise KvsimError(f"{out}: cannot be written ({os_reason(error)})") from error
    say(f"wrote {out}: {len(lines)} rows")


def prediction(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON lines of `kvsim predict`.")],
    as_json: AsJson = False,
) -> None:
    """Say how well replays predict live answers: which policy is better, and which answer is right.

    rank: Spearman's correlation over policies of the mean score with the mean predictor, with 95% bootstrap intervals
    over samples. AUC: of two policies on one sample with different scores, how often the predictor is higher (for the
    output error: lower) for the better one; 0.5 is chance.

    Example: kvsim analyze prediction rows.jsonl
    """
    from kvsim.predict import prediction as measure

    rows = list(_rows(files))
    found = measure(rows)
    if as_json:
        print_json({"results": found})
        return
    table = narrow_table("predictor")
    for name in ("task", "length", "B", "samples", "policies", "rank", "95%", "AUC", "pairs"):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    for row in found:
        rho, low, high = (row[f"rank_correlation{end}"] for end in ("", "_low", "_high"))
        table.add_row(
            row["predictor"],
            row["task"],
            str(row["length"]),
            row["budget"],
            str(row["samples"]),
            str(row["policies"]),
            "-" if rho is None else f"{rho:.2f}",
            "-" if low is None else f"[{low:.2f}, {high:.2f}]",
            "-" if row["auc"] is None else f"{row['auc']:.3f}",
            str(row["pairs"]),
        )
    print_table(table)


def _rows(files: Iterable[Path]) -> Iterable[dict[str, Any]]:
    from kvsim.predict import PREDICTORS

    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise KvsimError(f"{file}: cannot be read ({error.strerror or error})") from error
        except UnicodeDecodeError:
            raise KvsimError(f"{file}: not UTF-8 text") from None
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                raise KvsimError(f"{file}: line {number} is not JSON") from None
            needed = ("task", "length", "index", "policy", "score", *PREDICTORS)
            missing = [name for name in needed if not isinstance(row, dict) or name not in row]
            if missing:
                raise KvsimError(f"{file}: line {number} is not a row of kvsim predict: it has no {missing[0]!r}")
            yield row


def _shard(text: str) -> tuple[int, int]:
    first, _, of = text.partition("/")
    if not (first.isdigit() and of.isdigit() and 1 <= int(first) <= int(of)):
        raise KvsimError(f"--shard must be I/N with I from 1 to N, such as 3/8, got {text!r}")
    return int(first), int(of)
