"""What tests of fast live decoding share: tiny models, and how two runs are compared."""

import numpy as np
import torch
from recording import PROMPT, VOCAB, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
STEPS = 4
BUDGET = 6
FORCED = [(5 * i * i + 11) % VOCAB for i in range(STEPS)]
PROMPTS = [PROMPT[:14], [(17 * i + 5) % VOCAB for i in range(10)]]
PROMPT_LONG = PROMPT


def small(name, **changes):
    """A tiny random model where kernels run."""
    attention = "eager" if name == "gpt-oss" else "sdpa"
    own = SMALL if name not in ("gemma3", "gpt-oss", "llama4") else {}
    return tiny(name, attention, **(own | changes)).to(DEVICE)


def assert_same(fast, plain, limit=1e-4):
    """The same tokens, sets and logits; a set may differ where a near-tie was counted."""
    assert fast.tokens == plain.tokens
    moved = int((fast.evicted_at != plain.evicted_at).sum())
    assert moved <= 2 * (fast.near_ties + plain.near_ties), (moved, fast.near_ties)
    assert fast.evictions == plain.evictions
    assert fast.logical_bytes == plain.logical_bytes
    assert fast.full_bytes == plain.full_bytes
    assert len(fast.logits) == len(plain.logits)
    for ours, theirs in zip(fast.logits, plain.logits, strict=True):
        if not moved:
            assert float((ours - theirs).abs().max()) < limit
    assert np.isfinite([float(logits.sum()) for logits in fast.logits]).all()
