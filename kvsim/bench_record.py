"""What recording costs a decode step on a GPU, in time and in memory: ``python -m kvsim.bench_record``."""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kvsim_traces import TraceError, TraceWriter, verify_trace
from kvsim_traces.bench import write_plain
from kvsim_traces.decoding import Decoder
from kvsim_traces.packing import StepLayout
from kvsim_traces.recorder import Recording
from kvsim_traces.request import checked

from kvsim.bench import gpu_facts, machine
from kvsim.bench_live_models import SHAPES, build
from kvsim.errors import KvsimError

__all__ = ["GOALS", "bench_record", "table"]

GOALS = {"qk": 1.1, "scores": 1.1, "heads": 1.5}
"""A recorded step over an unrecorded one; for `heads`, or what the disk takes for its bytes where that is longer."""

_SKIPPED = 2


@dataclass
class _Watch:
    """What a run of a model took: a moment before each forward, and the GPU's peak memory of prefill and decoding."""

    device: torch.device
    moments: list[Any] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def __enter__(self) -> "_Watch":
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        self.peak()

    def hook(self, *_: object) -> None:
        """Before each forward."""
        if len(self.moments) == 1:
            self.peak()
        self.clock.append(time.perf_counter())
        self.moments.append(self.moment())

    def moment(self) -> Any:
        """Mark a moment of the GPU's time, or the CPU's."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def peak(self) -> None:
        """Note the peak since the last one."""
        if self.device.type == "cuda":
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def between(self) -> list[float]:
        """Milliseconds from each forward to the next."""
        if self.device.type != "cuda":
            return [1e3 * (b - a) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in zip(self.moments, self.moments[1:], strict=False)]


def bench_record(
    directory: str | Path,
    *,
    device: str = "cuda",
    shape: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    context: int = 16384,
    steps: int = 64,
    captures: tuple[str, ...] = ("qk", "scores", "heads"),
    long_context: int = 131072,
    long_steps: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Record greedy steps of a random model after a prompt of random tokens, beside the same steps unrecorded.

    Parameters
    ----------
    directory : str or Path
        An existing directory on the disk that recordings shall go to; they are removed.
    device : str
    shape : dict, optional
        As in `kvsim.bench_live_models.SHAPES`; Llama-3.1-8B's by default.
    dtype : str
        The model's number type.
    context, steps : int
        Tokens of the prompt, and decode steps; at least 4.
    captures : tuple of str
        Captures to measure.
    long_context, long_steps : int
        A longer prompt, recorded once for its memory with capture `scores`; 0 for none.
    progress : callable, optional
        Called with (runs done, runs in all).

    Returns
    -------
    dict
        ``unrecorded`` and ``rows``, one for each capture: ``step_ms``, the median time from one step to the next on the
        GPU; ``sustained_ms``, all steps but the first up to the closed trace, over their number; ``prefill_s``;
        ``peak_mib`` of prefill and decoding, as PyTorch allocates. In ``rows`` also ``ratio`` and ``sustained_ratio``
        to the unrecorded ``step_ms``, ``extra_mib``, the larger of both peaks' differences, ``mb_per_step``, and
        ``goal_met``: ``ratio`` (``heads``: ``sustained_ratio``) is at most ``goal``. ``long`` has the same of the
        longer prompt. ``disk_mb_s`` is the rate of plain files as large as a step of heads, each flushed.
        `prompt_mass` and the last 64 queries are recorded, the check of step 1, which copies the cache, is not made.

    Raises
    ------
    KvsimError
        Without the device, or if a recording fails or is not intact.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise KvsimError(f"kvsim bench record measures a CUDA GPU, and there is none (--device {device})")
    if steps < _SKIPPED + 2:
        raise KvsimError(f"steps: at least {_SKIPPED + 2} are measured, got {steps}")
    try:
        return _measured(
            Path(directory),
            build(shape or SHAPES["llama-3.1-8b"], device, getattr(torch, dtype)),
            (context, steps),
            captures,
            (long_context, long_steps),
            progress,
        )
    except torch.OutOfMemoryError as error:
        raise KvsimError(f"the GPU is too small for this: {str(error).partition('. ')[0]}") from None
    except TraceError as error:
        raise KvsimError(str(error)) from error


def _measured(
    directory: Path,
    model: Any,
    short: tuple[int, int],
    captures: tuple[str, ...],
    long: tuple[int, int],
    progress: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    place = model.device
    (context, steps), (long_context, long_steps) = short, long
    runs = 1 + len(captures) + (2 if long_context else 0)
    done = 0

    def ran() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, runs)

    with tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-") as scratch:
        root = Path(scratch)
        disk = _disk_rate(root, model.config, context + steps)
        # Kernels are compiled before anything is timed.
        for number, capture in enumerate(captures):
            _recorded(model, place, min(context, 4096), _SKIPPED + 2, capture, root / f"warm{number}")
        plain = _unrecorded(model, place, context, steps)
        ran()
        rows = []
        for capture in captures:
            row = _beside(_recorded(model, place, context, steps, capture, root / capture), plain)
            limit = GOALS.get(capture, 1.5)
            if capture == "heads":
                limit = max(limit, row["mb_per_step"] / disk * 1e3 / plain["step_ms"])
            met = row["sustained_ratio" if capture == "heads" else "ratio"] <= limit
            rows.append({"capture": capture, **row, "goal": round(limit, 3), "goal_met": met})
            ran()
        report = {"unrecorded": plain, "rows": rows, "disk_mb_s": round(disk, 1)}
        if long_context:
            alone = _unrecorded(model, place, long_context, long_steps)
            ran()
            found = _recorded(model, place, long_context, long_steps, "scores", root / "long")
            report["long"] = {"capture": "scores", "unrecorded": alone, **_beside(found, alone)}
            ran()
    return {
        **report,
        "shape": {"context": context, "steps": steps, "long_context": long_context},
        "dtype": str(model.dtype).removeprefix("torch."),
        **gpu_facts(),
        "transformers": str(transformers.__version__),
        **machine(),
    }


def _prompt(model: Any, context: int) -> list[int]:
    vocabulary = model.config.vocab_size
    return [int(token) for token in np.random.default_rng(0).integers(vocabulary, size=context)]


def _disk_rate(root: Path, config: Any, positions: int) -> float:
    """MB/s of plain files as large as a step of heads, each flushed; the median of three times 8 files."""
    piece = 2 * config.num_hidden_layers * config.num_attention_heads * positions
    rates = []
    for number in range(3):
        start = time.perf_counter()
        write_plain(root / f"plain{number}", 8 * piece, piece)
        rates.append(8 * piece / 1e6 / (time.perf_counter() - start))
        for file in (root / f"plain{number}").iterdir():
            file.unlink()
    return float(statistics.median(rates))


def _unrecorded(model: Any, device: torch.device, context: int, steps: int) -> dict[str, Any]:
    """Prefill and decode greedily, as the recorder does, with nothing that looks on."""
    watch, decoder, prompt = _Watch(device), Decoder(model), _prompt(model, context)
    handle = model.register_forward_pre_hook(watch.hook)
    try:
        with torch.inference_mode(), watch:
            logits = decoder.prefill(prompt)
            for _ in range(steps):
                logits = decoder.step(logits.argmax().view(1))
            if device.type == "cuda":
                torch.cuda.synchronize()
            end = time.perf_counter()
    finally:
        handle.remove()
    return _figures(watch, end)


def _recorded(model: Any, device: torch.device, context: int, steps: int, capture: str, out: Path) -> dict[str, Any]:
    """Record the same run into a trace."""
    watch = _Watch(device)
    request = checked(
        out=out,
        input_ids=_prompt(model, context),
        force=None,
        steps=steps,
        capture=capture,
        prompt_queries=64,
        prompt_mass=True,
        temperature=0.0,
        seed=0,
        suppress_eos=False,
        eligible=None,
        qk_dtype="float16",
        vocab_size=model.config.vocab_size,
    )
    handle = model.register_forward_pre_hook(watch.hook)
    try:
        with torch.inference_mode(), watch:
            recording = Recording(model, request)
            manifest = recording.start(check=False)
            with TraceWriter(out, manifest, behind=recording.device is not None) as writer:
                recording.write(writer)
            end = time.perf_counter()
            recording.release()
    finally:
        handle.remove()
    report = verify_trace(out)
    if not report.ok or report.committed_steps != steps:
        problems = ", ".join(report.problems) or "steps are missing"
        raise KvsimError(f"{out.name}: the recording is not intact: {problems}")
    config = model.config
    layout = StepLayout(
        capture,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        "float16",
    )
    return _figures(watch, end) | {"mb_per_step": round(layout.nbytes(context + steps) / 1e6, 3)}


def _figures(watch: _Watch, end: float) -> dict[str, Any]:
    """Give a run's figures; its forwards are the prefill's, then one a step."""
    between, start = watch.between(), watch.clock[2]
    return {
        "step_ms": round(statistics.median(between[_SKIPPED:]), 3),
        "sustained_ms": round(1e3 * (end - start) / (len(watch.clock) - 2), 3),
        "prefill_s": round(between[0] / 1e3, 3),
        "steps_timed": len(between) - _SKIPPED,
        "peak_mib": [round(peak / 2**20) for peak in watch.peaks],
    }


def _beside(found: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    extra = [ours - theirs for ours, theirs in zip(found["peak_mib"], plain["peak_mib"], strict=True)]
    return found | {
        "ratio": round(found["step_ms"] / plain["step_ms"], 3),
        "sustained_ratio": round(found["sustained_ms"] / plain["step_ms"], 3),
        "extra_mib": max(extra, default=None),
    }


def table(report: dict[str, Any]) -> list[str]:
    """Give the lines of a report."""
    plain = report["unrecorded"]
    headings = ("ratio", 6), ("to disk", 8), ("goal", 6), ("MB a step", 9), ("extra MiB", 9)
    lines = [" ".join([f"{'capture':18} {'ms a step':>9}", *(f"{name:>{width}}" for name, width in headings)])]
    lines.append(f"{'unrecorded':18} {plain['step_ms']:9.2f} {1:6.2f}")
    named = [(row["capture"], row) for row in report["rows"]]
    if "long" in report:
        named.append((f"scores, {report['shape']['long_context']:,}", report["long"]))
    for name, row in named:
        goal = "-" if "goal" not in row else f"{row['goal']:.2f}{'' if row['goal_met'] else '!'}"
        extra = "-" if row["extra_mib"] is None else row["extra_mib"]
        lines.append(
            f"{name:18} {row['step_ms']:9.2f} {row['ratio']:6.2f} {row['sustained_ratio']:8.2f} {goal:>6} "
            f"{row['mb_per_step']:9.2f} {extra:>9}"
        )
    lines.append(f"plain files: {report['disk_mb_s']} MB/s; to disk: all steps up to the closed trace; !: goal missed")
    return lines


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.bench_record", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--directory", type=Path, help="where to write the scratch recordings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--long-context", type=int, default=131072, help="0 for none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kvsim-bench-") as scratch:
        try:
            report = bench_record(
                scratch,
                device=options.device,
                context=options.context,
                steps=options.steps,
                long_context=options.long_context,
            )
        except KvsimError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    report["command"] = " ".join(["python", "-m", "kvsim.bench_record", *sys.argv[1:]])
    print("\n".join(table(report)))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
