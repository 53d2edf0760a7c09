"""How fast engines replay, beside what reading the same bytes takes in the same run."""

import contextlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import LayerInfo, Manifest, Trace, TraceWriter, open_trace

from kvsim.budget import Budget
from kvsim.engines import get_engine
from kvsim.engines.outcome import MODES
from kvsim.errors import KvsimError
from kvsim.plan import Plan
from kvsim.policy import parse
from kvsim.version import __version__

__all__ = ["SMOKE", "bench_large", "bench_replay", "check_install", "gpu_facts", "machine", "write_recording"]

SELF_CHECK = ("single", "ema:0.8", "cumulative/group=layer", "ema:0.8/refresh=3", "ema:0.8/protect=sink:2+recent:2")

SMOKE: dict[str, Any] = {"steps": 16, "layers": 3, "prompt": 64, "heads": 3, "policies": (1, 4), "repeats": 1}
"""A size of `bench_replay` that says nothing of speed."""


def bench_replay(
    directory: str | Path,
    *,
    steps: int = 512,
    layers: int = 30,
    prompt: int = 4096,
    heads: int = 9,
    policies: tuple[int, ...] = (1, 10, 100),
    repeats: int = 9,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure policy-steps a second on a synthetic recording of head means, and on one with single heads.

    Parameters
    ----------
    directory : str or Path
        Where the scratch recordings are written.
    steps, layers, prompt, heads : int
        T, K, L0 and H; the recording with heads has an eighth of the steps.
    policies : tuple of int
        Numbers of policies to run in one pass.
    repeats : int
        Runs of each measurement, the read of memory between them; medians are reported.
    progress : callable, optional
        Called with (measurements done, measurements in all).

    Returns
    -------
    dict
        ``rows``: for each measurement ``engine``, ``mode``, ``capture``, ``policies``, ``metrics``,
        ``policy_steps_per_s`` and ``ratio_to_memory_read``: the time of one plain read of the recording's dense float16
        bytes, times the policies, over the time of the replay. ``memory_read_gb_s`` is that read. Then the machine and
        the versions.

    Raises
    ------
    KvsimError
        If the installed engines do not agree with the reference: no number comes from a failing install.
    """
    check_install(directory)
    root = Path(directory)
    rng = np.random.default_rng(0)
    scores = write_recording(root / "scores", rng, steps, layers, 1, prompt)
    per_head = write_recording(root / "heads", rng, max(1, steps // 8), layers, heads, prompt)
    rules = [f"ema:{alpha:.3f}" for alpha in np.linspace(0, 0.98, max(policies))]
    work: list[tuple[str, str, Trace, int, bool]] = [("reference", "exact", scores, 1, True)]
    work += [("cpu", mode, scores, count, True) for mode in ("fast", "exact") for count in policies]
    work += [("cpu", "fast", scores, 1, False), ("cpu", "fast", per_head, 1, True), ("cpu", "exact", per_head, 1, True)]
    rows, reads = [], []
    for done, (engine, mode, trace, count, measured) in enumerate(work, start=1):
        plans = [parse(rule).with_budget(Budget.parse("10%")).plan(trace) for rule in rules[:count]]
        if count == 1:
            plans = [parse("ema:0.8").with_budget(Budget.parse("10%")).plan(trace)]
        run = _runner(engine, mode, trace, plans, measured)
        dense = _dense_bytes(trace)
        memory = np.ones(dense // 8, np.uint64)
        run()
        memory.sum()
        times, ratios = [], []
        for _ in range(1 if engine == "reference" else repeats):
            read = _timed(memory.sum)
            times.append(_timed(run))
            ratios.append(read * count / times[-1])
            reads.append(dense / read / 1e9)
        rows.append(
            {
                "engine": engine,
                "mode": mode,
                "capture": trace.capture,
                "policies": count,
                "metrics": "kept mass" if measured else "none",
                "policy_steps_per_s": round(count * trace.num_steps / statistics.median(times)),
                "ratio_to_memory_read": round(statistics.median(ratios), 3),
            }
        )
        if progress is not None:
            progress(done, len(work))
    return {
        "rows": rows,
        "memory_read_gb_s": round(statistics.median(reads), 2),
        "shape": {"steps": steps, "layers": layers, "prompt": prompt, "heads": heads, "compression_ratio": 0.9},
        **machine(),
    }


def bench_large(
    directory: str | Path, *, gigabytes: float = 20.0, layers: int = 32, prompt: int = 65536
) -> dict[str, Any]:
    """Replay a recording much larger than memory should hold and report the peak memory of the process that does.

    The recording is one piece linked many times over, so that only the engine's own file of rows takes disk space.

    Parameters
    ----------
    directory : str or Path
        Where to write; about `gigabytes` must be free.
    gigabytes : float
        Size of the recording.
    layers, prompt : int
        K and L0.

    Returns
    -------
    dict
        ``trace_gb``, ``build_s`` (token-major rows, first use), ``replay_s``, ``peak_memory_mib`` and the machine.
    """
    root = Path(directory)
    steps = -(-int(gigabytes * 1e9 / (2 * layers * prompt)) // 16) * 16
    _write_linked(root / "large", steps, layers, prompt)
    code = (
        "import sys, time, kvsim\n"
        "from kvsim.engines.cpu.rows import token_rows\n"
        "trace = kvsim.open_trace(sys.argv[1])\n"
        "start = time.perf_counter(); token_rows(trace); built = time.perf_counter()\n"
        "kvsim.replay(trace, 'ema:0.8', shadow_churn=False)\n"
        "replayed = time.perf_counter() - built\n"
        "from kvsim.bench import peak_memory_mib\n"
        "print(built - start, replayed, peak_memory_mib())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(root / "large")], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise KvsimError(f"the replay of a large recording failed: {ran.stderr.strip().splitlines()[-1]}")
    build, replay, peak = map(float, ran.stdout.split())
    return {
        "trace_gb": round(steps * 2 * layers * prompt / 1e9, 2),
        "steps": steps,
        "build_s": round(build, 1),
        "replay_s": round(replay, 1),
        "peak_memory_mib": round(peak),
        **machine(),
    }


def check_install(directory: str | Path) -> None:
    """Compare every engine with the reference on a small recording.

    Raises
    ------
    KvsimError
        If one disagrees.
    """
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        for heads in (1, 4):
            trace = write_recording(Path(scratch) / f"check{heads}", np.random.default_rng(1), 24, 5, heads, 60)
            for text in SELF_CHECK:
                plan = parse(text).with_budget(Budget(8)).plan(trace)
                (want,) = get_engine("reference")(trace, [plan])
                for mode in MODES:
                    (got,) = get_engine("cpu")(trace, [plan], mode=mode)
                    assert want.evicted_at is not None
                    assert got.evicted_at is not None
                    if not np.array_equal(want.evicted_at, got.evicted_at):
                        raise KvsimError(
                            f"the cpu engine ({mode}) disagrees with the reference on {text}: not benchmarked"
                        )


def _runner(engine: str, mode: str, trace: Trace, plans: list[Plan], measured: bool) -> Callable[[], object]:
    if measured:
        return lambda: get_engine(engine)(trace, plans, raw=False, mode=mode)  # type: ignore[arg-type]
    from kvsim.engines.cpu.engine import run

    return lambda: run(trace, plans[0], raw=False, mode="fast", measure=False)


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _dense_bytes(trace: Trace) -> int:
    heads = 1 if trace.capture == "scores" else trace.num_heads
    lengths = trace.prompt_length + np.arange(1, trace.num_steps + 1)
    return int(lengths.sum()) * len(trace.eligible_layers) * heads * 2


def _manifest(steps: int, layers: int, heads: int, prompt: int) -> Manifest:
    return Manifest(
        capture="scores" if heads == 1 else "heads",
        prompt_length=prompt,
        planned_steps=steps,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=1,
        arrays=["scores" if heads == 1 else "attention", "row_sums"],
        layers=[LayerInfo()] * layers,
    )


def write_recording(path: Path, rng: np.random.Generator, steps: int, layers: int, heads: int, prompt: int) -> Trace:
    """Write a recording whose tokens have a slowly changing worth of their own, seen through noise.

    Parameters
    ----------
    path : Path
        Where; a `scores` capture with one head, else a `heads` one.
    rng : Generator
        Where the numbers come from.
    steps, layers, heads, prompt : int
        T, K, H and L0.
    """
    positions = prompt + steps
    worth = rng.normal(size=positions).astype(np.float32)
    noise = rng.normal(scale=0.5, size=(layers, heads, 2 * positions)).astype(np.float32)
    with TraceWriter(path, _manifest(steps, layers, heads, prompt)) as writer:
        writer.write_prompt()
        for t in range(steps):
            n = prompt + t + 1
            worth += 0.1 * rng.normal(size=positions).astype(np.float32)
            start = int(rng.integers(positions - 1))
            rows = np.exp(1.5 * worth[:n] + noise[..., start : start + n])
            rows /= rows.sum(axis=-1, keepdims=True)
            ones = np.ones((layers, heads), np.float32)
            if heads == 1:
                writer.append(scores=rows[:, 0], row_sums=ones)
            else:
                writer.append(attention=rows, row_sums=ones)
    return open_trace(path)


def _write_linked(path: Path, steps: int, layers: int, prompt: int) -> None:
    """Write 16 steps of a recording and link their files into the places of all the others."""
    worth = np.exp(1.5 * np.random.default_rng(0).normal(size=(layers, prompt + 1))).astype(np.float32)
    worth[:, -1] = 0
    worth /= worth.sum(axis=-1, keepdims=True)
    writer = TraceWriter(path, _manifest(steps, layers, 1, prompt))
    writer.write_prompt()
    for t in range(16):
        row = np.zeros((layers, prompt + 1 + t), np.float32)
        row[:, : prompt + 1] = worth
        writer.append(scores=row, row_sums=np.ones((layers, 1), np.float32))
    writer.commit()
    for name in ("scores", "row_sums"):
        whole = len(list((path / name).glob("c.*")))
        for piece in range(whole, whole * steps // 16):
            os.link(path / name / f"c.{piece % whole}.0.0", path / name / f"c.{piece}.0.0")
    group = json.loads((path / "zarr.json").read_text())
    group["attributes"]["kvsim"] |= {"committed_steps": steps, "complete": True}
    (path / "zarr.json").write_text(json.dumps(group))


def peak_memory_mib() -> int:
    """Give the most memory that this process has held.

    Where Linux says it of the process alone; `getrusage` also counts what the process held that started this one.
    """
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def machine() -> dict[str, Any]:
    """Describe the machine and the versions that a number was measured with."""
    import numba

    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cores_used": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "kvsim": __version__,
        "peak_memory_mib_here": peak_memory_mib(),
    }


def gpu_facts() -> dict[str, Any]:
    """Describe the GPU, its driver and the versions of what drives it; needs torch."""
    import importlib.util

    import torch

    facts: dict[str, Any] = {"torch": str(torch.__version__), "gpu": None}
    if importlib.util.find_spec("triton") is not None:
        import triton

        facts["triton"] = triton.__version__
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
        facts |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
