"""Keys before the rotary embedding as the recorder keeps them, beside those turned back by the model's config."""

import threading

import kvsim_traces.recorder
import numpy as np
import pytest
import torch
from kvsim_traces import CaptureError, TraceError, record, verify_trace
from kvsim_traces.rotary import RotaryTap
from recording import MODELS, PROMPT, WINDOW, tiny
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from transformers.models.llama import modeling_llama

from kvsim.errors import PolicyError
from kvsim.rope import keys_before

L0 = len(PROMPT)
STEPS = 3
MORE = {
    "phi3": (Phi3ForCausalLM, Phi3Config, {"partial_rotary_factor": 0.5}),
    "stablelm": (StableLmForCausalLM, StableLmConfig, {"partial_rotary_factor": 0.5, "head_dim": 8}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {"num_key_value_heads": 6, "head_dim": 8}),
    "llama3-rope": (
        *MODELS["llama-gqa3"][:2],
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    # Dimension i turns with i + 1, and the full layer with none.
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config,
        {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1], "use_sliding_window": False}),
}
DERIVED = ["llama-gqa3", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "stablelm", "olmo2", "llama3-rope"]


@pytest.fixture(autouse=True)
def more_models(monkeypatch):
    for name, made in MORE.items():
        monkeypatch.setitem(MODELS, name, made)


def pre(model, out, **options):
    given = {"capture": "qk", "qk_dtype": "float32", "pre_rope_keys": True, "steps": STEPS, "prompt_queries": 5}
    return record(model, PROMPT, out=out, **(given | options))


class Without:
    """A trace that stores no keys before the rotary embedding."""

    def __init__(self, trace):
        self._trace = trace

    def __getattr__(self, name):
        return getattr(self._trace, name)

    def has(self, name):
        return name != "keys_pre" and self._trace.has(name)


@pytest.mark.parametrize("name", DERIVED)
def test_stored_and_derived_keys_agree(name, tmp_path):
    trace = pre(tiny(name), tmp_path / "t")
    assert verify_trace(trace.path).ok
    for layer in range(trace.num_layers):
        stored, derived = keys_before(trace, layer), keys_before(Without(trace), layer)
        assert stored.shape == trace.keys(layer).shape
        np.testing.assert_allclose(derived, stored, rtol=0, atol=1e-5 * np.abs(stored).max())
        # Position 0 is not turned, the others are.
        np.testing.assert_array_equal(stored[:, 0], trace.keys(layer)[:, 0])
        assert np.abs(stored[:, 1:] - trace.keys(layer)[:, 1:]).max() > 0.1


def test_they_are_what_the_projection_gives(tmp_path):
    model, seen = tiny("llama-gqa3"), []
    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *a: seen.append(a[2]))
    trace = pre(model, tmp_path / "t", check=False)
    hook.remove()
    want = torch.cat(seen, dim=1)[0].view(L0 + STEPS, 2, 16).transpose(0, 1)
    np.testing.assert_array_equal(trace.keys_pre(1), want.numpy())


@pytest.mark.parametrize(("name", "still"), [("cohere2", 1), ("smollm3", 1)])
def test_layers_without_rotation_have_equal_keys(name, still, tmp_path):
    trace = pre(tiny(name), tmp_path / "t")
    for layer in range(3):
        same = np.array_equal(trace.keys_pre(layer), trace.keys(layer))
        assert same == (layer == still)
    with pytest.raises(PolicyError, match="is not known"):
        keys_before(Without(trace), 0)


def test_halves_and_a_plain_recording(tmp_path):
    model = tiny("qwen3")
    exact = pre(model, tmp_path / "exact")
    half = pre(model, tmp_path / "half", qk_dtype="float16", capture="qkv")
    plain = pre(model, tmp_path / "plain", pre_rope_keys=False)
    np.testing.assert_array_equal(half.keys_pre(2), exact.keys_pre(2).astype(np.float16))
    np.testing.assert_array_equal(plain.keys(2), exact.keys(2))
    assert half.stored("keys_pre").layout.dtype == "float16"
    assert half.has("keys_pre")
    assert not plain.has("keys_pre")
    assert plain.hash != exact.hash
    with pytest.raises(CaptureError, match="keys_pre; record with pre_rope_keys"):
        plain.keys_pre(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is not interpreted here")
@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3"])
def test_as_on_a_gpu(name, tmp_path, monkeypatch):
    model = tiny(name)
    plain = pre(model, tmp_path / "plain", capture="qkv")
    monkeypatch.setattr(kvsim_traces.recorder, "overlapped_device", lambda model: torch.device("cpu"))
    found = pre(model, tmp_path / "found", capture="qkv")
    for layer in range(3):
        np.testing.assert_array_equal(found.keys_pre(layer), plain.keys_pre(layer))


def test_everything_is_put_back(tmp_path):
    model, before = tiny("llama-gqa3"), modeling_llama.apply_rotary_pos_emb
    one, other = RotaryTap(model), RotaryTap(model)
    with one:
        watched = modeling_llama.apply_rotary_pos_emb
        inside = threading.Thread(target=lambda: other.__enter__() and other.__exit__())
        inside.start()
        inside.join()
        assert modeling_llama.apply_rotary_pos_emb is watched is not before
    assert modeling_llama.apply_rotary_pos_emb is before
    with pytest.raises(RuntimeError, match="stop"):
        pre(model, tmp_path / "t", progress=lambda *_: (_ for _ in ()).throw(RuntimeError("stop")))
    assert modeling_llama.apply_rotary_pos_emb is before


def test_refusals(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match=r"capture 'heads' keeps no keys; use 'qk' or 'qkv'"):
        pre(tiny("llama-gqa3"), tmp_path / "t", capture="heads")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(TraceError, match="GPT2LMHeadModel calls no apply_rotary_pos_emb"):
        pre(gpt2, tmp_path / "t")
    original = modeling_llama.apply_rotary_pos_emb
    model = tiny("llama-gqa3")
    norm = model.model.layers[2].self_attn.forward

    def scaled(*args, **kwargs):
        with monkeypatch.context() as patch:
            rotate = modeling_llama.apply_rotary_pos_emb
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *a, **k: [2 * x for x in rotate(*a, **k)])
            return norm(*args, **kwargs)

    model.model.layers[2].self_attn.forward = scaled
    with pytest.raises(TraceError, match=r"layer 2 \(LlamaAttention\) does more to its keys than apply_rotary_pos_emb"):
        pre(model, tmp_path / "t")
    assert modeling_llama.apply_rotary_pos_emb is original
    assert not (tmp_path / "t").exists()
