"""`kvsim.admission_quality` on a tiny random model: shows that everything runs, and nothing of quality."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvsim_traces import record
from transformers import LlamaConfig, LlamaForCausalLM

from kvsim.admission_quality.families import Families
from kvsim.admission_quality.quality import quality
from kvsim.admission_quality.recordings import Recordings
from kvsim.admission_quality.texts import LiveTexts
from kvsim.budget import Budget
from kvsim.retrieval_heads import save_heads
from kvsim.write_gate import WriteGate, save_gate

__all__ = ["smoke"]

LAYERS, HEADS, KV_HEADS, DIM, VOCABULARY = 2, 4, 2, 16, 97
LENGTH, PROMPT, TEXTS = 96, 64, 3


def smoke(directory: Path) -> dict[str, Any]:
    """Record, match, replay and decode in a few seconds.

    Parameters
    ----------
    directory : Path
        For the recordings, the gate and the heads.

    Returns
    -------
    dict
        As `kvsim.admission_quality.quality`.
    """
    # Matrices this small are multiplied fastest by one thread.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HEADS * DIM, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, initializer_range=0.3,
        max_position_embeddings=2 * LENGTH, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    texts = rng.integers(0, VOCABULARY, size=(TEXTS, LENGTH)).tolist()
    traces = [
        record(
            model, text[:PROMPT], out=directory / f"text{number}", steps=LENGTH - PROMPT, capture="qkv",
            force=text[PROMPT:], prompt_queries="all", pre_rope_keys=True, check=False,
        )
        for number, text in enumerate(texts)
    ]  # fmt: skip
    gates = tuple(_gate(directory / f"gate{shift}.safetensors", rng, shift) for shift in (-1, 1))
    scores = rng.random((LAYERS, KV_HEADS))
    heads = {
        "model": "tiny",
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "scores": scores.tolist(),
        "threshold": 0.5,
    }
    save_heads(heads, directory / "heads.json")
    return quality(
        Families(gates, str(directory / "heads.json"), window=8, sink=4, seed=0, longest=LENGTH),
        [0.05, 0.3, 0.5],
        [Budget.parse("40%")],
        recordings=Recordings(traces),
        texts=LiveTexts(model, texts, PROMPT),
    )


def _gate(path: Path, rng: np.random.Generator, shift: float) -> str:
    """Write a random gate; the higher `shift`, the more it admits."""
    heads = LAYERS, KV_HEADS

    def drawn(*shape: int) -> Any:
        return rng.normal(size=(*heads, *shape)).astype(np.float32)

    gate = WriteGate(
        w1=drawn(8, 2 * DIM), b1=drawn(8), w2=drawn(8), b2=drawn() + np.float32(shift),
        layers=tuple(range(LAYERS)), num_kv_heads=KV_HEADS, head_dim=DIM, window=8, tau=0.5, penalty=0.0, model="tiny",
    )  # fmt: skip
    save_gate(gate, path)
    return str(path)
