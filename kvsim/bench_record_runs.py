"""Runs of a model with and without a recorder, and what they took: for `kvsim.bench_record`."""

import shutil
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvsim_traces import TraceWriter, verify_trace
from kvsim_traces.decoding import Decoder
from kvsim_traces.packing import StepLayout
from kvsim_traces.recorder import Recording
from kvsim_traces.request import checked

from kvsim.errors import KvsimError

__all__ = ["PROFILED", "SKIPPED", "Run", "busy_ms", "figures", "recorded", "step_mb", "unrecorded"]

SKIPPED = 2
"""Steps at the start of a run that are not timed."""

PROFILED = 8
"""Steps that a profiled run looks at."""

_FIRST = SKIPPED + 1


@dataclass(frozen=True)
class Run:
    """What one run took.

    Attributes
    ----------
    steps : list of float
        Milliseconds from one step to the next, the first ones left out; on a GPU between events on its stream.
    sustained_ms : float
        All steps but the first up to the end, the trace closed, over their number, by the host's clock.
    prefill_s : float
    peaks : list of int
        The GPU's peak memory in bytes, of prefill and decoding; empty on a CPU.
    gpu_ms : float or None
        Milliseconds a step in which the GPU did anything, of a profiled run.
    """

    steps: list[float]
    sustained_ms: float
    prefill_s: float
    peaks: list[int]
    gpu_ms: float | None


@dataclass
class _Watch:
    """Notes a moment before each forward of a model, and looks into some of its steps if asked to."""

    model: Any
    profiled: bool
    moments: list[Any] = field(default_factory=list)
    clock: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    gpu_ms: float | None = None
    profiler: Any = None

    def __enter__(self) -> "_Watch":
        self.on_gpu = self.model.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.handle = self.model.register_forward_pre_hook(self.hook)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
        self.peak()

    def hook(self, *_: object) -> None:
        """Before each forward: the prefill's, then one a step."""
        count = len(self.moments)
        if count == 1:
            self.peak()
        if self.profiled and count in (_FIRST, _FIRST + PROFILED):
            self.profile()
        self.clock.append(time.perf_counter())
        if self.on_gpu:
            self.moments.append(torch.cuda.Event(enable_timing=True))
            self.moments[-1].record()
        else:
            self.moments.append(self.clock[-1])

    def profile(self) -> None:
        """Start to look, or stop; all that was launched before has ended."""
        torch.cuda.synchronize()
        if self.profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
            return
        self.profiler.stop()
        host = torch.autograd.DeviceType.CPU
        spans = [(e.time_range.start, e.time_range.end) for e in self.profiler.events() if e.device_type != host]
        self.gpu_ms = busy_ms(spans) / PROFILED

    def peak(self) -> None:
        """Note the peak since the last one."""
        if self.on_gpu:
            self.peaks.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()

    def run(self, end: float) -> Run:
        """Give what was noted of a run that ended at `end`."""
        if self.on_gpu:
            torch.cuda.synchronize()
            between = [a.elapsed_time(b) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        else:
            between = [1e3 * (b - a) for a, b in zip(self.moments, self.moments[1:], strict=False)]
        sustained = 1e3 * (end - self.clock[2]) / (len(self.clock) - 2)
        return Run(between[SKIPPED:], sustained, between[0] / 1e3, self.peaks, self.gpu_ms)


def busy_ms(spans: Iterable[tuple[float, float]]) -> float:
    """Measure what spans of microseconds cover together, in milliseconds; where they overlap they count once."""
    total, until = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def unrecorded(model: Any, context: int, steps: int, *, profiled: bool = False) -> Run:
    """Prefill and decode greedily as the recorder does, tokens chosen on the device, with nothing that looks on."""
    watch, decoder = _Watch(model, profiled), Decoder(model)
    none = torch.tensor([], dtype=torch.long, device=model.device)
    with torch.inference_mode(), watch:
        logits = decoder.prefill(_prompt(model, context))
        for _ in range(steps):
            logits = decoder.step(logits.index_fill(0, none, -torch.inf).argmax().view(1))
        if watch.on_gpu:
            torch.cuda.synchronize()
        end = time.perf_counter()
    return watch.run(end)


def recorded(model: Any, context: int, steps: int, capture: str, out: Path, *, profiled: bool = False) -> Run:
    """Record the same run into a trace, verify that, and remove it.

    Raises
    ------
    KvsimError
        If the trace is not intact.
    """
    watch = _Watch(model, profiled)
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
    with torch.inference_mode(), watch:
        recording = Recording(model, request)
        manifest = recording.start(check=False)
        with TraceWriter(out, manifest, behind=recording.device is not None) as writer:
            recording.write(writer)
        end = time.perf_counter()
        recording.release()
    report = verify_trace(out)
    if not report.ok or report.committed_steps != steps:
        problems = ", ".join(report.problems) or "steps are missing"
        raise KvsimError(f"{out.name}: the recording is not intact: {problems}")
    shutil.rmtree(out)
    return watch.run(end)


def step_mb(config: Any, capture: str, positions: int) -> float:
    """Count the megabytes that a step of a capture stores."""
    layers, heads, kv_heads = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    layout = StepLayout(capture, layers, heads, kv_heads, config.head_dim, "float16")
    return round(layout.nbytes(positions) / 1e6, 3)


def figures(runs: list[Run]) -> dict[str, Any]:
    """Put runs of one kind together.

    Returns
    -------
    dict
        ``step_ms``, the median over the steps of all runs, with its ``quartiles`` and each run's own median
        (``run_ms``); ``sustained_ms``, the median over runs, and each one's (``run_sustained_ms``); ``prefill_s``, the
        median over runs; ``steps_timed``; ``peak_mib`` of prefill and decoding, the largest.
    """
    steps = [ms for run in runs for ms in run.steps]
    return {
        "step_ms": round(statistics.median(steps), 3),
        "quartiles": [round(float(ms), 3) for ms in np.quantile(steps, [0.25, 0.75])],
        "run_ms": [round(statistics.median(run.steps), 3) for run in runs],
        "sustained_ms": round(statistics.median(run.sustained_ms for run in runs), 3),
        "run_sustained_ms": [round(run.sustained_ms, 3) for run in runs],
        "prefill_s": round(statistics.median(run.prefill_s for run in runs), 3),
        "steps_timed": len(steps),
        "peak_mib": [round(max(peaks) / 2**20) for peaks in zip(*(run.peaks for run in runs), strict=True)],
    }


def _prompt(model: Any, context: int) -> list[int]:
    vocabulary = model.config.vocab_size
    return [int(token) for token in np.random.default_rng(0).integers(vocabulary, size=context)]
