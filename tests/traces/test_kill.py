"""A writer killed at any moment loses nothing that was acknowledged."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from kvsim_traces import TraceError, open_trace, repair_trace, verify_trace

# The child appends rows that follow from step and layer alone, commits now and then, and says what is committed.
CHILD = """
import sys
import numpy as np
from kvsim_traces import Manifest, TraceWriter

K, H, HK, D, L0, STEPS, EVERY = 4, 2, 1, 8, 300, 5_000, int(sys.argv[2])
arrays = ["tokens", "text", "text_ends", "attention", "row_sums", "queries", "keys", "prompt_mass"]
manifest = Manifest("heads", L0, STEPS, K, H, HK, arrays, head_dim=D)

def rows(step):
    row = np.zeros((K, H, L0 + step), np.float32)
    for layer in range(K):
        row[layer, :, (step * 7 + layer) % (L0 + step)] = 0.75
        row[layer, :, (step * 7 + layer + 1) % (L0 + step)] += 0.25
    return row

with TraceWriter(sys.argv[1], manifest) as writer:
    writer.write_prompt(
        tokens=np.arange(L0), text=[b"p%d" % i for i in range(L0)], prompt_mass=np.ones((K, H, L0)),
        keys=np.broadcast_to(np.arange(L0, dtype=np.float32)[:, None], (K, HK, L0, D)),
    )
    print("ready", flush=True)
    said = 0
    for step in range(1, STEPS):
        position = L0 + step - 1
        writer.append(
            token=position, text=b"s%d" % step, attention=rows(step), queries=np.full((K, H, D), step % 100.0),
            keys=np.full((K, HK, D), float(position)),
        )
        if step % EVERY == 0:
            writer.commit()
        if writer.committed_steps != said:
            said = writer.committed_steps
            print(said, flush=True)
"""


def expected(step: int, length: int) -> np.ndarray:
    row = np.zeros((4, 2, length), np.float32)
    for layer in range(4):
        row[layer, :, (step * 7 + layer) % length] = 0.75
        row[layer, :, (step * 7 + layer + 1) % length] += 0.25
    return row


def kill(path: Path, every: int, delay: float) -> int:
    """Run the child, kill it after a delay from its first append, and return the acknowledged steps."""
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(every)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(delay)
        os.kill(child.pid, signal.SIGKILL)
        said = child.stdout.read().split()
    # A line cut in half by the kill is no acknowledgement.
    return int(said[-1]) if said else 0


@pytest.mark.parametrize("seed", range(20))
def test_killed_writer_loses_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "t"
    rng = random.Random(seed)
    acknowledged = kill(path, rng.choice([1, 3, 7, 1000]), rng.uniform(0.0, 0.4))
    report = verify_trace(path)
    assert not report.ok
    assert not report.complete
    assert report.committed_steps >= acknowledged
    committed = report.committed_steps
    if not committed:
        assert acknowledged == 0
        with pytest.raises(TraceError, match="committed_steps: is 0"):
            open_trace(path)
        return
    trace = open_trace(path)
    assert trace.num_steps == committed
    for step in range(1, committed + 1):
        np.testing.assert_array_equal(trace.attention_rows(step), expected(step, 300 + step))
    # What verify says beside "not closed" is only about uncommitted leftovers.
    others = [problem for problem in report.problems if "was not closed" not in problem]
    assert all(re.search("left over|only uncommitted", problem) for problem in others), others
    repaired = repair_trace(path)
    assert repaired.ok
    assert repaired.committed_steps == committed
    after = verify_trace(path)
    assert after.ok, after.problems
    assert after.complete
    assert not [one for one in path.rglob("*") if one.name.endswith(".tmp")]
    group = zarr.open_group(path, mode="r")
    assert group["attention"].shape == (committed, 4, 2, 300 + committed)
    for step in (1, committed):
        want = np.zeros((4, 2, 300 + committed), np.float32)
        want[..., : 300 + step] = expected(step, 300 + step)
        np.testing.assert_array_equal(group["attention"][step - 1].astype(np.float32) / 32768, want)
    np.testing.assert_array_equal(group["tokens"][...], np.arange(300 + committed))
    np.testing.assert_array_equal(group["keys"][0, 0, :, 0], np.arange(300 + committed).astype(np.float16))
    np.testing.assert_array_equal(group["queries"][:, 0, 0, 0], np.arange(1, committed + 1) % 100.0)
    text = bytes(group["text"][...])
    assert text == b"".join([b"p%d" % i for i in range(300)] + [b"s%d" % i for i in range(1, committed + 1)])
