"""RoPE undone: equal to what transformers did, and refused by name where it is not known."""

import numpy as np
import pytest
import torch
from cases import MODEL, write_trace
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import kvsim
from kvsim.rope import Rope, rope_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def of_config(tmp_path, **config):
    """Give the Rope of a trace whose model has `config`."""
    model = {**MODEL, "config": {"model_type": "llama", **config}}
    return rope_of(write_trace(tmp_path / "t", capture="qkv", head_dim=32, steps=1, model=model), 0)


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, LLAMA3])
def test_undoes_what_transformers_does(tmp_path, scaling):
    parameters = {"rope_theta": 50000.0, **scaling}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32, rope_parameters=parameters)
    rope = of_config(tmp_path, rope_parameters=parameters)
    embedding = LlamaRotaryEmbedding(config)
    np.testing.assert_allclose(rope.frequencies, embedding.inv_freq.numpy(), rtol=1e-6)
    positions = torch.tensor([[0, 1, 17, 500, 90_000]])
    vectors = torch.randn(1, 2, 5, 32, generator=torch.Generator().manual_seed(0))
    rotated, _ = apply_rotary_pos_emb(vectors, vectors, *embedding(vectors, positions))
    undone = rope.undo(rotated[0].double().numpy(), positions[0].numpy())
    # At position 90,000 float32 angles that differ in their last bit are 0.008 radians apart.
    np.testing.assert_allclose(undone[:, :4], vectors[0, :, :4].numpy(), atol=2e-4)
    np.testing.assert_allclose(undone[:, 4], vectors[0, :, 4].numpy(), atol=0.03)


def test_mean_rotation_is_the_mean_of_the_rotations():
    rng = np.random.default_rng(0)
    rope = Rope(np.array([1.0, 0.1, 0.01], np.float32))
    x, positions = rng.normal(size=(9, 8)), np.arange(5, 14)
    rotated = rope.undo(x, -positions)
    np.testing.assert_allclose(rope.undo(rotated, positions), x)
    same = rope.undo(np.broadcast_to(x[0], x.shape), -positions)
    np.testing.assert_allclose(rope.mean_rotation(positions, 8) @ x[0], same.mean(axis=0))
    np.testing.assert_allclose(rotated[:, 6:], x[:, 6:], err_msg="dimensions beyond the rotated ones stay")


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 50000.0},
        {"rope_theta": 50000.0, "rope_scaling": None},
        {"rope_theta": 50000.0, "rope_scaling": {"type": "linear", "factor": 1.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 50000.0}, "sliding_attention": {"rope_theta": 9.0}}},
    ],
)
def test_configs_of_other_versions(tmp_path, config):
    want = 50000.0 ** (-np.arange(0, 32, 2) / 32)
    np.testing.assert_allclose(of_config(tmp_path, **config).frequencies, want, rtol=1e-6)


def test_partial_rotation(tmp_path):
    rope = of_config(tmp_path, model_type="phi3", rope_theta=10000.0, partial_rotary_factor=0.75)
    assert rope.frequencies.size == 12


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "no model config"),
        ({"model_type": "glm"}, r"how model type 'glm' rotates its queries is not known \(known: .*llama"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, r"type 'yarn' .*valid: default, linear"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "default"}}, "incomplete or wrong .*rope_theta"),
        ({"model_type": "llama", "rope_theta": "big"}, "incomplete or wrong"),
        ({"model_type": "llama", "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 0}}, "wrong"),
    ],
)
def test_unknown_rotations_are_refused(tmp_path, config, message):
    trace = write_trace(tmp_path / "t", capture="qkv", model={**MODEL, "config": config})
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.replay(trace, "expected")


def test_a_trace_without_a_model_is_refused(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qkv", model=None)
    with pytest.raises(kvsim.PolicyError, match="no model config"):
        rope_of(trace, 0)
