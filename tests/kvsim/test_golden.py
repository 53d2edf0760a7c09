"""Golden numbers on the shipped recordings, on which all rules differ."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from cases import CPU_ENGINES, SAMPLES

import kvsim

FILE = Path(__file__).parent / "golden.json"
GOLDEN = json.loads(FILE.read_text()) if FILE.exists() else {}
NAMES = sorted(path.name for path in SAMPLES.iterdir() if path.is_dir())
RULES = [
    "single",
    "cumulative",
    "ema:0.8",
    "ema:0.95",
    "ema:0.8,over=step",
    "ema:0.95,over=layer",
    "ema:0.8/refresh=4",
    "ema:0.8/refresh=first",
    "tova",
    "streaming:4",
    "random:7",
]
WITH_HEADS = [
    "h2o",
    "keydiff",
    "knorm",
    "ema:0.8/group=head",
    "snapkv:16",
    "scissorhands:16",
    "full/admit=local:window=16,sink=4",
    "full/admit=random:0.25,window=16",
    "full/admit=oracle:0.25,window=16",
    "ema:0.8/admit=random:0.5,window=5",
    "snapkv:5,heads=max/when=overflow/admit=random:0.5,window=5",
    "full/select=topk:16",
    "full/select=quest:64",
    "ema:0.8/admit=random:0.5,window=5/select=quest:32",
]


def measure(sample, engine):
    trace = kvsim.open_trace(SAMPLES / sample)
    policies = RULES + (WITH_HEADS if trace.capture != "scores" else [])
    table = {}
    for policy in policies:
        result = kvsim.replay(trace, policy, shadow_churn=False, engine=engine)
        summary = result.summary()
        table[policy] = {
            "kept_mass": round(summary["kept_mass"], 6),
            "raw_agreement": round(summary["raw_agreement"], 6),
            "evicted_at_sum": int(result.evicted_at.astype(np.int64).sum()),
            "last": result.retained(trace.num_steps, group=0)[:12].tolist(),
        }
    return table


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("sample", NAMES)
def test_golden_numbers(sample, engine):
    assert measure(sample, engine) == GOLDEN[sample]


@pytest.mark.parametrize("sample", NAMES)
def test_all_rules_differ(sample):
    for one, other in itertools.combinations(GOLDEN[sample], 2):
        assert GOLDEN[sample][one] != GOLDEN[sample][other], (one, other)


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: measure(name, "reference") for name in NAMES}, indent=1) + "\n")
