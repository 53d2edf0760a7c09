"""Selection in a running model, against its definition in replay on the run's own attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gates import gate_for
from recording import PROMPT, VOCAB, tiny

import kvsim
from kvsim.live import decode, prefill, prefill_under
from kvsim.live.reading import read_marks
from kvsim.plan import Selection
from kvsim.selecting import quest_marks, topk_marks

L0 = len(PROMPT)
STEPS = 6
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
OPTIONS = {"steps": STEPS, "force": FORCED, "keep_logits": True, "budget": 12}


@pytest.fixture(scope="module")
def llama():
    return tiny("llama-gqa3")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("kind", ["quest", "topk"])
def test_marks_are_the_replays(kind, window, seed):
    rng = np.random.default_rng(seed)
    kv_heads, share, n, d = 3, 2, int(rng.integers(6, 40)), 4
    visible = rng.random((kv_heads, n)) < 0.7
    visible[:, -max(1, window) :] = True
    keys = rng.integers(-2, 3, (kv_heads, n, d)).astype(np.float32)
    queries = rng.integers(-2, 3, (kv_heads * share, d)).astype(np.float32)
    rows = rng.integers(0, 5, (kv_heads * share, n)) / 8
    selection = Selection(kind, 8, 4)
    if kind == "quest":
        wanted = quest_marks(keys, queries.reshape(kv_heads, share, d), visible, selection, window)
    else:
        wanted = topk_marks(rows.reshape(kv_heads, share, n).mean(axis=1), visible, 8)
    found = read_marks(selection, *map(torch.from_numpy, (visible, rows, queries, keys)), window)
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("physical", [False, True])
@pytest.mark.parametrize("select", ["quest:16", "topk:5"])
@pytest.mark.parametrize("policy", ["full", "ema:0.8", "full/admit=wgkv:GATE", "ema:0.8/admit=wgkv:GATE,window=2"])
def test_a_run_reads_what_its_replay_reads(llama, tmp_path, policy, select, physical):
    file = gate_for(prefill(llama, [0]), tmp_path / "gate.safetensors")
    policy = kvsim.parse(f"{policy.replace('GATE', file)}/select={select}")
    (run,) = decode(llama, prefill_under(llama, PROMPT, [policy]), policy, physical=physical, **OPTIONS)
    plain = kvsim.parse(str(policy).partition("/select")[0])
    (wide,) = decode(llama, prefill_under(llama, PROMPT, [plain]), plain, physical=physical, **OPTIONS)
    assert not torch.allclose(torch.stack(run.logits), torch.stack(wide.logits), atol=1e-3)
    if not physical:
        result = run.result()
        assert np.array_equal(result.evicted_at, run.evicted_at)
        assert (result.outcome.selected <= int(select.partition(":")[2])).all()
        # What the queries could not read is missing from what they saw.
        assert result.summary()["kept_mass"] < 1
        everything = kvsim.parse(str(policy).replace(select, "topk:99" if "topk" in select else "quest:160"))
        (same,) = decode(llama, prefill_under(llama, PROMPT, [everything]), everything, **OPTIONS)
        assert torch.equal(torch.stack(same.logits), torch.stack(wide.logits))


def test_what_is_not_read_does_not_count(llama):
    """A token outside S_t of every head may be anything: its value changes nothing."""
    (prefix,) = prefill_under(llama, PROMPT, [kvsim.parse("full")])
    policy = kvsim.parse("full/select=topk:1")
    options = OPTIONS | {"steps": 1, "force": FORCED[:1]}
    (run,) = decode(llama, [prefix], policy, **options)
    rows = run.sequence.trace.attention_rows(1)
    first = rows[0].reshape(2, 3, -1).mean(axis=1)
    never = int(np.flatnonzero((first.argmax(axis=1) != np.arange(L0 + 1)[:, None]).all(axis=1))[0])
    values = prefix.layers[0].values.clone()
    values[:, never] += 100
    layers = [replace(prefix.layers[0], values=values), *prefix.layers[1:]]
    (again,) = decode(llama, [replace(prefix, layers=layers)], policy, **options)
    assert torch.equal(run.logits[0], again.logits[0])
