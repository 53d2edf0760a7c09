"""Tiny random models, and what transformers itself reports for them: the oracle of the recorder's tests."""

import copy
import inspect

import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)

VOCAB = 61
WINDOW = 8
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(21)]
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

MODELS = {
    "llama-gqa1": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 6}),
    "llama-gqa3": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral-sliding": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 40,
        },
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig,
        {"attention_chunk_size": WINDOW, "num_hidden_layers": 4, "num_local_experts": 2, "intermediate_size_mlp": 40},
    ),
}
SUPPORTED = ["llama-gqa1", "llama-gqa3", "qwen2", "qwen3", "mistral", "gemma3"]


def tiny(name, attention="sdpa", dtype=torch.float32, **changes):
    """A small random model; weights are large enough that attention is far from uniform."""
    model_class, config_class, options = MODELS[name]
    torch.manual_seed(0)
    config = config_class(**(SHAPE | options | changes))
    config._attn_implementation = attention
    model = model_class(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, -0.5, 1.5)
    return model.eval().to(dtype)


@torch.inference_mode()
def eager_run(model, tokens, prompt_length):
    """Feed a prompt, then one token at a time, through transformers' eager attention.

    Returns
    -------
    (prefill, rows, choices)
        Attention of the prompt [K, H, L0, L0] float32, of each step [K, H, n] over all its positions (zero outside a
        layer's window), and the greedy token after the prompt and after each step.
    """
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    renamed = "cache" in inspect.signature(model.forward).parameters
    cache = {"cache" if renamed else "past_key_values": DynamicCache(config=model.config)}
    out = model(torch.tensor([tokens[:prompt_length]]), output_attentions=True, **cache)
    prefill = torch.stack([layer[0] for layer in out.attentions]).float()
    rows, choices = [], [int(out.logits[0, -1].argmax())]
    for position in range(prompt_length, len(tokens)):
        out = model(torch.tensor([[tokens[position]]]), output_attentions=True, **cache)
        step = torch.zeros(len(out.attentions), prefill.shape[1], position + 1)
        for layer, seen in enumerate(out.attentions):
            step[layer, :, position + 1 - seen.shape[-1] :] = seen[0, :, 0]
        rows.append(step)
        choices.append(int(out.logits[0, -1].argmax()))
    return prefill, rows, choices
