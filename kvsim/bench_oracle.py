"""How close the bound of `oracle:bound` comes in how much time, and what memory that takes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvsim.bench import machine, peak_memory_mib
from kvsim.errors import KvsimError
from kvsim.oracles.prices import price
from kvsim.oracles.problem import Builder, Problem

__all__ = ["SHAPES", "bench_oracle", "drifting", "measure"]

SHAPES = ((16384, 256), (65536, 1024))

GAPS = (1e-2, 1e-3)


def bench_oracle(shapes: Sequence[tuple[int, int]] = SHAPES) -> dict[str, Any]:
    """Measure the duality gap against time, and the peak memory, each shape in a process of its own with one thread.

    Parameters
    ----------
    shapes : sequence of (int, int)
        Prompt length and steps of one group; a tenth of the prompt is kept.

    Returns
    -------
    dict
        ``rows``: what `measure` gives for each shape. Then the machine and the versions.

    Raises
    ------
    KvsimError
        If a run fails.
    """
    rows = []
    for prompt, steps in shapes:
        code = f"import json; from kvsim.bench_oracle import measure; print(json.dumps(measure({prompt}, {steps})))"
        alone = os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=alone)
        if ran.returncode:
            raise KvsimError(f"the optimum of {prompt} x {steps} failed: {ran.stderr.strip().splitlines()[-1]}")
        rows.append(json.loads(ran.stdout))
    return {"rows": rows, **machine()}


def measure(prompt: int, steps: int) -> dict[str, Any]:
    """Price one instance in this process.

    Parameters
    ----------
    prompt, steps : int
        L0 and T.

    Returns
    -------
    dict
        ``prompt``, ``steps``, ``budget``, ``build_s``, seconds to a relative gap of 1% and of 0.1% (None if it never
        came that close), ``seconds`` and ``gap`` at the end, ``gap_over_time`` ([seconds, gap] of every tenth step),
        ``gains_mib`` (the problem itself, 8 bytes for each position and step) and ``peak_memory_mib`` of the process.

    Raises
    ------
    KvsimError
        If the schedule found does not fit the budget or its mass is above the bound.
    """
    budget = prompt // 10
    start = time.perf_counter()
    problem = drifting(prompt, steps, budget)
    built = time.perf_counter()
    history: list[tuple[float, float]] = []

    def watch(bound: float, value: float) -> None:
        history.append((time.perf_counter() - built, 1 - value / bound))

    found = price(problem, watch=watch)
    history.append((time.perf_counter() - built, 1 - found.value / found.bound))
    if (problem.counts(found.last) > budget).any() or not problem.value(found.last) <= found.bound:
        raise KvsimError("the schedule found does not fit its budget or beats its bound: not benchmarked")
    reached = [next((round(s, 2) for s, gap in history if gap <= wanted), None) for wanted in GAPS]
    return {
        "prompt": prompt,
        "steps": steps,
        "budget": budget,
        "build_s": round(built - start, 2),
        "seconds_to_1_percent": reached[0],
        "seconds_to_0.1_percent": reached[1],
        "seconds": round(history[-1][0], 2),
        "gap": float(f"{history[-1][1]:.3g}"),
        "gap_over_time": [[round(s, 2), float(f"{gap:.3g}")] for s, gap in [*history[:-1:10], history[-1]]],
        "gains_mib": problem.mass.nbytes // 2**20,
        "peak_memory_mib": peak_memory_mib(),
    }


def drifting(prompt: int, steps: int, budget: int, seed: int = 0) -> Problem:
    """Make an instance whose positions have a lasting worth and one that drifts, seen through a softmax.

    Parameters
    ----------
    prompt, steps, budget : int
        L0, T and B.
    seed : int
        Seed of the draw.
    """
    rng = np.random.default_rng(seed)
    positions = prompt + steps
    taste, drift = 1.5 * rng.normal(size=positions), np.zeros(positions)
    builder = Builder(prompt, steps)
    for t in range(1, steps + 1):
        drift = 0.95 * drift + 0.3 * rng.normal(size=positions)
        weights = np.exp(taste + 2 * drift)[: prompt + t]
        builder.add(t, weights / weights.sum())
    return builder.problem(budget)
