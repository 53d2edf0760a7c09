"""Models with random weights, prompts with random keys and values, and the loop that fast decoding is compared with."""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from kvsim_traces.manifest import LayerInfo
from transformers import (
    AttentionInterface,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvsim.live.prefix import Prefix, PrefixLayer, cache_argument, config_of

__all__ = ["SHAPES", "build", "copy_bandwidth", "loop_ms", "milliseconds", "random_prompt", "read_bytes"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "kind": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    },
    "qwen2.5-7b": {
        "kind": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip
"""Shapes of the models, as their configs give them."""

_KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
_scores: dict[str, Any] = {"on": False, "state": None}


def build(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    """Make a model with random weights where it will run."""
    options = dict(shape)
    model_class, config_class = _KINDS[options.pop("kind")]
    config = config_class(**options, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def random_prompt(model: Any, length: int) -> Prefix:
    """Make a prompt that no prefill has read: `length` random keys and values in every layer."""
    config = model.config
    weight = model.get_input_embeddings().weight
    place = {"device": weight.device, "dtype": weight.dtype}
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = config.num_key_value_heads, length, dim
    info = LayerInfo("full_attention", scaling=dim**-0.5)
    nobody = torch.empty(config.num_attention_heads, 0, dim, **place)
    layers = [
        PrefixLayer(index, info, torch.randn(shape, **place), torch.randn(shape, **place), nobody, None)
        for index in range(config.num_hidden_layers)
    ]
    return Prefix([0] * length, layers, torch.randn(weight.shape[0], device=weight.device), config_of(model))


def read_bytes(model: Any, slots: int) -> tuple[int, int]:
    """Count what one step must read: bytes of the weights without the embedding table, and of `slots` cached tokens."""
    config, table = model.config, model.get_input_embeddings().weight
    tied = model.lm_head.weight is table
    weights = sum(parameter.nbytes for parameter in model.parameters()) - (0 if tied else table.nbytes)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = config.num_hidden_layers * config.num_key_value_heads * dim * 2 * table.element_size() * slots
    return weights, cache


def copy_bandwidth(device: str, *, gigabytes: float = 4.0, repeats: int = 20) -> float:
    """Measure a copy within the device, in bytes read and written a second; the median of `repeats`."""
    source = torch.empty(int(gigabytes * 2**30) // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    times = milliseconds(lambda: target.copy_(source), repeats + 3, device)[3:]
    return float(2 * source.nbytes / (1e-3 * statistics.median(times)))


def milliseconds(action: Callable[[], object], count: int, device: str) -> list[float]:
    """Do something `count` times without waiting in between, and give the milliseconds of each.

    On a GPU between events that it records itself, so that the host's own time is not in them.
    """
    if not device.startswith("cuda"):
        times = []
        for _ in range(count):
            start = time.perf_counter()
            action()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    synchronize(device)
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def loop_ms(model: Any, prompt: Prefix, slots: int, *, scored: bool, steps: int = 16, warm: int = 4) -> float:
    """Time transformers' own loop over `slots` cached tokens, in milliseconds a token: the median of `steps`.

    Scored, every layer's attention is taken once more by a matrix product and a softmax, averaged over heads, and
    added to a moving average. Nothing is chosen or evicted, which spares this loop work that the fast form does.
    """
    AttentionInterface.register("kvsim_bench_scored", _scored)
    device = str(prompt.layers[0].keys.device)
    cache = DynamicCache()
    for layer in prompt.layers:
        cache.update(layer.keys[None, :, :slots].clone(), layer.values[None, :, :slots].clone(), layer.index)
    config, name = model.config, cache_argument(model)
    before, config._attn_implementation = config._attn_implementation, "kvsim_bench_scored"
    _scores.update(on=scored, state=None)
    token = torch.tensor([[5]], device=device)
    times = []
    try:
        with torch.inference_mode():
            for t in range(warm + steps):
                synchronize(device)
                start = time.perf_counter()
                positions = torch.tensor([[prompt.length + t]], device=device)
                logits = model(token, position_ids=positions, use_cache=True, **{name: cache}).logits
                token = logits[:, -1].argmax(-1, keepdim=True)
                synchronize(device)
                times.append(time.perf_counter() - start)
    finally:
        config._attn_implementation = before
        _scores.update(on=False, state=None)
    return 1e3 * statistics.median(times[warm:])


def _scored(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> Any:
    if _scores["on"]:
        grouped = query.reshape(key.shape[1], -1, query.shape[3])
        logits = grouped @ key[0].transpose(1, 2) * options["scaling"]
        row = torch.softmax(logits, dim=-1, dtype=torch.float32).mean((0, 1))
        state, count = _scores["state"], row.numel()
        if state is None:
            state = torch.zeros_like(row)
        elif state.numel() < count:
            state = torch.cat([state, state.mean().expand(count - state.numel())])
        _scores["state"] = 0.8 * state + 0.2 * row
    return sdpa_attention_forward(module, query, key, value, mask, **options)


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
