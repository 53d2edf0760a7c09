"""Record what kvpress keeps of small random models: ``python make_golden.py`` writes golden.npz beside this file.

kvpress 0.5.5 and kvsim's recorder need different versions of transformers, so this script builds an environment for
kvpress (``--venv DIR`` keeps it for the next time) and runs itself there. `test_kvpress_golden.py` reads the file, and
never imports kvpress.

golden.npz holds for each case C of `CASES`, with L0 prompt tokens, and one decode step after them:

    C/config                                   JSON of the model's config, as bytes
    C/prompt_queries [K, H, L0, d]             post-RoPE queries of every prompt token
    C/keys, C/values [K, Hk, L0 + 1, d]        post-RoPE keys, values
    C/queries [K, H, d]                        post-RoPE queries of the decode step
    C/PRESS/RATIO/kept [K, Hk, L0]             bool, what kvpress kept at that compression ratio
    C/PRESS/RATIO/scores [K, Hk, L0]           its scores (of AdaKV: those of the press it wraps)
    C/PRESS/settings                           JSON of what is not default, as bytes

and ``n_kept``, rows of (L0, ratio in thousandths, tokens that kvpress keeps of L0).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

OUT = Path(__file__).with_name("golden.npz")
REQUIREMENTS = ["torch==2.13.0", "transformers==5.2.0", "numpy<3", "cachetools<6", "datasets", "fire<0.7", "requests"]
PINNED = "kvpress==0.5.5"
RATIOS = ("0.5", "0.75")
LINEAR = {"rope_type": "linear", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "default": {"layers": 3, "heads": 4, "kv_heads": 2, "prompt": 120, "rope": {"rope_type": "default"}, "seed": 0},
    "llama3": {"layers": 2, "heads": 6, "kv_heads": 3, "prompt": 97, "rope": LLAMA3, "seed": 1},
    "linear": {"layers": 2, "heads": 2, "kv_heads": 2, "prompt": 72, "rope": LINEAR, "seed": 2},
}
HEAD_DIM = 16
PRESSES = {
    "knorm": ("KnormPress", {}),
    "keydiff": ("KeyDiffPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 12}),
    "tova": ("TOVAPress", {}),
    "streaming": ("StreamingLLMPress", {"n_sink": 4}),
    "expected": ("ExpectedAttentionPress", {"n_future_positions": 64}),
    "expected_plain": ("ExpectedAttentionPress", {"n_future_positions": 64, "n_sink": 0, "use_vnorm": False}),
    "pyramidkv": ("PyramidKVPress", {"window_size": 2, "kernel_size": 3}),
    "adakv_snapkv": ("AdaKVPress", {"press": ("SnapKVPress", {"window_size": 12})}),
    "adakv_expected": ("AdaKVPress", {"press": ("ExpectedAttentionPress", {"n_future_positions": 64})}),
}


def main() -> None:
    """Build the environment, or, inside it, record."""
    parser = argparse.ArgumentParser(description="Record what kvpress keeps of small random models.")
    parser.add_argument("--venv", type=Path, help="where to build, or find, the environment with kvpress")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        record()
    elif arguments.venv:
        run_in(arguments.venv)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_in(Path(folder) / "venv")


def run_in(folder: Path) -> None:
    """Build an environment unless there is one, and run this script in it."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, *REQUIREMENTS], check=True)
        # Its other requirements (peft, accelerate, pandas < 3) are imported by none of the presses below.
        subprocess.run([*install, "--no-deps", PINNED], check=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([str(python), str(Path(__file__).resolve()), "--inside"], check=True, env=environment)


def record() -> None:
    """Run every press on every case and write golden.npz."""
    import numpy as np
    from kvpress.utils import compute_n_kept

    arrays = {}
    for name, case in CASES.items():
        for key, value in record_case(case).items():
            arrays[f"{name}/{key}"] = value
    lengths = [(length, ratio) for length in (10, 60, 120, 500, 1000) for ratio in (300, 500, 700, 750, 900)]
    arrays["n_kept"] = np.array([(length, r, compute_n_kept(length, r / 1000)) for length, r in lengths])
    np.savez_compressed(OUT, **arrays)
    print(f"wrote {OUT}: {OUT.stat().st_size} bytes, {len(arrays)} arrays")


def record_case(case):
    """Give one case's arrays."""
    import numpy as np
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(case["seed"])
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=HEAD_DIM * case["heads"],
        intermediate_size=32,
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, **case["rope"]},
        # Attention as peaked as a trained model's: with the default of 0.02 it is flat and every score a near-tie.
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    tokens = torch.randint(64, (1, case["prompt"] + 1))
    cache = DynamicCache()
    layers = [layer.self_attn for layer in model.model.layers]
    seen = []
    hooks = []
    for module in layers:
        module.rotary_emb = model.model.rotary_emb
        hooks.append(module.register_forward_hook(lambda m, _, kw, __: seen.append((m, kw)), with_kwargs=True))
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache)
        prompt_calls = list(seen)
        pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        model(tokens[:, -1:], past_key_values=cache)
        arrays = {
            "config": np.frombuffer(json.dumps(described(config), sort_keys=True).encode(), np.uint8),
            "prompt_queries": np.stack([rotated_queries(m, kw)[0].numpy() for m, kw in prompt_calls]),
            "queries": np.stack([rotated_queries(m, kw)[0, :, 0].numpy() for m, kw in seen[len(layers) :]]),
            "keys": np.stack([layer.keys[0].numpy() for layer in cache.layers]),
            "values": np.stack([layer.values[0].numpy() for layer in cache.layers]),
        }
        for hook in hooks:
            hook.remove()
        for name, (_, settings) in PRESSES.items():
            arrays[f"{name}/settings"] = np.frombuffer(json.dumps(settings, sort_keys=True).encode(), np.uint8)
            for ratio in RATIOS:
                for key, value in run_press(name, ratio, prompt_calls, pairs).items():
                    arrays[f"{name}/{ratio}/{key}"] = value
    return arrays


def described(config):
    """Give what a trace's manifest would hold of the config."""
    names = ["model_type", "head_dim", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads"]
    return {name: getattr(config, name) for name in [*names, "max_position_embeddings", "rope_parameters"]}


def rotated_queries(module, kwargs):
    """Give the post-RoPE queries of one call of an attention layer, [1, H, n, d]."""
    from kvpress.utils import get_prerope_query_states
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    queries = get_prerope_query_states(module, kwargs["hidden_states"])
    return apply_rotary_pos_emb(queries, queries, *kwargs["position_embeddings"])[0]


def run_press(name, ratio, calls, pairs):
    """Give a press's scores and what its own `compress` keeps, layer by layer."""
    import numpy as np

    kept, scores = [], []
    for (module, kwargs), (keys, values) in zip(calls, pairs, strict=True):
        press = build(PRESSES[name])
        press.compression_ratio = float(ratio)
        call = (module, kwargs["hidden_states"], keys, values, None, kwargs)
        scores.append(getattr(press, "press", press).score(*call)[0].numpy())
        left, _ = press.compress(*call)
        mask = np.zeros(keys.shape[1:3], bool)
        if name.startswith("adakv"):
            _, heads, positions = module.masked_key_indices
            mask[heads.numpy(), positions.numpy()] = True
            mask = ~mask
        else:
            for head, own in enumerate(left[0]):
                same = (own[:, None] == keys[0, head][None]).all(-1)
                assert bool((same.sum(-1) == 1).all()), "keys must differ for positions to be read off them"
                mask[head, same.int().argmax(-1).numpy()] = True
        kept.append(mask)
    return {"kept": np.stack(kept), "scores": np.stack(scores)}


def build(spec):
    """Make a press from (class name, settings), where a setting may be such a pair itself."""
    import kvpress

    name, settings = spec
    made = {key: build(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    return getattr(kvpress, name)(**made)


if __name__ == "__main__":
    sys.exit(main())
