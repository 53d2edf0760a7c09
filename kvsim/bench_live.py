"""How fast live decoding is, beside what reading the weights and the cache takes, and beside transformers' own loop.

    python -m kvsim.bench_live --out live.json

is ``kvsim bench live`` without the command line's dependencies, for a bare GPU machine.
"""

import argparse
import gc
import itertools
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from kvsim_kernels.launch import early_launch
from kvsim_traces.files import write_report

from kvsim.bench_live_checks import found_in_step, same_answers
from kvsim.bench_live_models import SHAPES, build, copy_bandwidth, loop_ms, milliseconds, random_prompt, read_bytes
from kvsim.budget import Budget
from kvsim.errors import KvsimError, unknown_name
from kvsim.live.fast.backends import ATTENTIONS
from kvsim.live.fast.decode import check_machine
from kvsim.live.fast.session import Session
from kvsim.policy import parse
from kvsim.version import __version__

__all__ = ["CONTEXTS", "SETTINGS", "bench_live", "goals", "lines", "main"]

CONTEXTS = (16384, 32768, 65536)
SETTINGS = {
    "full cache": "full",
    "score every step": "ema:0.8",
    "every 4th": "ema:0.8/refresh=4",
    "first step only": "ema:0.8/refresh=first",
    "no eviction": "random:0/when=prefill",
}
"""Name and policy of each setting. "no eviction" keeps the cut cache and grows: neither scores nor evicts."""

WARM = 10
RATIO = "0.9"


def bench_live(
    *,
    models: Sequence[str] = tuple(SHAPES),
    contexts: Sequence[int] = CONTEXTS,
    settings: Sequence[str] = tuple(SETTINGS),
    attentions: Sequence[str] = ("triton",),
    replays: int = 40,
    seconds: float = 330.0,
    device: str = "cuda",
    shapes: dict[str, dict[str, Any]] | None = None,
    check: bool = True,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time decode steps of models with random weights over caches of random keys and values, in bfloat16.

    Parameters
    ----------
    models, contexts, settings : sequence
        Names in `SHAPES`, tokens of the prompt, names in `SETTINGS`.
    attentions : sequence of str
        Who computes the attention's output, each in a row of its own; names in `kvsim.live.fast.backends.ATTENTIONS`.
    replays : int
        Steps timed in each setting, at least 30 for a median that counts; each is one replay of a CUDA graph.
    seconds : float
        No setting is started after this time.
    device : str
    shapes : dict, optional
        Instead of `SHAPES`.
    check : bool
        First compare with the plain form, and look into steps for PyTorch's attention and waits for the GPU.
    progress : callable, optional
        Called with a line about each row.

    Returns
    -------
    dict
        ``machine``, ``copy_tb_s`` (bandwidth of a copy, bytes read and written), ``answers`` and ``steps`` (the
        checks), ``rows``, ``goals`` and ``wrong`` (what must make the benchmark fail). A row has ``ms`` (median of a
        token, scored and unscored steps in the policy's proportion), ``floor_ms`` (bytes of the weights without the
        embedding table and of the cache visible at the last step, over the copy's bandwidth), ``of_floor`` (floor over
        time), ``loop_ms`` (transformers' loop over as many cached tokens, with scores in PyTorch; without for settings
        that evict nothing), and the bytes allocated before and after the first step. What went wrong is in ``error``.

    Raises
    ------
    KvsimError
        If there is no GPU, or no triton.
    """
    for attention in attentions:
        if attention not in ATTENTIONS:
            raise unknown_name("attention", attention, ATTENTIONS)
    check_machine(torch.device(device))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KvsimError("kvsim bench live needs a CUDA GPU, and PyTorch finds none here")
    start = time.monotonic()
    known = SHAPES if shapes is None else shapes
    say = progress or (lambda line: None)
    report: dict[str, Any] = {"machine": machine(device), "replays": replays, "ratio": RATIO, "wrong": []}
    report["copy_tb_s"] = copy_bandwidth(device, gigabytes=4.0 if device == "cuda" else 0.01) / 1e12
    report["rows"], report["steps"] = [], {}
    if check:
        report["answers"] = _tried(same_answers, device)
        report["wrong"] += _wrong_answers(report["answers"])
        say(f"beside the plain form: {report['answers']}")
    for name in models:
        made = _tried(_built, known[name], device)
        if "error" in made:
            report["rows"].append({"model": name, **made})
            say(_line(report["rows"][-1]))
            continue
        if check and device.startswith("cuda"):
            for attention in attentions:
                looked = _tried(_look, made["model"], attention)
                label = name if attention == "triton" else f"{name}, {attention}"
                report["steps"][label] = looked
                say(f"{label}, in a step: {looked}")
                report["wrong"] += [f"{label}: {word} inside a step" for word in looked.get("wrong", [])]
                if attention == "triton" and not looked.get("ours"):
                    report["wrong"].append(f"{name}: our attention was not seen in a profiled step")
        for length in contexts:
            loops: dict[tuple[int, bool], float] = {}
            for setting, attention in itertools.product(settings, attentions):
                row: dict[str, Any] = {"model": name, "context": length, "setting": setting, "attention": attention}
                if time.monotonic() - start > seconds:
                    row["error"] = f"not started: {seconds:g} seconds are over"
                else:
                    given = made["model"], length, setting, attention, replays, report["copy_tb_s"], loops
                    row |= _tried(_measure, *given)
                report["rows"].append(row)
                say(_line(row))
        made.clear()
        _free()
    report["goals"] = goals(report["rows"])
    report["seconds"] = round(time.monotonic() - start, 1)
    return report


def _measure(
    model: Any,
    length: int,
    setting: str,
    attention: str,
    replays: int,
    tb_s: float,
    loops: dict[tuple[int, bool], float],
) -> dict[str, Any]:
    """Time one setting; the prompt is made and let go here."""
    policy = parse(SETTINGS[setting]).with_budget(Budget.parse("10%"))
    device = str(model.lm_head.weight.device)
    prompt = random_prompt(model, length)
    session = Session(model, [prompt], [policy], steps=WARM + replays, attention=attention)
    row: dict[str, Any] = {"policy": str(policy)}
    with session.attached():
        session.tokens.fill_(5)
        row["allocated_before"] = session.allocated_bytes
        session.step()
        row["allocated_after"] = session.allocated_bytes
        row["cache_bytes"] = session.cache_bytes
        for _ in range(WARM - 1):
            session.step()
        times = milliseconds(session.step, replays, device)
        # Lengths are the next step's already: one more where the cache grows.
        visible = int(session.layers[0].lengths[0]) - (session.ranks is None)
    is_scored = [session.rule.evicts and bool(session.rule.scored[WARM + t]) for t in range(replays)]
    parts = {
        name: [ms for ms, own in zip(times, is_scored, strict=True) if own == wanted]
        for name, wanted in (("scored_ms", True), ("unscored_ms", False))
    }
    row |= {name: statistics.median(own) for name, own in parts.items() if own}
    row["ms"] = sum(len(own) * statistics.median(own) for own in parts.values() if own) / len(times)
    row["fastest_ms"], row["slowest_ms"] = min(times), max(times)
    weights, cache = read_bytes(model, visible)
    row |= {"visible": visible, "weight_bytes": weights, "visible_bytes": cache}
    row["floor_ms"] = 1e3 * (weights + cache) / (tb_s * 1e12)
    row["of_floor"] = row["floor_ms"] / row["ms"]
    scores = session.rule.evicts
    slots = min(visible, length)
    if (slots, scores) not in loops:
        loops[slots, scores] = loop_ms(model, prompt, slots, scored=scores)
    row["loop_ms"] = loops[slots, scores]
    row["of_loop"] = row["loop_ms"] / row["ms"]
    return row


def goals(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Give what the goals speak of, at the longest context of the first model: each a number, and whether it is met."""
    done = [row for row in rows if "ms" in row and row.get("attention", "triton") == "triton"]
    if not done:
        return {}
    longest = max(row["context"] for row in done if row["model"] == done[0]["model"])
    own = {row["setting"]: row for row in done if row["context"] == longest and row["model"] == done[0]["model"]}
    every, first = own.get("score every step"), own.get("first step only")
    found: dict[str, Any] = {}
    if every:
        found["of_floor"] = {"value": every["of_floor"], "goal": "at least 0.70", "met": every["of_floor"] >= 0.7}
        found["of_loop"] = {"value": every["of_loop"], "goal": "at least 5", "met": every["of_loop"] >= 5}
    if every and first:
        cost = every["ms"] / first["ms"] - 1
        found["cost_of_scoring"] = {"value": cost, "goal": "at most 0.03", "met": cost <= 0.03}
    return found


def _look(model: Any, attention: str) -> dict[str, Any]:
    policy = str(parse("ema:0.8/refresh=4").with_budget(Budget(256)))
    return found_in_step(model, policy, length=2048, attention=attention)


def _wrong_answers(answers: dict[str, Any]) -> list[str]:
    if "error" in answers:
        return [f"answers: {answers['error']}"]
    wrong = []
    if answers["moved"] > 2 * answers["near_ties"]:
        wrong.append(f"{answers['moved']} evictions moved, and only {answers['near_ties']} near-ties were counted")
    if not answers["logits_error"] < 1e-3:
        wrong.append(f"logits differ by {answers['logits_error']:.2g} of the largest")
    return wrong


def _built(shape: dict[str, Any], device: str) -> dict[str, Any]:
    return {"model": build(shape, device, torch.bfloat16)}


def _tried(action: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Give what an action gives, or the error it ended with."""
    try:
        return action(*given)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    finally:
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine(device: str) -> dict[str, Any]:
    """Say what a number was measured on, and with what."""
    import transformers
    import triton

    found: dict[str, Any] = {
        "command": " ".join(["python", "-m", "kvsim.bench_live", *sys.argv[1:]]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "kvsim": __version__,
    }
    if device.startswith("cuda"):
        early = early_launch(torch.device(device))["EARLY"]
        found["launches"] = "early" if early else "one after the other"
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda, "driver": _driver()}
    return found


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    asked = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip().partition("\n")[0] or "unknown"


HEADER = "model         context setting           attention  visible      ms  floor  of it   loop     x"


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:13} {row.get('context', ''):>7} {row.get('setting', ''):17} {row.get('attention', ''):10}"
    if "error" in row:
        return f"{head} {row['error']}"
    return (
        f"{head} {row['visible']:7} {row['ms']:7.3f} {row['floor_ms']:6.2f} {row['of_floor']:6.1%} "
        f"{row['loop_ms']:6.1f} {row['of_loop']:5.1f}"
    )


def lines(report: dict[str, Any]) -> list[str]:
    """Give a report as lines for people."""
    facts = [f"{name}: {value}" for name, value in report["machine"].items()]
    facts.append(f"copy: {report['copy_tb_s']:.2f} TB/s; {RATIO} of each prompt removed but for 'full cache'")
    aims = [
        f"{name} {aim['value']:.3f}, goal {aim['goal']}: {'met' if aim['met'] else 'NOT met'}"
        for name, aim in report["goals"].items()
    ]
    return [*facts, HEADER, *(_line(row) for row in report["rows"]), *aims, *(f"WRONG: {x}" for x in report["wrong"])]


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where something was wrong, 2 where it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.bench_live", description=bench_live.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", action="append", choices=list(SHAPES), help="repeatable; all if not given")
    parser.add_argument("--context", action="append", type=int, help="repeatable; 16384, 32768 and 65536")
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="repeatable; all if not given")
    parser.add_argument("--attention", action="append", choices=ATTENTIONS, help="repeatable; triton if not given")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=330.0)
    given = parser.parse_args(words)
    try:
        report = bench_live(
            models=given.model or tuple(SHAPES),
            contexts=given.context or CONTEXTS,
            settings=given.setting or tuple(SETTINGS),
            attentions=given.attention or ("triton",),
            replays=given.replays,
            seconds=given.seconds,
            device=given.device,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except KvsimError as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(report)))
    if given.out is not None:
        write_report(given.out, report, allow_nan=True)
    return 1 if report["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
