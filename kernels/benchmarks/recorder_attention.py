"""Record small random models on a GPU under each attention implementation and compare the rows with sdpa's.

    python kernels/benchmarks/recorder_attention.py --out recorder_attention.json

Not a test: CI has no GPU. Implementations that are not installed are reported as such.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from kvsim_traces import open_trace, record, verify_trace
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

IMPLEMENTATIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")
SHAPE = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=8, num_key_value_heads=2, head_dim=64)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_attention_heads=4, num_key_value_heads=1, head_dim=128)),
}


def compare(name: str, implementation: str, folder: Path) -> dict[str, Any]:
    """Record 8 forced steps after a prompt of 700 random tokens in bfloat16; `sdpa` must have been recorded first."""
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", torch.bfloat16).eval()
    prompt = torch.randint(0, SHAPE["vocab_size"], (1, 700), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {"model": name, "attention": implementation}
    try:
        model.set_attn_implementation(implementation)
    except ImportError as error:
        return found | {"not_installed": str(error)[:120]}
    start = time.perf_counter()
    trace = record(
        model, prompt, out=folder / f"{name}-{implementation}", steps=8, capture="heads", force=list(range(8))
    )
    seconds = time.perf_counter() - start
    base = open_trace(folder / f"{name}-sdpa")
    steps = range(1, trace.num_steps + 1)
    apart = max(float(abs(trace.attention_rows(t) - base.attention_rows(t)).max()) for t in steps)
    return found | {
        "check": trace.manifest.check,
        "largest_difference_from_sdpa": apart,
        "verified": verify_trace(trace.path).ok,
        "seconds": round(seconds, 1),
        "environment": trace.manifest.environment,
    }


def main() -> None:
    """Run every model under every implementation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [compare(name, attention, Path(folder)) for name in MODELS for attention in IMPLEMENTATIONS]
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
