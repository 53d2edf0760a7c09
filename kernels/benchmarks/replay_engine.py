"""Time the GPU engine beside the Numba engine on two cores: 1,000 policies on one synthetic recording of head means.

    python kernels/benchmarks/replay_engine.py --out replay_engine.json

Not a test: CI has no GPU. Every policy that the Numba engine runs is compared, and a difference fails the benchmark.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.bench import gpu_facts, machine, write_recording
from kvsim.engines import get_engine
from kvsim.errors import KvsimError
from kvsim.plan import Plan
from kvsim.policy import parse

CORES = 2


def policies(count: int) -> list[str]:
    """Give a grid of alphas, refresh intervals, protections and budgets, shuffled so that any start is a mixture."""
    alphas = [f"{alpha:.3f}" for alpha in np.linspace(0, 0.98, -(-count // 40))]
    grid = product(alphas, ("1", "2", "4", "8", "first"), ("sink:0", "sink:4+recent:32"), ("5%", "10%", "20%", "40%"))
    texts = [f"ema:{a}/refresh={r}/protect={p}/budget={b}" for a, r, p, b in grid][:count]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Run an action; give the seconds it took and its answer."""
    start = time.perf_counter()
    answer = action()
    return time.perf_counter() - start, answer


def on_cpu(trace: Trace, plans: list[Plan], mode: Any) -> list[Any]:
    """Replay plans on the Numba engine, every other one on each of two threads, as its one pass has but one."""
    run = get_engine("cpu")
    with ThreadPoolExecutor(CORES) as pool:
        parts = list(
            pool.map(lambda own: run(trace, own, raw=False, mode=mode), [plans[i::CORES] for i in range(CORES)])
        )
    return [parts[i % CORES][i // CORES] for i in range(len(plans))]


def cpu_part(folder: Path, count: int, limit: float) -> None:
    """Time the Numba engine in this process, on as many of the policies as it runs in `limit` seconds; print JSON."""
    trace = open_trace(folder / "trace")
    plans = [parse(text).plan(trace) for text in policies(count)]
    rows = []
    for mode in ("exact", "fast"):
        on_cpu(trace, plans[:4], mode)
        few = min(len(plans), 50)
        seconds, _ = timed(lambda few=few, mode=mode: on_cpu(trace, plans[:few], mode))
        number = max(few, min(len(plans), int(few * limit / seconds)))
        seconds, outcomes = timed(lambda number=number, mode=mode: on_cpu(trace, plans[:number], mode))
        if mode == "exact":
            np.save(folder / "evicted_at.npy", np.stack([outcome.evicted_at for outcome in outcomes]))
        rows.append({"engine": f"cpu, {CORES} cores", "mode": mode, "policies": number, "seconds": round(seconds, 3)})
    print(json.dumps(rows))


def gpu_part(trace: Trace, plans: list[Plan], repeats: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Time the GPU engine on all plans; give the rows of the table and the exact outcomes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from kvsim.engines.gpu.rows import release

    run = get_engine("gpu")
    rows, exact = [], []
    for mode in ("exact", "fast"):
        first, outcomes = timed(lambda mode=mode: run(trace, plans, raw=False, mode=mode))
        exact = exact or outcomes
        kept = [timed(lambda mode=mode: run(trace, plans, raw=False, mode=mode))[0] for _ in range(repeats)]
        whole = []
        for _ in range(repeats):
            release()
            whole.append(timed(lambda mode=mode: run(trace, plans, raw=False, mode=mode))[0])
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
                run(trace, plans, raw=False, mode=mode)
            kernels = [event.device_time_total for event in seen.key_averages() if "replay_" in event.key]
            row["seconds_in_replay_kernels"] = round(sum(kernels) / 1e6, 4)
        rows.append(row)
    seconds, _ = timed(lambda: run(trace, plans))
    rows.append({"engine": "gpu, all metrics", "mode": "exact", "policies": len(plans), "seconds": round(seconds, 4)})
    return rows, exact


def main() -> None:
    """Write the recording, run both engines, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--policies", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cpu-seconds", type=float, default=60, help="at most about so long for each mode of the Numba engine"
    )
    parser.add_argument("--cpu-part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu_part is not None:
        cpu_part(options.cpu_part, options.policies, options.cpu_seconds)
        return
    get_engine("gpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = np.random.default_rng(0)
        trace = write_recording(folder / "trace", rng, options.steps, options.layers, 1, options.prompt)
        own = [sys.executable, __file__, "--cpu-part", name, "--policies", str(options.policies)]
        ran = subprocess.run(
            [*own, "--cpu-seconds", str(options.cpu_seconds)],
            env=os.environ | {"OPENBLAS_NUM_THREADS": str(CORES), "MKL_NUM_THREADS": str(CORES)},
            # At most two cores for everything that the process does.
            preexec_fn=lambda: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES]),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows = json.loads(ran.stdout)
        plans = [parse(text).plan(trace) for text in policies(options.policies)]
        found, outcomes = gpu_part(trace, plans, options.repeats)
        want = np.load(folder / "evicted_at.npy")
    rows += found
    differ = [
        p.policy for p, cpu, gpu in zip(plans, want, outcomes, strict=False) if not np.array_equal(cpu, gpu.evicted_at)
    ]
    if differ:
        raise KvsimError(f"{len(differ)} of {len(want)} policies differ between the engines, such as {differ[0]}")
    for row in rows:
        row["policy_steps_per_s"] = round(row["policies"] * options.steps / row["seconds"])
    speed = {(row["engine"], row["mode"]): row["policy_steps_per_s"] for row in rows}
    over = {mode: round(speed["gpu", mode] / speed[f"cpu, {CORES} cores", mode], 1) for mode in ("exact", "fast")}
    print(f"{'engine':18} {'mode':6} {'policies':>8} {'seconds':>9} {'policy-steps/s':>15}")
    for row in rows:
        line = f"{row['engine']:18} {row['mode']:6} {row['policies']:8} {row['seconds']:9.3f}"
        print(f"{line} {row['policy_steps_per_s']:15,}")
    print(f"gpu over cpu: {over}; evicted_at equal on all {len(want)} policies that both ran")
    result = {
        "command": " ".join(["python", "kernels/benchmarks/replay_engine.py", *sys.argv[1:]]),
        "rows": rows,
        "gpu_over_cpu": over,
        "policies_compared": len(want),
        "shape": {name: getattr(options, name) for name in ("policies", "steps", "layers", "prompt")},
        **gpu_facts(),
        **machine(),
        "platform": platform.platform(),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
