"""The write gate's file and its scores."""

import json
import math
import os
import struct
from dataclasses import replace

import numpy as np
import pytest
from kvsim_traces import files
from safetensors.numpy import load_file, save_file

from kvsim import KvsimError, PolicyError
from kvsim.write_gate import WriteGate, load_gate, metadata_of, save_gate


def random_gate(layers=(0, 2), kv_heads=2, dim=8, hidden=5, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return rng.normal(size=(len(layers), kv_heads, *shape)).astype(np.float32)

    return WriteGate(
        w1=draw(hidden, 2 * dim),
        b1=draw(hidden),
        w2=draw(hidden),
        b2=draw(),
        layers=layers,
        num_kv_heads=kv_heads,
        head_dim=dim,
        window=16,
        tau=0.1,
        penalty=0.08,
        model="tiny",
        config_hash="ab" * 32,
        training={"steps": 3},
    )


def keys(gate, n=7, seed=1):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, len(gate.layers), gate.num_kv_heads, n, gate.head_dim)).astype(np.float32) * 3


def by_hand(gate, layer, head, pre, post):
    """The formula of section 3.2 in plain Python."""
    x = []
    for key in (pre, post):
        root = math.sqrt(sum(float(e) ** 2 for e in key) / len(key) + gate.rms_eps)
        x += [float(e) / root for e in key]
    total = float(gate.b2[layer, head])
    for row, bias, weight in zip(gate.w1[layer, head], gate.b1[layer, head], gate.w2[layer, head], strict=True):
        z = math.fsum(float(w) * e for w, e in zip(row, x, strict=True)) + float(bias)
        total += float(weight) * z * 0.5 * (1 + math.erf(z / math.sqrt(2)))
    return 1 / (1 + math.exp(-total))


def test_scores_follow_the_formula():
    gate = random_gate()
    pre, post = keys(gate)
    found = gate.score(pre, post)
    assert found.shape == (2, 2, 7)
    assert found.dtype == np.float32
    for layer, head, n in np.ndindex(found.shape):
        want = by_hand(gate, layer, head, pre[layer, head, n], post[layer, head, n])
        assert found[layer, head, n] == pytest.approx(want, rel=1e-6)
    assert not np.array_equal(found, gate.score(post, pre))


def test_scores_do_not_depend_on_how_many_are_scored_at_once_nor_on_the_type(monkeypatch):
    gate = random_gate()
    pre, post = keys(gate, n=11)
    want = gate.score(pre, post)
    monkeypatch.setattr("kvsim.write_gate._CHUNK", 3)
    np.testing.assert_array_equal(gate.score(pre, post), want)
    halves = [part.astype(np.float16) for part in (pre, post)]
    np.testing.assert_array_equal(gate.score(*halves), gate.score(*(half.astype(np.float64) for half in halves)))
    assert gate.score(pre[:, :, :0], post[:, :, :0]).shape == (2, 2, 0)


def test_extreme_logits_give_nought_and_one_without_a_warning():
    gate = random_gate()
    pre, post = keys(gate)
    for b2, want in ((-1e30, 0.0), (1e30, 1.0)):
        assert (replace(gate, b2=np.full((2, 2), b2, np.float32)).score(pre, post) == want).all()
    assert np.isfinite(gate.score(pre * 0, post * 0)).all()


def test_keys_of_another_shape_are_refused():
    gate = random_gate()
    pre, post = keys(gate)
    for a, b in ((pre[:1], post[:1]), (pre, post[:, :, :3]), (pre[..., :4], post[..., :4]), (pre[0], post[0])):
        with pytest.raises(PolicyError, match=r"of shape .*: this write gate takes \[.*2 KV heads, n positions, 8"):
            gate.score(a, b)


def test_file_holds_what_was_saved(tmp_path):
    gate, path = random_gate(), tmp_path / "new" / "a,b+50%.safetensors"
    save_gate(gate, path)
    found = load_gate(path)
    for name in ("w1", "b1", "w2", "b2"):
        np.testing.assert_array_equal(getattr(found, name), getattr(gate, name))
    scalars = ("layers", "num_kv_heads", "head_dim", "window", "tau", "penalty", "model", "config_hash", "rms_eps")
    for name in (*scalars, "training", "version", "hash", "hidden", "num_parameters"):
        assert getattr(found, name) == getattr(gate, name), name
    assert gate.num_parameters == 4 * (5 * 16 + 5 + 5 + 1)
    with pytest.raises(KvsimError, match="exists already"):
        save_gate(gate, path)
    save_gate(replace(gate, tau=0.5), path, replace=True)
    assert load_gate(path).tau == 0.5


def test_hash_is_of_what_scores_depend_on():
    gate = random_gate()
    same = replace(gate, tau=0.4, window=1, penalty=1.0, model="other")
    assert same.hash == gate.hash
    others = [replace(gate, b2=gate.b2 + 1), replace(gate, layers=(0, 1)), replace(gate, rms_eps=1e-5)]
    assert len({gate.hash, *(one.hash for one in others)}) == 4


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_numbers_of_16_bits_are_read(tmp_path, kind):
    import torch
    from safetensors.torch import save_file as save_torch

    gate, path = random_gate(), tmp_path / "g.safetensors"
    names, dtype = ("w1", "b1", "w2", "b2"), getattr(torch, kind)
    tensors = {name: torch.from_numpy(getattr(gate, name)).to(dtype) for name in names}
    save_torch(tensors, path, metadata=metadata_of(gate))
    found = load_gate(path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(getattr(found, name), tensor.float().numpy())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    gate, path = random_gate(), tmp_path / "g.safetensors"
    save_gate(gate, path)
    before = path.read_bytes()
    monkeypatch.setattr(files.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(KvsimError, match=r"g.safetensors: cannot write the gate \(disk full"):
        save_gate(replace(gate, tau=0.9), path, replace=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_no_gate_is_refused_by_name(tmp_path):
    gate, path, bad = random_gate(), tmp_path / "g.safetensors", tmp_path / "bad.safetensors"
    save_gate(gate, path)
    data, tensors, metadata = path.read_bytes(), load_file(path), metadata_of(gate)

    def refused(message, **changes):
        save_file(changes.get("tensors", tensors), bad, metadata=changes.get("metadata", metadata))
        with pytest.raises(PolicyError, match=rf"bad\.safetensors: {message}"):
            load_gate(bad)

    with pytest.raises(PolicyError, match="none: no such file; a gate is a safetensors file from 'kvsim train-gate'"):
        load_gate(tmp_path / "none")
    with pytest.raises(PolicyError, match="is not a regular file"):
        load_gate(tmp_path)
    huge = json.dumps({"w1": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    for junk in (b"", data[:100], data[:-1], b"\xff" * 64, b"PK\x03\x04" + data, struct.pack("<Q", len(huge)) + huge):
        bad.write_bytes(junk)
        with pytest.raises(PolicyError, match=r"bad.safetensors: cannot be read .*; a gate is"):
            load_gate(bad)
    with bad.open("wb") as file:
        file.truncate(2**31)
    with pytest.raises(PolicyError, match="has 2147483648 bytes, a gate at most 1073741824"):
        load_gate(bad)
    refused("is not a write gate", metadata={})
    refused("is a kvsim write gate of format '2', known is '1'", metadata={**metadata, "format": "2"})
    for name in metadata.keys() - {"kind", "format"}:
        refused(f"its metadata have no '{name}'", metadata={k: v for k, v in metadata.items() if k != name})
    for name, wrong in (
        ("window", "x"),
        ("tau", ""),
        ("layers", "[0, 1.5]"),
        ("layers", "7"),
        ("training", "{"),
        ("head_dim", "1e9"),
    ):
        refused("its metadata's '(layers|" + name + ")' is wrong: ", metadata={**metadata, name: wrong})
    for name, wrong, message in (
        ("window", "0", "window must be at least 1, got 0"),
        ("window", "9" * 19, "window must have at most 18 digits"),
        ("tau", "nan", "tau must be at least 0 and finite, got nan"),
        ("lambda", "-1", "lambda must be at least 0 and finite, got -1.0"),
        ("layers", "[2, 0]", r"layers must ascend from 0 or more, got \[2, 0\]"),
        ("layers", "[]", "layers must ascend"),
        ("layers", "[0, 1, 2]", r"w1 has shape \[2, 2, 5, 16\], 3 layers of 2 KV heads of dimension 8 need \[3, 2, 5"),
        ("num_kv_heads", "3", r"w1 has shape \[2, 2, 5, 16\], 2 layers of 3 KV heads"),
        ("head_dim", "4", r"w1 has shape .* need \[2, 2, 5, 8\]"),
    ):
        refused(message, metadata={**metadata, name: wrong})
    refused(r"has no tensor b1 \(a gate has w1, b1, w2, b2\)", tensors={k: v for k, v in tensors.items() if k != "b1"})
    refused(r"b2 has shape \[2, 3\]", tensors={**tensors, "b2": np.zeros((2, 3), np.float32)})
    refused(r"w1 has shape \[3\], must have", tensors={**tensors, "w1": np.zeros(3, np.float32)})
    refused("w2 holds numbers that are not finite", tensors={**tensors, "w2": tensors["w2"] * np.nan})
    refused("tensor b1 is of type F64", tensors={**tensors, "b1": tensors["b1"].astype(np.float64)})


def test_a_gate_that_is_not_whole_is_not_saved(tmp_path):
    gate = random_gate()
    for broken in (replace(gate, b2=gate.b2 * np.inf), replace(gate, window=0), replace(gate, layers=(0,))):
        with pytest.raises(KvsimError, match=r"g\.safetensors: "):
            save_gate(broken, tmp_path / "g.safetensors")
    assert not list(tmp_path.iterdir())
