"""The command line of `kvsim.admission_quality`, its table, and the smoke test that it runs on any machine."""

import argparse
import glob
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvsim_traces.files import write_report

from kvsim.errors import KvsimError

__all__ = ["main", "table_lines"]

_COLUMNS = ("peak", "kept_mass", "output_error", "loss")


def main(arguments: list[str] | None = None) -> int:
    """Compare, print, and write one JSON file."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.smoke:
            from kvsim.admission_quality.smoke import smoke

            with tempfile.TemporaryDirectory() as directory:
                report = smoke(Path(directory))
        else:
            report = _measured(options)
    except (KvsimError, ValueError) as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    _save(options, report)
    print("\n".join(table_lines(report)))
    return 0


def _size(text: str) -> float | None:
    if text == "own":
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1:
        raise KvsimError(f"--size must be between 0 and 1, or 'own', got {text}")
    return size


def _save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_report(options.out, report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvsim.admission_quality", description=__doc__)
    parser.add_argument("--gate", nargs="+", default=[], help="write gates, such as a sweep of lambda")
    parser.add_argument("--heads", help="a file of retrieval heads; without it there is no duo")
    parser.add_argument("--window", type=int, help="local window; by default that of the gates")
    parser.add_argument("--sink", type=int, default=128, help="first positions that local and duo keep")
    parser.add_argument(
        "--size", nargs="+", default=["0.1", "0.2", "0.3", "0.5"],
        help="mean cache sizes; 'own' for those that the gates have at their own thresholds",
    )  # fmt: skip
    parser.add_argument("--budget", nargs="*", default=["25%"], help="hard budgets for admission with eviction")
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative distance of a size from its target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", nargs="+", default=[], help="recordings, qkv for output errors; globs are fine")
    parser.add_argument("--engine", default="cpu", help="replay engine")
    parser.add_argument("--model", help="a model, for next-token losses; with --data")
    parser.add_argument("--data", type=Path, help="held-out .txt, or .jsonl with a 'text' on each line")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=2048, help="how many of them are its prompt")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--skip", type=int, default=0, help="texts of the file to leave out first")
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, help="JSON file to write, again after each size and budget")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model on the CPU instead; takes no files")
    return parser


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    from kvsim_traces import open_trace

    from kvsim.admission_quality.families import Families, gate_window
    from kvsim.admission_quality.quality import quality
    from kvsim.admission_quality.recordings import Recordings
    from kvsim.budget import Budget

    if not options.gate:
        raise KvsimError("--gate: name at least one write gate")
    if not options.trace and options.model is None:
        raise KvsimError("name recordings with --trace, or a model and texts with --model and --data")
    sizes = [_size(text) for text in options.size]
    if not 0 < options.tolerance < 1:
        raise KvsimError(f"--tolerance must be between 0 and 1, got {options.tolerance:g}")
    budgets = [Budget.parse(text) for text in options.budget]
    window = gate_window(options.gate) if options.window is None else options.window
    paths = [path for pattern in options.trace for path in sorted(glob.glob(pattern)) or [pattern]]
    recordings = Recordings([open_trace(path) for path in paths], engine=options.engine) if paths else None
    texts = None if options.model is None else _texts(options)
    longest = max(place.longest for place in (recordings, texts) if place is not None)
    families = Families(
        tuple(options.gate), options.heads, window, options.sink, options.seed, longest, options.tolerance
    )
    asked = {name: getattr(options, name) for name in ("length", "prompt", "texts", "skip")}
    traces = [] if recordings is None else [{"name": one.path.name, "hash": one.hash} for one in recordings.traces]
    model = None if texts is None else {"name": Path(options.model).name, "data": options.data.name, **asked}
    facts = {"traces": traces, "live": model}
    report = quality(
        families, sizes, budgets, recordings=recordings, texts=texts, seed=options.seed, say=_progress,
        save=lambda found: _save(options, found | facts),
    )  # fmt: skip
    return report | facts


def _texts(options: argparse.Namespace) -> Any:
    from kvsim_traces.loading import load_model

    from kvsim.admission_quality.texts import LiveTexts
    from kvsim.gating.data import read_texts, samples_of

    if options.data is None:
        raise KvsimError("--model needs --data, the held-out text")
    if not 1 <= options.prompt <= options.length - 2:
        raise KvsimError(f"--prompt must be from 1 to {options.length - 2}, got {options.prompt}")
    if options.texts < 1 or options.skip < 0:
        raise KvsimError(f"--texts must be at least 1 and --skip 0, got {options.texts} and {options.skip}")
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    pieces = samples_of(tokenizer, read_texts(options.data), length=options.length, instruction="")
    chosen = pieces[options.skip : options.skip + options.texts]
    if not len(chosen):
        raise KvsimError(f"{options.data}: has no piece of {options.length} tokens after the first {options.skip}")
    return LiveTexts(model, chosen.tolist(), options.prompt)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table_lines(report: dict[str, Any]) -> list[str]:
    """Give a report's tables, verdicts and summary as lines of text."""
    lines: list[str] = []
    for section in [*report["equal_size"], *report["hard_budget"]]:
        title = f"size {section['size']:.0%}" if "size" in section else f"hard budget {section['budget']}"
        columns = [name for name in _COLUMNS if any(name in row for row in section["rows"])]
        lines += ["", f"{section['where']}, {title}"]
        if section["rows"]:
            lines.append("  " + f"{'':20}   size  " + "".join(f"{name:>14}" for name in columns) + "  policy")
        for row in section["rows"]:
            cells = "".join(_cell(row, name) for name in columns)
            lines.append(f"  {row['name']:20} {row['size']:.4f} {cells}  {row['policy']}")
        lines += [f"  {name}: left out, {why}" for name, why in section["left_out"].items()]
        lines += [f"  {one['line']}" for one in section["verdicts"]]
    return [*lines, "", *report["summary"]]


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return f"{'-':>14}"
    return f"{row[name]:14.{1 if name == 'peak' else 5}f}"
