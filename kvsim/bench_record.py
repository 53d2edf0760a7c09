"""What recording costs a decode step on a GPU, in time and in memory: ``python -m kvsim.bench_record``."""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from kvsim_traces import TraceError
from kvsim_traces.bench import write_plain
from kvsim_traces.files import write_report

from kvsim.bench import gpu_facts, machine
from kvsim.bench_live_models import SHAPES, build
from kvsim.bench_record_runs import PROFILED, SKIPPED, Run, figures, recorded, step_mb, unrecorded
from kvsim.errors import KvsimError

__all__ = ["GOALS", "bench_record", "table"]

TURNS = 4
"""Recorded runs of a capture."""

GOALS = {"qk": 1.1, "scores": 1.1, "heads": 1.5}
"""A recorded step over an unrecorded one, by the clock and in the GPU's own time. For `heads` the clock stops when all
steps are on disk, and the goal is what the disk takes for their bytes, where that is longer."""


def bench_record(
    directory: str | Path,
    *,
    device: str = "cuda",
    shape: dict[str, Any] | None = None,
    dtype: str = "bfloat16",
    context: int = 16384,
    steps: int = 16,
    captures: tuple[str, ...] = ("qk", "scores", "heads"),
    long_context: int = 131072,
    long_steps: int = 4,
    seconds: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Record greedy steps of a random model after a prompt of random tokens, beside the same steps unrecorded.

    Parameters
    ----------
    directory : str or Path
        A directory on the disk that recordings shall go to, made if it is missing; they are removed.
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
    seconds : float, optional
        After these no further row is started, nor the longer prompt; an ``error`` in its place says so.
    progress : callable, optional
        Called with (runs done, runs in all).
    save : callable, optional
        Called with the report so far after each row and the longer prompt.

    Returns
    -------
    dict
        ``rows``, one for each capture, whose `TURNS` recorded runs each stand between two unrecorded ones: a host that
        becomes slower or quicker within seconds meets both alike. A run of each kind that compiles everything comes
        before. A row has what `kvsim.bench_record_runs.figures` gives, and so has its ``unrecorded``. A recorded run's
        ratio is its median step over the mean of those of the two runs around it; ``ratio`` is the median of these and
        ``ratio_range`` the lowest and highest; ``sustained_ratio`` likewise. ``gpu_ms``, milliseconds a step in which
        the GPU did anything (of profiled steps, not timed ones; also in ``unrecorded``), ``gpu_ratio``, and
        ``idle_share``, the part of a step in which it did nothing but wait for the host. Where that is large, what
        recording adds may hide in it, and ``gpu_ratio`` shows it. ``goal_met``: ``ratio`` (``heads``:
        ``sustained_ratio``) is at most ``goal``, and ``gpu_ratio`` at most that of `GOALS`.
        ``mb_per_step``; ``extra_mib``, the larger of both peaks' differences.
        ``seconds`` is what everything took. ``long`` has the memory and ``step_ms`` of the longer prompt, one run each.
        ``disk_mb_s`` is the rate of plain files as large as a step of heads, each flushed. GPU figures are None on a
        CPU. `prompt_mass` and the last 64 queries are recorded, the check of step 1, which copies the cache, is not
        made.

    Raises
    ------
    KvsimError
        Without the device, or if a recording fails or is not intact.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise KvsimError(f"kvsim bench record measures a CUDA GPU, and there is none (--device {device})")
    if device == "cpu" and shape is None:
        raise KvsimError("a CPU records a small shape only; kvsim bench record measures a CUDA GPU")
    if steps < SKIPPED + 2:
        raise KvsimError(f"steps: at least {SKIPPED + 2} are measured, got {steps}")
    begun = time.perf_counter()
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvsimError(f"directory {directory}: {error.strerror}") from error
    try:
        with tempfile.TemporaryDirectory(dir=directory, prefix="kvsim-bench-") as scratch:
            model = build(shape or SHAPES["llama-3.1-8b"], device, getattr(torch, dtype))
            return _Bench(
                Path(scratch), model, context, steps, captures, long_context, long_steps, begun, seconds, progress, save
            ).run()
    except torch.OutOfMemoryError as error:
        raise KvsimError(f"the GPU is too small for this: {str(error).partition('. ')[0]}") from None
    except TraceError as error:
        raise KvsimError(str(error)) from error


@dataclass
class _Bench:
    """The runs, one after the other, and what they have come to so far."""

    root: Path
    model: Any
    context: int
    steps: int
    captures: tuple[str, ...]
    long_context: int
    long_steps: int
    begun: float
    seconds: float | None
    progress: Callable[[int, int], None] | None
    save: Callable[[dict[str, Any]], None] | None
    done: int = 0
    report: dict[str, Any] = field(default_factory=lambda: {"rows": []})

    def run(self) -> dict[str, Any]:
        """Measure rows and the longer prompt while there is time."""
        disk = _disk_rate(self.root, self.model.config, self.context + self.steps)
        self.report["disk_mb_s"] = round(disk, 1)
        gpu = {capture: self._first(capture) for capture in (None, *self.captures)}
        before = self._one(None)
        for capture in self.captures:
            over = self._over()
            if over is None:
                ours, beside = [], [before]
                for _ in range(TURNS):
                    ours.append(self._one(capture))
                    beside.append(self._one(None))
                self.report["rows"].append(self._row(capture, ours, beside, (gpu[capture], gpu[None]), disk))
                before = beside[-1]
            else:
                self.report["rows"].append({"capture": capture, "error": over})
            self._keep()
        if self.long_context:
            over = self._over()
            self.report["long"] = self._long() if over is None else {"capture": "scores", "error": over}
            self._keep()
        return self._so_far()

    def _over(self) -> str | None:
        if self.seconds is None or time.perf_counter() - self.begun <= self.seconds:
            return None
        return f"not started: {self.seconds:g} seconds are over"

    def _ran(self, run: Run) -> Run:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, 2 + (1 + 2 * TURNS) * len(self.captures) + (2 if self.long_context else 0))
        return run

    def _run(self, capture: str | None, context: int, steps: int, **options: Any) -> Run:
        if capture is None:
            return self._ran(unrecorded(self.model, context, steps, **options))
        return self._ran(recorded(self.model, context, steps, capture, self.root / "run", **options))

    def _first(self, capture: str | None) -> float | None:
        """Compile what a kind of run needs, and look into it on a GPU."""
        if self.model.device.type != "cuda":
            return self._run(capture, self.context, SKIPPED + 2).gpu_ms
        return self._run(capture, self.context, SKIPPED + PROFILED + 2, profiled=True).gpu_ms

    def _one(self, capture: str | None) -> Run:
        return self._run(capture, self.context, self.steps)

    def _row(
        self,
        capture: str,
        recordings: list[Run],
        beside: list[Run],
        gpu: tuple[float | None, float | None],
        disk: float,
    ) -> dict[str, Any]:
        ours, plain = figures(recordings), figures(beside)
        ours["mb_per_step"] = step_mb(self.model.config, capture, self.context + self.steps)
        limit = GOALS.get(capture, 1.5)
        if capture == "heads":
            limit = max(limit, ours["mb_per_step"] / disk * 1e3 / plain["sustained_ms"])
        return _beside(capture, ours, plain, *gpu, limit)

    def _long(self) -> dict[str, Any]:
        alone, own = (figures([self._run(kind, self.long_context, self.long_steps)]) for kind in (None, "scores"))
        return {
            "capture": "scores",
            "mb_per_step": step_mb(self.model.config, "scores", self.long_context + self.long_steps),
            **{name: own[name] for name in ("step_ms", "steps_timed", "prefill_s", "peak_mib")},
            "extra_mib": _extra(own, alone),
            "unrecorded": {name: alone[name] for name in ("step_ms", "prefill_s", "peak_mib")},
        }

    def _keep(self) -> None:
        if self.save is not None:
            self.save(self._so_far())

    def _so_far(self) -> dict[str, Any]:
        return {
            **self.report,
            "rows": list(self.report["rows"]),
            "seconds": round(time.perf_counter() - self.begun, 1),
            "shape": {"context": self.context, "steps": self.steps, "long_context": self.long_context},
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **gpu_facts(),
            "transformers": str(transformers.__version__),
            **machine(),
        }


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


def _beside(
    capture: str,
    ours: dict[str, Any],
    plain: dict[str, Any],
    gpu: float | None,
    plain_gpu: float | None,
    limit: float,
) -> dict[str, Any]:
    """Put the figures of recorded runs beside those of unrecorded ones, and judge them."""
    single, sustained = (_in_turn(ours[name], plain[name]) for name in ("run_ms", "run_sustained_ms"))
    row = (
        {"capture": capture}
        | ours
        | {
            "ratio": round(statistics.median(single), 3),
            "ratio_range": [round(min(single), 3), round(max(single), 3)],
            "sustained_ratio": round(statistics.median(sustained), 3),
            "extra_mib": _extra(ours, plain),
            **_busy(gpu, ours["step_ms"]),
            "gpu_ratio": None if gpu is None or not plain_gpu else round(gpu / plain_gpu, 3),
            "unrecorded": plain | _busy(plain_gpu, plain["step_ms"]),
            "goal": round(limit, 3),
        }
    )
    wall = row["sustained_ratio" if capture == "heads" else "ratio"]
    met = wall <= limit and (row["gpu_ratio"] is None or row["gpu_ratio"] <= GOALS.get(capture, 1.5))
    return row | {"goal_met": met}


def _in_turn(ours: list[float], plain: list[float]) -> list[float]:
    """Divide what each run took by the mean of what the runs before and after it took."""
    return [2 * mine / (before + after) for mine, before, after in zip(ours, plain[:-1], plain[1:], strict=True)]


def _busy(gpu: float | None, step_ms: float) -> dict[str, float | None]:
    if gpu is None:
        return {"gpu_ms": None, "idle_share": None}
    return {"gpu_ms": round(gpu, 3), "idle_share": round(max(0.0, 1 - gpu / step_ms), 3)}


def _extra(ours: dict[str, Any], plain: dict[str, Any]) -> int | None:
    return max((mine - theirs for mine, theirs in zip(ours["peak_mib"], plain["peak_mib"], strict=True)), default=None)


def table(report: dict[str, Any]) -> list[str]:
    """Give the lines of a report."""
    headings = [("quartiles", 15), ("ratio", 6), ("its range", 11), ("to disk", 8), ("GPU ms", 7), ("ratio", 6)]
    headings += [("idle", 5), ("goal", 6), ("MB a step", 9), ("extra MiB", 9)]
    lines = [" ".join([f"{'capture':18} {'ms a step':>9}", *(f"{name:>{width}}" for name, width in headings)])]
    for row in report["rows"]:
        if "error" in row:
            lines.append(f"{row['capture']:18} {row['error']}")
            continue
        plain = row["unrecorded"]
        lines.append(" ".join([_timed("unrecorded", plain), f"{'':26} ", *_gpu(plain, None)]).rstrip())
        low, high = row["ratio_range"]
        wall = f"{row['ratio']:6.2f} {f'{low:.2f}-{high:.2f}':>11} {row['sustained_ratio']:8.2f}"
        goal = f"{row['goal']:.2f}{'' if row['goal_met'] else '!'}"
        extra = "-" if row["extra_mib"] is None else row["extra_mib"]
        busy = " ".join(_gpu(row, row["gpu_ratio"]))
        lines.append(f"{_timed(row['capture'], row)} {wall} {busy} {goal:>6} {row['mb_per_step']:9.2f} {extra:>9}")
    if "long" in report:
        long = report["long"]
        extra = "-" if long.get("extra_mib") is None else f"{long['extra_mib']} MiB"
        told = long.get("error", f"extra memory {extra}")
        lines.append(f"scores, {report['shape']['long_context']:,} tokens: {told}")
    lines.append(
        f"plain files: {report['disk_mb_s']} MB/s; ratio: the median over runs, each beside the mean of the unrecorded "
        "ones before and after it; to disk: the same of all steps up to the closed trace"
    )
    lines.append(
        "GPU ms: in which the GPU worked; idle: the rest of a step, which waits for the host: recording can hide there"
    )
    lines.append("!: a ratio misses its goal")
    return lines


def _timed(name: str, found: dict[str, Any]) -> str:
    low, high = found["quartiles"]
    return f"{name:18} {found['step_ms']:9.2f} {f'{low:.2f}-{high:.2f}':>15}"


def _gpu(found: dict[str, Any], ratio: float | None) -> list[str]:
    if found["gpu_ms"] is None:
        return [f"{'-':>7}", f"{'-':>6}", f"{'-':>5}"]
    return [f"{found['gpu_ms']:7.2f}", f"{'' if ratio is None else f'{ratio:.2f}':>6}", f"{found['idle_share']:5.0%}"]


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.bench_record", description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--directory", type=Path, help="where to write the scratch recordings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--long-context", type=int, default=131072, help="0 for none")
    parser.add_argument("--seconds", type=float, help="after these nothing new is started")
    options = parser.parse_args()
    command = " ".join(["python", "-m", "kvsim.bench_record", *sys.argv[1:]])

    def save(report: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            write_report(options.out, report | {"command": command}, allow_nan=True)

    try:
        report = bench_record(
            options.directory or tempfile.gettempdir(),
            device=options.device,
            context=options.context,
            steps=options.steps,
            long_context=options.long_context,
            seconds=options.seconds,
            save=save,
        )
    except KvsimError as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(table(report)))
    save(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
