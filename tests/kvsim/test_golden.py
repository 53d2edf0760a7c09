"""Golden numbers on the shipped recordings, on which all rules differ."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from cases import SAMPLES

import kvsim

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
RULES = [
    "single",
    "cumulative",
    "ema:0.8",
    "ema:0.95",
    "ema:0.8,over=step",
    "ema:0.8,over=layer",
    "ema:0.8/refresh=4",
    "ema:0.8/refresh=first",
    "tova",
    "streaming:4",
    "random:7",
]
WITH_HEADS = ["h2o", "keydiff", "knorm", "ema:0.8/group=head"]


def measure(sample):
    trace = kvsim.open_trace(SAMPLES / sample)
    policies = RULES + (WITH_HEADS if trace.capture != "scores" else [])
    table = {}
    for policy in policies:
        result = kvsim.replay(trace, policy, shadow_churn=False)
        summary = result.summary()
        table[policy] = {
            "kept_mass": round(summary["kept_mass"], 6),
            "raw_agreement": round(summary["raw_agreement"], 6),
            "evicted_at_sum": int(result.evicted_at.astype(np.int64).sum()),
            "last": result.retained(trace.num_steps)[:12].tolist(),
        }
    return table


@pytest.mark.parametrize("sample", sorted(GOLDEN))
def test_golden_numbers(sample):
    assert measure(sample) == GOLDEN[sample]


@pytest.mark.parametrize("sample", sorted(GOLDEN))
def test_all_rules_differ(sample):
    for one, other in itertools.combinations(GOLDEN[sample], 2):
        assert GOLDEN[sample][one] != GOLDEN[sample][other], (one, other)


if __name__ == "__main__":
    numbers = {path.name: measure(path.name) for path in sorted(SAMPLES.iterdir()) if path.is_dir()}
    (Path(__file__).parent / "golden.json").write_text(json.dumps(numbers, indent=1) + "\n")
