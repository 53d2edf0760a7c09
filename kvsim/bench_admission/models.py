"""Models with random weights, their write gates, and the random masks that stand in for what the gates decide."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvsim_kernels.vertical_slash.kernel import Tiling

from kvsim.bench_live_models import SHAPES as LIVE_SHAPES
from kvsim.gating.module import default_hidden
from kvsim.live.gate import Unrotated
from kvsim.live.gatekeeper import GateKeeper
from kvsim.live.sequence import admission_name
from kvsim.policy import parse
from kvsim.rope import rope_of_config
from kvsim.write_gate import WriteGate

__all__ = ["PROFILED", "SHAPES", "SMOKE", "TAU", "Setting", "drawn_masks", "gatekeeper"]

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": LIVE_SHAPES["llama-3.1-8b"],
    "qwen3-4b": {
        "kind": "qwen3", "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0},
    },
}  # fmt: skip
"""Shapes of the models, as their configs give them."""

SMOKE: dict[str, dict[str, Any]] = {
    "tiny": {
        "kind": "llama", "vocab_size": 10, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
}  # fmt: skip

PROFILED = 3
"""Decode steps that are profiled after those that are timed."""

TAU = 0.5
"""An admitted token's gate is 1 and another's 0, once the mask has taken the decision."""


@dataclass(frozen=True)
class Setting:
    """What is measured, and where.

    Attributes
    ----------
    window : int
        W.
    admitted : float
        The share of positions that each KV head admits: 1 - sparsity.
    chunk : int
        Tokens that go through projections and MLP together.
    steps, warm : int
        Decode steps timed, and steps before them.
    repeats : int
        Attention calls of which the median is taken.
    tiling : Tiling, optional
        How vertical-slash attention cuts its work.
    device : str
    dtype : torch.dtype
    """

    window: int = 256
    admitted: float = 0.25
    chunk: int = 16384
    steps: int = 100
    warm: int = 10
    repeats: int = 3
    tiling: Tiling | None = None
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def on_gpu(self) -> bool:
        """Whether times mean anything."""
        return self.device.startswith("cuda")

    @property
    def all_steps(self) -> int:
        """Decode steps that a cache must have room for."""
        return self.warm + self.steps + PROFILED

    @property
    def policy(self) -> str:
        """The policy that the dual cache runs under; the mask is drawn here, with an exact share."""
        return f"full/admit=random:{self.admitted:g},window={self.window}"

    def kept(self, length: int) -> int:
        """Give the positions of a prompt that each KV head admits."""
        return max(1, round(length * self.admitted))


def drawn_masks(layers: int, kv_heads: int, length: int, kept: int, device: str) -> torch.Tensor:
    """Draw which positions each KV head of each layer admits, exactly `kept` of them, bool [layers, Hk, length]."""
    masks = torch.zeros(layers * kv_heads, length, dtype=torch.bool, device=device)
    for own in masks:
        own[torch.randperm(length, device=device)[:kept]] = True
    return masks.view(layers, kv_heads, length)


def gatekeeper(model: Any, setting: Setting) -> GateKeeper:
    """Put random write gates of the usual size into a model (about 0.4% of its parameters, WG-KV section 5.3)."""
    config = model.config
    layers, kv_heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    hidden = default_hidden(sum(parameter.numel() for parameter in model.parameters()), layers * kv_heads, dim)
    draw = np.random.default_rng(0)
    w1 = draw.standard_normal((layers, kv_heads, hidden, 2 * dim), dtype=np.float32) * np.float32((2 * dim) ** -0.5)
    b1, w2 = draw.standard_normal((2, layers, kv_heads, hidden), dtype=np.float32) * np.float32(hidden**-0.5)
    gate = WriteGate(
        w1, b1, w2, np.zeros((layers, kv_heads), np.float32), layers=tuple(range(layers)), num_kv_heads=kv_heads,
        head_dim=dim, window=setting.window, tau=TAU, penalty=0.0, model="random weights",
    )  # fmt: skip
    rope = Unrotated(rope_of_config(config.to_dict(), "full_attention", dim))
    name = admission_name(parse(setting.policy))
    assert name is not None
    return GateKeeper(name, setting.window, gate.layers, gate, tau=TAU, unrotated=[rope] * layers)
