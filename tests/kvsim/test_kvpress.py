r"""``score=kvpress:NAME``, with a stand-in for kvpress, which needs an environment of its own.

By hand, with the real one: every pair of rows must be equal.

    python3 -m venv kvpress-env
    kvpress-env/bin/pip install . kvpress==0.5.5
    kvpress-env/bin/kvsim replay --trace traces/samples/smollm2-multineedle-256 \
        --policy knorm/when=prefill --policy single/score=kvpress:Knorm/group=head/when=prefill \
        --policy keydiff/when=prefill --policy single/score=kvpress:KeyDiff/group=head/when=prefill \
        --policy knorm --policy single/score=kvpress:Knorm/group=head
"""

import importlib.util
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from cases import write_trace

import kvsim

PREFILL = "group=head/when=prefill"


class KnormPress:
    compression_ratio = 0.0

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class KeyDiffPress(KnormPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        unit = torch.nn.functional.normalize(keys, dim=-1)
        return -torch.nn.functional.cosine_similarity(keys, unit.mean(dim=2, keepdim=True), dim=-1)


class StreamingLLMPress(KnormPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        length = keys.shape[2]
        assert length > 4, "too short"
        scores = torch.ones(keys.shape[:3])
        scores[:, :, 4 : 4 + length - int(length * (1 - self.compression_ratio))] = 0
        return scores


class CURPress(KnormPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return values.norm(dim=-1) * torch.nan


@pytest.fixture
def stand_in(monkeypatch):
    presses = (KnormPress, KeyDiffPress, StreamingLLMPress, CURPress)
    module = types.ModuleType("kvpress")
    vars(module).update({press.__name__: press for press in presses})
    monkeypatch.setitem(sys.modules, "kvpress", module)


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "t", capture="qkv", seed=8)


def assert_same(trace, one, other, **options):
    got, want = (kvsim.replay(trace, text, shadow_churn=False, **options).evicted_at for text in (one, other))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("engine", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [6, 13, 39, 40])
def test_presses_in_prefill(stand_in, trace, budget, engine):
    for press, own in [("Knorm", "knorm"), ("KeyDiff", "keydiff"), ("StreamingLLM", "streaming:4/group=head")]:
        text = f"single/score=kvpress:{press}/{PREFILL}"
        assert_same(trace, text, f"{own}/when=prefill", budget=budget, engine=engine)


def test_a_decode_position_is_scored_when_it_arrives(stand_in, trace):
    assert_same(trace, "single/score=kvpress:Knorm/group=head", "knorm", budget=9)
    plan = kvsim.parse("single/score=kvpress:KeyDiff/group=head").plan(trace)
    keys = torch.from_numpy(trace.keys(1)[None].copy())
    for step in (1, trace.num_steps):
        seen = trace.prompt_length + step
        want = KeyDiffPress().score(None, None, keys[:, :, :seen], None, None, {})[0, :, -1]
        np.testing.assert_allclose(plan.score.values[1, :, seen - 1], want.numpy())


def test_names(trace):
    assert str(kvsim.parse("single/score=kvpress:KnormPress")) == "single/score=kvpress:Knorm"
    for name in ("SnapKV", "knorm", "Random", "os"):
        with pytest.raises(kvsim.PolicyError, match=r"valid: CUR, KeyDiff, Knorm, LagKV, StreamingLLM"):
            kvsim.parse(f"single/score=kvpress:{name}")
    with pytest.raises(kvsim.PolicyError, match="needs press"):
        kvsim.parse("single/score=kvpress")


def test_refusals(stand_in, tmp_path, trace):
    with pytest.raises(kvsim.PolicyError, match="not finite"):
        kvsim.replay(trace, f"single/score=kvpress:CUR/{PREFILL}")
    with pytest.raises(kvsim.PolicyError, match=r"kvpress cannot be used here .*LagKVPress.*transformers below 5.3"):
        kvsim.replay(trace, f"single/score=kvpress:LagKV/{PREFILL}")
    short = write_trace(tmp_path / "short", capture="qkv", prompt=3)
    with pytest.raises(kvsim.PolicyError, match="refuses 3 positions"):
        kvsim.replay(short, f"single/score=kvpress:StreamingLLM/{PREFILL}", budget=2)
    with pytest.raises(kvsim.TraceError, match="values"):
        kvsim.replay(write_trace(tmp_path / "qk", capture="qk"), f"single/score=kvpress:Knorm/{PREFILL}")


@pytest.mark.skipif(importlib.util.find_spec("kvpress") is not None, reason="kvpress is installed here")
def test_without_kvpress(trace):
    with pytest.raises(kvsim.PolicyError, match=r"kvpress cannot be used here .*environment of its own"):
        kvsim.replay(trace, f"single/score=kvpress:Knorm/{PREFILL}")


def test_nothing_imports_kvpress_by_itself():
    code = (
        "import sys, kvsim; kvsim.parse('single/score=kvpress:Knorm'); "
        "assert not {'kvpress', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
