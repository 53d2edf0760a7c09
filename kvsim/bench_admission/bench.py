"""Whole models under admission beside full attention: prefill, decode and memory at long prompts.

    python -m kvsim.bench_admission --out admission.json

is ``kvsim bench admission`` without the command line's dependencies, for a bare GPU machine. WG-KV App. I: random
weights and tokens, bfloat16, one sequence; gates run in full, and a random mask of an exact share takes their decision.

What is measured, for each model and length:

- *Attention of one layer* on random queries, keys and values: vertical-slash, the gathering of admitted keys included,
  and dense causal attention by FlashAttention-2 and cuDNN (PyTorch's) and flash-attn-4 where it is installed; medians.
- *Runs*, one over a full cache and one over the dual cache: a prefill of all layers and then decode steps in the cache
  that it left. Of the whole run the peak of allocated memory is taken, weights and both phases included. Decode steps
  are whole steps in CUDA graphs: medians. The full cache is decoded by our split-K kernel, PyTorch's SDPA and
  flash-attn-4, and the quickest counts.
- Overheads are inside: the gates, the gathering of admitted keys, page tables and the filling of the pool, and in
  decoding gates, promotion and page tables. Prefills list each part's time, decode steps that of their kernels.

A prefill at a length named by `whole` runs the attention of every layer, over a full cache with FlashAttention-2. At
other lengths a run computes the attention of the first layer alone, so that its memory and all other parts are real,
and the time is *composed*: the median attention of a layer times the layers, and everything else as measured. Prefills
with cuDNN and flash-attn-4 are always composed, with the rest of the full cache's run.

Memory of both caches is that of a careful program: projections and MLP in chunks of tokens, keys and values written
where decoding reads them. Vertical-slash attention writes its output over the queries, which libraries cannot.

Recommended on an H200, each within eight minutes: ``--model llama-3.1-8b --length 400000 --whole 400000``, then
``--model llama-3.1-8b --length 100000 --length 200000 --length 500000``, then ``--model qwen3-4b --length 100000
--length 200000 --length 400000``.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from kvsim_kernels.vertical_slash.kernel import Tiling
from kvsim_traces.files import write_report

from kvsim.bench_admission.checks import attention_errors, model_errors, wrong
from kvsim.bench_admission.goals import GOAL_LENGTH, estimate_seconds, goals, lines, row_lines
from kvsim.bench_admission.models import SHAPES, SMOKE, Setting
from kvsim.bench_admission.runs import free, measure, tried
from kvsim.bench_live import machine
from kvsim.bench_live_models import build
from kvsim.costs import Shape
from kvsim.errors import KvsimError, unknown_name
from kvsim.live.fast.decode import check_machine

__all__ = ["LENGTHS", "MEASURED", "bench_admission", "from_options", "lines", "main", "smoke"]

LENGTHS = (100_000, 200_000, 400_000)
MEASURED = ("attention", "run")
USUAL = Setting()


def _check_gpu(setting: Setting) -> None:
    if setting.on_gpu and not torch.cuda.is_available():
        raise KvsimError("kvsim bench admission needs a CUDA GPU, and PyTorch finds none here; try --smoke")
    check_machine(torch.device(setting.device))


def bench_admission(
    *,
    models: Sequence[str] = tuple(SHAPES),
    lengths: Sequence[int] = LENGTHS,
    parts: Sequence[str] = MEASURED,
    whole: Sequence[int] = (),
    setting: Setting = USUAL,
    shapes: dict[str, dict[str, Any]] = SHAPES,
    check: bool = True,
    seconds: float = 480.0,
    progress: Callable[[str], None] | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure models under admission beside full attention; the module says what, and what is composed.

    Parameters
    ----------
    models : sequence of str
        Names in `shapes`.
    lengths : sequence of int
        Tokens of the prompt.
    parts : sequence of {"attention", "run"}
    whole : sequence of int
        Lengths at which prefills run the attention of every layer.
    setting : Setting
    shapes : dict
        Configs of the models.
    check : bool
        First compare with the plain form and with references.
    seconds : float
        No model and length is started after this time.
    progress : callable, optional
        Called with a line about each thing done.
    save : callable, optional
        Called with the report after each model and length.

    Returns
    -------
    dict
        ``machine``, ``rows`` (one for a model and length: ``attention``, ``runs``, ``prefill``, and their ratios,
        ``decode`` and ``memory_saved``), ``goals``, ``checks`` and ``wrong``. What failed says so in its place:
        ``"out of memory"``, or the error.

    Raises
    ------
    KvsimError
        If there is no GPU or no triton, or a name is unknown.
    """
    for name in models:
        if name not in shapes:
            raise unknown_name("model", name, shapes)
    for name in parts:
        if name not in MEASURED:
            raise unknown_name("part", name, MEASURED)
    _check_gpu(setting)
    start, say = time.monotonic(), progress or (lambda line: None)
    program = "python -m kvsim.bench_admission" if sys.argv[0].endswith(".py") else Path(sys.argv[0]).name
    report: dict[str, Any] = {
        "machine": machine(setting.device) | {"command": " ".join([program, *sys.argv[1:]])},
        "window": setting.window, "admitted": setting.admitted, "chunk": setting.chunk, "steps": setting.steps,
        "rows": [], "checks": {}, "wrong": [], "goals": [],
    }  # fmt: skip
    torch.manual_seed(0)
    for name in models:
        if check:
            _check(report, name, shapes[name], setting, say)
        made = tried(_built, shapes[name], setting)
        for length in sorted(lengths):
            row: dict[str, Any] = {"model": name, "length": length}
            report["rows"].append(row)
            if "error" in made:
                row["error"] = made["error"]
            elif time.monotonic() - start > seconds:
                row["error"] = f"not started: {seconds:g} seconds are over"
            else:
                measure(row, made["model"], parts, length in whole, setting, Shape.of_config(shapes[name], name))
            say("\n".join(row_lines(row)))
            reached = GOAL_LENGTH if setting.on_gpu else max(lengths)
            report["goals"] = [aim for own in models for aim in goals(report["rows"], own, reached)]
            report["seconds"] = round(time.monotonic() - start, 1)
            if save is not None:
                save(report)
        made.clear()
        free()
    return report


def _built(shape: dict[str, Any], setting: Setting) -> dict[str, Any]:
    return {"model": build(shape, setting.device, setting.dtype)}


def _check(
    report: dict[str, Any], name: str, shape: dict[str, Any], setting: Setting, say: Callable[[str], None]
) -> None:
    heads = shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"]
    size: dict[str, Any] = {} if setting.on_gpu else {"length": 60}
    found = {f"{name}, attention": tried(attention_errors, *heads, setting, **size)}
    if not report["checks"]:
        small: dict[str, Any] = (
            {} if setting.on_gpu else {"length": 24, "steps": 2, "kinds": ("llama",), "shape": SMOKE["tiny"]}
        )
        found["model"] = tried(model_errors, setting, **small)
    for label, errors in found.items():
        kind = "model" if label == "model" else "attention"
        failed = [str(errors["error"])] if "error" in errors else wrong(kind, errors)
        report["wrong"] += [f"{label}: {word}" for word in failed]
        say(f"checked {label}: {errors}")
    report["checks"] |= found


def smoke(progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run everything at tiny sizes on the CPU, in Triton's interpreter; its times mean nothing.

    Raises
    ------
    KvsimError
        If the environment does not ask for the interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise KvsimError("--smoke runs in Triton's interpreter: set TRITON_INTERPRET=1")
    setting = Setting(window=8, chunk=16, steps=1, warm=1, repeats=1, device="cpu", dtype=torch.float32)
    return bench_admission(
        models=["tiny"], lengths=(24, 40), whole=(40,), setting=setting, shapes=SMOKE, progress=progress
    )


def tiling_of(text: str | None) -> Tiling | None:
    """Read a tiling such as ``split=1,columns=128,stages=2``.

    Raises
    ------
    KvsimError
        If it names something else than numbers of a `Tiling`.
    """
    if text is None:
        return None
    given: dict[str, Any] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name not in Tiling.__dataclass_fields__:
            raise unknown_name("tiling", name, Tiling.__dataclass_fields__)
        if not value.isdigit():
            raise KvsimError(f"tiling: {name} takes a number, got {value!r}")
        given[name] = bool(int(value)) if isinstance(getattr(Tiling(), name), bool) else int(value)
    return Tiling(**given)


def from_options(
    *,
    models: Sequence[str] | None,
    lengths: Sequence[int] | None,
    parts: Sequence[str] | None,
    whole: Sequence[int] | None,
    sparsity: float,
    window: int,
    tiling: str | None,
    only_estimate: bool,
    is_smoke: bool,
    check: bool = True,
    seconds: float = 480.0,
    progress: Callable[[str], None],
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any] | None:
    """Run what a command line asks for, after saying how long it will take; None where only that was asked.

    Raises
    ------
    KvsimError
        If an option is out of range, or it cannot run here.
    """
    if is_smoke:
        return smoke(progress)
    models, lengths, parts, whole = models or tuple(SHAPES), lengths or LENGTHS, parts or MEASURED, whole or ()
    if not 0 < sparsity < 1:
        raise KvsimError(f"sparsity must lie between 0 and 1, got {sparsity:g}")
    if window < 1 or min(lengths) <= window:
        raise KvsimError(f"window must be at least 1 and below every length, got {window} and {min(lengths)}")
    stray = [length for length in whole if length not in lengths]
    if stray:
        raise KvsimError(f"--whole {stray[0]}: is not among the lengths: {', '.join(map(str, lengths))}")
    for known, asked, kind in ((SHAPES, models, "model"), (MEASURED, parts, "part")):
        for name in asked:
            if name not in known:
                raise unknown_name(kind, name, known)
    setting = replace(USUAL, admitted=1 - sparsity, window=window, tiling=tiling_of(tiling))
    expected = estimate_seconds(
        [Shape.of_config(SHAPES[name], name) for name in models], lengths, parts, whole, setting
    )  # fmt: skip
    said = f"about {expected / 60:.1f} minutes of an H200, checks and compilation included"
    if only_estimate:
        print(said)
        return None
    _check_gpu(setting)
    progress(said)
    return bench_admission(
        models=models, lengths=lengths, parts=parts, whole=whole, setting=setting, check=check, seconds=seconds,
        progress=progress, save=save,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 where something was wrong, 2 where it cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.bench_admission", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    parser.add_argument("--model", action="append", help=f"repeatable; {' and '.join(SHAPES)}")
    parser.add_argument("--length", action="append", type=int, help="repeatable; 100000, 200000 and 400000")
    parser.add_argument("--part", action="append", help=f"repeatable; {' and '.join(MEASURED)}")
    parser.add_argument("--whole", action="append", type=int, help="a length that is not composed; repeatable")
    parser.add_argument("--sparsity", type=float, default=0.75)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--tiling", metavar="NAME=NUMBER,...", help="of vertical-slash attention")
    parser.add_argument("--seconds", type=float, default=480.0, help="nothing is started after this time")
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--estimate", action="store_true", help="say how long it would take, and end")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, in Triton's interpreter")
    given = parser.parse_args(words)

    def save(report: dict[str, Any]) -> None:
        if given.out is not None:
            write_report(given.out, report)

    try:
        report = from_options(
            models=given.model, lengths=given.length, parts=given.part, whole=given.whole, sparsity=given.sparsity,
            window=given.window, tiling=given.tiling, only_estimate=given.estimate, is_smoke=given.smoke,
            check=not given.no_check, seconds=given.seconds, save=save,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
    except KvsimError as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    if report is None:
        return 0
    print("\n".join(lines(report)))
    save(report)
    return 1 if report["wrong"] else 0
