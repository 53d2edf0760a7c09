"""How fast the GPU engine replays many policies, beside the Numba engine on two cores.

    python -m kvsim.bench_replay --out replay_engine.json

is ``kvsim bench replay --device cuda`` without the command line's dependencies, for a bare GPU machine.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace
from kvsim_traces.files import write_report

from kvsim.bench import gpu_facts, machine, write_recording
from kvsim.engines import get_engine
from kvsim.engines.outcome import Mode, Outcome
from kvsim.errors import KvsimError
from kvsim.plan import Plan
from kvsim.policy import parse

__all__ = ["CORES", "SMOKE", "bench_replay_gpu", "check_gpu", "lines", "main", "policies"]

CORES = 2

MODES: tuple[Mode, ...] = ("exact", "fast")

GOAL = 20
"""How many times as fast as the Numba engine the exact mode shall be, at the default size."""

SMOKE: dict[str, Any] = {"count": 6, "steps": 6, "layers": 3, "prompt": 24, "repeats": 1, "cpu_seconds": 1.0}
"""A size that says nothing of speed, for Triton's interpreter."""


def policies(count: int, prompt: int) -> list[str]:
    """Give a grid of alphas, refresh intervals, protections and budgets, shuffled so that any start is a mixture.

    Sinks and recent tokens are protected where the smallest budget, 5% of the prompt, holds them.
    """
    alphas = [f"{alpha:.3f}" for alpha in np.linspace(0, 0.98, -(-count // 40))]
    protects = "sink:0", "sink:4+recent:32" if prompt >= 20 * 36 else "sink:1"
    grid = product(alphas, ("1", "2", "4", "8", "first"), protects, ("5%", "10%", "20%", "40%"))
    texts = [f"ema:{a}/refresh={r}/protect={p}/budget={b}" for a, r, p, b in grid][:count]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def bench_replay_gpu(
    directory: str | Path,
    *,
    count: int = 1000,
    steps: int = 512,
    layers: int = 30,
    prompt: int = 4096,
    repeats: int = 5,
    cpu_seconds: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Replay policies on one synthetic recording of head means by both engines; what both ran must be equal.

    Parameters
    ----------
    directory : str or Path
        Where the scratch recording is written.
    count : int
        Policies, at least 1 and at least 40 for all of the grid's axes.
    steps, layers, prompt : int
        T, K and L0.
    repeats : int
        Runs of each measurement on the GPU; medians are reported.
    cpu_seconds : float
        The Numba engine runs as many of the policies as it is likely to in that time, at least 50, in each mode.
    progress : callable, optional
        Called with a line about what runs.

    Returns
    -------
    dict
        ``rows``: for each measurement ``engine``, ``mode``, ``policies``, ``seconds`` and ``policy_steps_per_s``; those
        of the GPU have the rows in its memory from the run before, ``seconds_with_upload`` without; the first call also
        compiles. ``gpu_over_cpu`` compares policy-steps a second in each mode, ``goal`` says what it should be at the
        default size; then ``policies_compared``, ``shape``, the machine and the versions.

    Raises
    ------
    KvsimError
        Without a GPU, or if the engines disagree on a policy: no number comes from a failing install.
    """
    get_engine("gpu")
    say = progress or (lambda line: None)
    folder = Path(directory)
    texts = policies(count, prompt)
    trace = write_recording(folder / "trace", np.random.default_rng(0), steps, layers, 1, prompt)
    say(f"{count} policies on {CORES} cores")
    rows = _in_a_process_of_its_own(folder, count, cpu_seconds)
    plans = [parse(text).plan(trace) for text in texts]
    say(f"{count} policies on the GPU")
    found, outcomes = _gpu_part(trace, plans, repeats)
    rows += found
    want = np.load(folder / "evicted_at.npy")
    differ = [
        plan.policy
        for plan, cpu, gpu in zip(plans, want, outcomes, strict=False)
        if gpu.evicted_at is None or not np.array_equal(cpu, gpu.evicted_at)
    ]
    if differ:
        raise KvsimError(
            f"the engines gpu and cpu disagree on {len(differ)} of {len(want)} policies, such as {differ[0]}: "
            "not benchmarked"
        )
    for row in rows:
        row["policy_steps_per_s"] = round(row["policies"] * steps / row["seconds"])
    speed = {(row["engine"], row["mode"]): row["policy_steps_per_s"] for row in rows}
    over = {mode: round(speed["gpu", mode] / speed[f"cpu, {CORES} cores", mode], 1) for mode in MODES}
    report: dict[str, Any] = {"rows": rows, "gpu_over_cpu": over, "policies_compared": len(want)}
    if (count, steps, layers, prompt) == (1000, 512, 30, 4096):
        report["goal"] = {"gpu_over_cpu, exact": f"at least {GOAL}", "met": over["exact"] >= GOAL}
    return {
        **report,
        "shape": {"policies": count, "steps": steps, "layers": layers, "prompt": prompt},
        **gpu_facts(),
        **machine(),
        "platform": platform.platform(),
    }


def lines(report: dict[str, Any]) -> list[str]:
    """Give a report as lines for people."""
    shape = ", ".join(f"{name} {number:,}" for name, number in report["shape"].items())
    names = "with upload", "in kernels", "first call"
    found = [
        f"{report['gpu'] or 'Triton interpreter'}; {report['processor']}; {shape}",
        f"{'engine':16} {'mode':5} {'policies':>8} {'seconds':>8} "
        + " ".join(f"{name:>11}" for name in names)
        + f" {'policy-steps/s':>14}",
    ]
    keys = "seconds_with_upload", "seconds_in_replay_kernels", "seconds_of_first_call"
    for row in report["rows"]:
        others = " ".join(f"{row[key]:11.3f}" if key in row else f"{'-':>11}" for key in keys)
        head = f"{row['engine']:16} {row['mode']:5} {row['policies']:8} {row['seconds']:8.3f}"
        found.append(f"{head} {others} {row['policy_steps_per_s']:14,}")
    over = ", ".join(f"{mode} {ratio:g}x" for mode, ratio in report["gpu_over_cpu"].items())
    found.append(f"gpu over cpu: {over}; evicted_at equal on all {report['policies_compared']} policies that both ran")
    if "goal" in report:
        met = "met" if report["goal"]["met"] else "NOT met"
        found.append(f"goal: exact at least {GOAL}x: {met}")
    return found


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Run an action; give the seconds it took and its answer."""
    start = time.perf_counter()
    answer = action()
    return time.perf_counter() - start, answer


def _in_a_process_of_its_own(folder: Path, count: int, limit: float) -> list[dict[str, Any]]:
    """Run `_cpu_part` with at most two cores for everything that the process does."""
    own = [sys.executable, "-m", "kvsim.bench_replay", "--cpu-part", str(folder), "--policies", str(count)]
    bind = getattr(os, "sched_setaffinity", None)
    ran = subprocess.run(
        [*own, "--cpu-seconds", str(limit)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": str(CORES), "MKL_NUM_THREADS": str(CORES)},
        preexec_fn=None if bind is None else lambda: bind(0, sorted(os.sched_getaffinity(0))[:CORES]),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        raise KvsimError(f"the replay on {CORES} cores failed: {last}")
    rows: list[dict[str, Any]] = json.loads(ran.stdout)
    return rows


def _cpu_part(folder: Path, count: int, limit: float) -> None:
    """Time the Numba engine in this process, on as many of the policies as it runs in `limit` seconds; print JSON."""
    trace = open_trace(folder / "trace")
    plans = [parse(text).plan(trace) for text in policies(count, trace.prompt_length)]
    rows = []
    for mode in MODES:
        _on_cpu(trace, plans[:4], mode)
        few = min(len(plans), 50)
        seconds, _ = _timed(partial(_on_cpu, trace, plans[:few], mode))
        number = max(few, min(len(plans), int(few * limit / seconds)))
        seconds, outcomes = _timed(partial(_on_cpu, trace, plans[:number], mode))
        if mode == "exact":
            np.save(folder / "evicted_at.npy", np.stack([outcome.evicted_at for outcome in outcomes]))
        rows.append({"engine": f"cpu, {CORES} cores", "mode": mode, "policies": number, "seconds": round(seconds, 4)})
    print(json.dumps(rows))


def _on_cpu(trace: Trace, plans: list[Plan], mode: Mode) -> list[Outcome]:
    """Replay plans on the Numba engine, every other one on each of two threads, as its one pass has but one."""
    run = get_engine("cpu")
    with ThreadPoolExecutor(CORES) as pool:
        parts = list(
            pool.map(lambda own: run(trace, own, raw=False, mode=mode), [plans[i::CORES] for i in range(CORES)])
        )
    return [parts[i % CORES][i // CORES] for i in range(len(plans))]


def _gpu_part(trace: Trace, plans: list[Plan], repeats: int) -> tuple[list[dict[str, Any]], list[Outcome]]:
    """Time the GPU engine on all plans; give the rows of the table and the exact outcomes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kvsim.engines.gpu.rows import release

    run = get_engine("gpu")
    rows: list[dict[str, Any]] = []
    exact: list[Outcome] = []
    for mode in MODES:
        go = partial(run, trace, plans, raw=False, mode=mode)
        first, outcomes = _timed(go)
        exact = exact or outcomes
        kept = [_timed(go)[0] for _ in range(repeats)]
        whole = []
        for _ in range(repeats):
            release()
            whole.append(_timed(go)[0])
        row = {
            "engine": "gpu",
            "mode": mode,
            "policies": len(plans),
            "seconds": round(statistics.median(kept), 4),
            "seconds_with_upload": round(statistics.median(whole), 4),
            "seconds_of_first_call": round(first, 3),
        }
        if torch.cuda.is_available():
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                go()
            kernels = [event.device_time_total for event in seen.key_averages() if "replay_" in event.key]
            row["seconds_in_replay_kernels"] = round(sum(kernels) / 1e6, 4)
        rows.append(row)
    seconds, _ = _timed(lambda: run(trace, plans))
    rows.append({"engine": "gpu, all metrics", "mode": "exact", "policies": len(plans), "seconds": round(seconds, 4)})
    release()
    return rows, exact


def check_gpu(*, smoke: bool) -> None:
    """Make sure that there is a GPU; Triton's interpreter will do for the small size.

    Raises
    ------
    KvsimError
        If there is none.
    """
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not smoke and not torch.cuda.is_available():
            raise KvsimError(
                "kvsim bench replay --device cuda needs a CUDA GPU, and PyTorch finds none here "
                "(--smoke with TRITON_INTERPRET=1 tries it on a CPU)"
            )
    get_engine("gpu")


def main(words: Sequence[str] | None = None) -> int:
    """Run the benchmark; 2 where it cannot run here or the engines disagree."""
    parser = argparse.ArgumentParser(prog="python -m kvsim.bench_replay", description=bench_replay_gpu.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    parser.add_argument("--directory", help="where to write the scratch recording")
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-seconds", type=float, default=60, help="about so long for each mode of the Numba engine")
    parser.add_argument("--smoke", action="store_true", help="a small size that only shows that it runs")
    parser.add_argument("--cpu-part", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.cpu_part is not None:
        _cpu_part(given.cpu_part, given.policies, given.cpu_seconds)
        return 0
    size = {"count": given.policies} | {
        name: getattr(given, name) for name in ("steps", "layers", "prompt", "repeats", "cpu_seconds")
    }
    try:
        check_gpu(smoke=given.smoke)
        with tempfile.TemporaryDirectory(dir=given.directory, prefix="kvsim-bench-") as scratch:
            report = bench_replay_gpu(
                scratch,
                **(SMOKE if given.smoke else size),
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
    except KvsimError as error:
        print(f"kvsim: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(report)))
    command = " ".join(["python", "-m", "kvsim.bench_replay", *(sys.argv[1:] if words is None else words)])
    if given.out is not None:
        write_report(given.out, {"command": command, **report}, allow_nan=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
