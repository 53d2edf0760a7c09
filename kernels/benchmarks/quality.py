"""Answer needle tasks under policies on a GPU, by several processes, and compare some answers with the plain form's.

    python kernels/benchmarks/quality.py MODEL --out quality_h200.jsonl --samples 50
    python kernels/benchmarks/quality.py --table quality_h200.jsonl

The first answers what FILE.jsonl lacks, in at most about ``--seconds``, and writes means, paired differences, checks
and machine to FILE.json; the second prints the tables of a file in Markdown. A process takes a share of the questions
and answers up to 16 of them at once under one policy after the other (`kvsim.evaluate`, engine triton).
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from kvsim.evaluations import comparisons, engine_of, full_refresh, key_of
from kvsim.policy import parse
from kvsim.tasks import TASKS

TASK_TOKENS = {"niah_single_1": 16, "niah_multikey_1": 16, "niah_multivalue": 48, "niah_multiquery": 48}
"""Tasks, and how many tokens an answer may have: one number of seven digits, or four."""

LENGTHS = (512, 1024, 2048)
POLICIES = ("ema:0.95", "ema:0.8", "ema:0.8/refresh=4", "score-free", "tova", "streaming:4")
RATIO = "0.9"
ROWS = 16


def policies(names: list[str]) -> list[str]:
    """Give policies with their budgets, the full cache first, and full refresh before what is lazy."""
    from kvsim.budget import Budget

    given = [parse(name).with_budget(Budget.from_compression_ratio(RATIO)) for name in names]
    found = [parse("full")]
    for policy in given:
        lazy = full_refresh(policy)
        found += [policy] if lazy is None else [lazy, policy]
    return list(dict.fromkeys(map(str, found)))


def units(options: argparse.Namespace) -> list[tuple[str, int, list[int]]]:
    """Give pieces of work of about one cost for each length, the longest first: task, length, indices."""
    parts = -(-options.samples // ROWS)
    pieces = [list(range(options.samples))[part::parts] for part in range(parts)]
    lengths = sorted(options.length, reverse=True)
    return [(task, length, piece) for length, piece, task in product(lengths, pieces, options.task)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows; the last line may be torn."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    rows = [json.loads(line) for line in lines[:-1] if line]
    return list({key_of(row): row for row in rows}.values())


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows while no other process does; a torn line of a killed one is ended first."""
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def work(options: argparse.Namespace) -> None:
    """Answer one process's share, then compare some of it with the plain form."""
    import torch
    from kvsim_traces.facts import weights_hash
    from kvsim_traces.loading import load_model

    from kvsim.evaluate import evaluate

    end = options.until
    torch.set_num_threads(2)
    model, tokenizer = load_model(options.model, dtype="float32", device=options.device)
    identity, chat = weights_hash(model), tokenizer.chat_template is not None
    known = {key_of(row): row for row in read_rows(options.out) if engine_of(row) == "triton"}
    asked, done = policies(options.policy), []
    for number, (task, length, indices) in enumerate(units(options)):
        if number % options.workers != options.worker:
            continue
        if time.time() > end:
            print(f"worker {options.worker}: {task} at {length} not started: time is over", flush=True)
            continue
        start, keys = time.time(), list[tuple[Any, ...]]()

        def missing(key: dict[str, Any], keys: list[tuple[Any, ...]] = keys) -> bool:
            keys.append(key_of(key))
            return keys[-1] not in known

        try:
            answers = evaluate(
                model, tokenizer, TASKS[task], asked, length=length, indices=indices, chat=chat, model_hash=identity,
                answer_tokens=TASK_TOKENS[task], wanted=missing, engine="triton",
            )  # fmt: skip
            fresh = [row for own in answers for row in own]
        except Exception as error:
            print(f"worker {options.worker}: {task} at {length}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        if fresh:
            append(options.out, fresh)
        known.update((key_of(row), row) for row in fresh)
        done.append((task, length, indices[0], [known[key] for key in keys]))
        print(f"worker {options.worker}: {task} at {length}: {len(fresh)} in {time.time() - start:.1f} s", flush=True)
    for task, length, index, rows in done[: options.check]:
        if time.time() > end:
            break
        own = [row for row in rows if row["index"] == index]
        try:
            append(options.out.with_suffix(".check.jsonl"), list(checked(model, tokenizer, task, length, own, chat)))
        except Exception as error:
            print(f"worker {options.worker}: check: {type(error).__name__}: {error}"[:500], flush=True)


def checked(
    model: Any, tokenizer: Any, task: str, length: int, rows: list[dict[str, Any]], chat: bool
) -> Iterator[dict[str, Any]]:
    """Answer one question by the plain form under the policies of some rows; give what is equal."""
    from kvsim_traces.recorder import eos_tokens

    from kvsim.evaluate import survival
    from kvsim.live import decode, prefill
    from kvsim.questions import ask, counter

    first = rows[0]
    sample = TASKS[task].sample(first["index"], length, counter(tokenizer, chat=chat), seed=first["seed"])
    question = ask(tokenizer, sample, chat=chat)
    prefix = prefill(model, question.tokens)
    runs = decode(
        model, [prefix] * len(rows), [row["policy"] for row in rows],
        steps=first["answer_tokens"], stop=eos_tokens(model, tokenizer),
    )  # fmt: skip
    for row, run in zip(rows, runs, strict=True):
        text = tokenizer.decode(run.tokens, skip_special_tokens=True)
        same = text == row["answer"] and len(run.tokens) == row["steps"]
        yield {
            **{name: row[name] for name in ("task", "length", "index", "policy", "question_hash")},
            "answer": row["answer"],
            "plain_answer": text,
            "same_answer": same,
            "same_survival": survival(run.evicted_at, question) == row["survival"],
            "near_ties": row["near_ties"],
            "plain_near_ties": run.near_ties,
        }


def tables(rows: list[dict[str, Any]]) -> str:
    """Give a Markdown table for each length: mean scores by task, their mean, and its paired differences."""
    found, lines = comparisons(rows), []
    tasks = [task for task in TASKS if any(row["task"] == task for row in found)]
    for length in sorted({row["length"] for row in found}):
        own = [row for row in found if row["length"] == length]
        counts = sorted({row["samples"] for row in own if row["task"] != "Avg"})
        lines += ["", f"{length} tokens, {' to '.join(map(str, counts))} samples of each task:", ""]
        titles = ["policy", *tasks, "mean", "less full cache [95%]", "p", "less full refresh [95%]", "p", "needle held"]
        lines += [f"| {' | '.join(titles)} |", f"| --- |{' ---: |' * (len(titles) - 1)}"]
        for policy in dict.fromkeys(row["policy"] for row in own):
            by_task = {row["task"]: row for row in own if row["policy"] == policy}
            mean = by_task.get("Avg") or next(iter(by_task.values()))
            cells = [f"{by_task[task]['score']:.1f}" if task in by_task else "-" for task in tasks]
            cells += [f"{mean['score']:.1f}", *_difference(mean, "full"), *_difference(mean, "refresh")]
            cells.append("-" if mean["survival"] is None else f"{mean['survival']:.2f}")
            lines.append(f"| `{policy.split('/budget=')[0]}` | {' | '.join(cells)} |")
    return "\n".join(lines).strip()


def _difference(row: dict[str, Any], name: str) -> list[str]:
    delta, low, high, p = (row[f"{name}_{part}"] for part in ("delta", "low", "high", "p"))
    if delta is None:
        return ["-", "-"]
    interval = "" if low is None else f" [{low:+.1f}, {high:+.1f}]"
    return [f"{delta + 0.0:+.1f}{interval}", "<.001" if p < 0.001 else f"{p:.3f}"]


def summary(options: argparse.Namespace, seconds: float, answered: int) -> dict[str, Any]:
    """Put together what a file says."""
    rows = read_rows(options.out)
    checks = options.out.with_suffix(".check.jsonl")
    compared = [json.loads(line) for line in checks.read_text().splitlines()] if checks.exists() else []
    compared = list({(row["question_hash"], row["policy"]): row for row in compared}.values())
    wanted = len(policies(options.policy)) * options.samples * len(options.task) * len(options.length)
    found = {
        "command": " ".join(["python", "kernels/benchmarks/quality.py", *sys.argv[1:]]),
        "answers": len(rows),
        "answers_wanted": wanted,
        "answered_now": answered,
        "seconds": round(seconds, 1),
        "workers": options.workers,
        "compression_ratio": RATIO,
        "answer_tokens": {task: TASK_TOKENS[task] for task in options.task},
        "results": comparisons(rows),
        "checked": len(compared),
        "checked_same_answer": sum(row["same_answer"] for row in compared),
        "checked_same_survival": sum(row["same_survival"] for row in compared),
        "differences": [row for row in compared if not (row["same_answer"] and row["same_survival"])],
    }
    if options.device != "cpu":
        from kvsim.bench_live import machine

        found["machine"] = {**machine(options.device), "command": found.pop("command")}
    return found


def main() -> None:
    """Run the processes, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="model folder or GGUF file")
    parser.add_argument("--out", type=Path, help="JSON lines; what they hold already is not run again")
    parser.add_argument("--table", type=Path, help="print the tables of such a file, and run nothing")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=270, help="start nothing new after so long")
    parser.add_argument(
        "--check", type=int, default=2, help="questions of each process that the plain form answers too"
    )
    parser.add_argument("--task", nargs="+", default=list(TASK_TOKENS), choices=list(TASK_TOKENS))
    parser.add_argument("--length", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table is not None:
        print(tables(read_rows(options.table)))
        return
    if options.model is None or options.out is None:
        parser.error("a model and --out, or --table")
    if options.worker is not None:
        work(options)
        return
    start, before = time.time(), len(read_rows(options.out))
    command = [sys.executable, __file__, *sys.argv[1:], "--until", str(start + options.seconds), "--worker"]
    limits = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
    running = [subprocess.Popen([*command, str(number)], env=os.environ | limits) for number in range(options.workers)]
    codes = [process.wait() for process in running]
    rows = read_rows(options.out)
    report = summary(options, time.time() - start, len(rows) - before)
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(tables(rows))
    print(
        f"{report['answers']} of {report['answers_wanted']} answers, {report['answered_now']} now in "
        f"{report['seconds']} s; of {report['checked']} checked {report['checked_same_answer']} answers and "
        f"{report['checked_same_survival']} shares held are the plain form's"
    )
    for row in report["differences"]:
        print("differs:", json.dumps(row))
    if any(codes) or report["answers"] < report["answers_wanted"]:
        raise SystemExit(f"not finished: exit codes {codes}; run the same command again")


if __name__ == "__main__":
    main()
