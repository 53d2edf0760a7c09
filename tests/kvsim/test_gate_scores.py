"""Gates of a recording: from stored or derived keys, kept in it by the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
from cases import MODEL, write_trace
from kvsim_traces import open_trace
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.gate_scores import gate_scores, store_gate_scores
from kvsim.rope import rope_of
from kvsim.write_gate import WriteGate, save_gate

LLAMA = {**MODEL, "config": {"model_type": "llama", "rope_theta": 1e4}}


def some_gate(layers=(0, 1, 2), kv_heads=2, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    heads = (len(layers), kv_heads)
    return WriteGate(
        w1=rng.normal(size=(*heads, 4, 2 * dim)).astype(np.float32),
        b1=rng.normal(size=(*heads, 4)).astype(np.float32),
        w2=rng.normal(size=(*heads, 4)).astype(np.float32),
        b2=rng.normal(size=heads).astype(np.float32),
        layers=tuple(layers),
        num_kv_heads=kv_heads,
        head_dim=dim,
        window=4,
        tau=0.5,
        penalty=0.08,
        model="m",
    )


def test_scores_are_the_gates_of_both_keys(tmp_path):
    trace, gate = write_trace(tmp_path / "t", capture="qk", model=LLAMA), some_gate()
    scores = gate_scores(trace, gate, [0, 2], "g")
    post = np.stack([trace.keys(layer) for layer in range(3)])
    pre = np.stack([rope_of(trace, layer).undo(post[layer], np.arange(52)) for layer in range(3)])
    np.testing.assert_allclose(scores, gate.score(pre, post)[[0, 2]], rtol=1e-6)
    assert scores.dtype == np.float32


def test_the_command_keeps_them(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk", model=LLAMA, eligible=[0, 1])
    gate = some_gate((0, 1))
    save_gate(gate, tmp_path / "g.safetensors")
    done = CliRunner().invoke(app, ["trace", "gates", str(trace.path), "--gate", str(tmp_path / "g.safetensors")])
    assert done.exit_code == 0, done.output
    again = open_trace(trace.path)
    assert again.hash == trace.hash
    assert again.manifest.gate == {"name": "g.safetensors", "hash": gate.hash}
    np.testing.assert_array_equal(again.gates()[:2], gate_scores(trace, gate, [0, 1], "g"))
    assert (again.gates()[2] == 1).all()
    share = (again.gates()[:2] >= 0.5).mean()
    assert f"{share:.1%} at or above its tau 0.5" in done.output
    arguments = ["trace", "gates", str(trace.path), "--gate", str(tmp_path / "g.safetensors"), "--json"]
    assert json.loads(CliRunner().invoke(app, arguments).output)["admitted"] == pytest.approx(share)


def test_other_models_are_refused(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk", model=LLAMA)
    for gate, message in [
        (some_gate((0, 2)), r"has no gate for layer 1 .*layers: \[0, 2\]"),
        (some_gate(kv_heads=1), "is for 1 KV heads of dimension 8, but .* has 2 of dimension 8"),
    ]:
        save_gate(gate, tmp_path / "g.safetensors", replace=True)
        with pytest.raises(kvsim.PolicyError, match=message):
            store_gate_scores(trace.path, tmp_path / "g.safetensors")
    unknown = write_trace(tmp_path / "u", capture="qk", model=None)
    save_gate(some_gate(), tmp_path / "g.safetensors", replace=True)
    with pytest.raises(kvsim.PolicyError, match="no model config"):
        store_gate_scores(unknown.path, tmp_path / "g.safetensors")
    scores = write_trace(tmp_path / "s", capture="scores", model=LLAMA)
    done = CliRunner().invoke(app, ["trace", "gates", str(scores.path), "--gate", str(tmp_path / "g.safetensors")])
    assert done.exit_code == 2
    assert "has no keys" in done.output + done.stderr


def test_the_command_says_when_the_gate_was_trained_for_another_config(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk", model={**LLAMA, "config_hash": "a" * 64})
    for config_hash, is_other in (("b" * 64, True), ("a" * 64, False), ("", False)):
        save_gate(replace(some_gate(), config_hash=config_hash), tmp_path / "g.safetensors", replace=True)
        done = CliRunner().invoke(app, ["trace", "gates", str(trace.path), "--gate", str(tmp_path / "g.safetensors")])
        assert done.exit_code == 0, done.output
        assert ("note: trained for m; the config of " in done.output) is is_other
