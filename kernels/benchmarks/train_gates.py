"""Train SmolLM2's write gates on a GPU: WG-KV's Figures 11 (lambda and tau) and 12 (no local window), and duo's heads.

    python -m kvsim.gating.texts sotu --out sotu.jsonl              where there is a network; sqlite, moby-dick as well
    cat sotu.jsonl sqlite.jsonl > data.jsonl
    python kernels/benchmarks/train_gates.py --model SmolLM2-135M-Instruct --data data.jsonl \
        --held-out moby-dick.jsonl --out DIR
    python kernels/benchmarks/train_gates.py --smoke --out DIR      anywhere: a tiny random model, a few updates

Not a test: CI has no GPU. Each form of write-gated attention is timed over a few updates; the faster one trains all
gates, on as many tokens as --seconds allow but no more than --max-tokens each. DIR gets the gates, `frontier.json`
with everything, `frontier.csv` where there are gates, and `heads.json`. One GPU has room for several of these at once:
name the gates of each with --gate, and --gate none where only heads are searched for.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvsim_traces.files import write_report

from kvsim.bench import gpu_facts, machine
from kvsim.errors import KvsimError
from kvsim.gating.data import Samples
from kvsim.gating.duo import Passage, find_heads, passages
from kvsim.gating.duo_settings import DuoSettings
from kvsim.gating.run import lines, load_samples
from kvsim.gating.settings import Settings
from kvsim.gating.sweep import check_folder, frontier_lines, sweep
from kvsim.gating.train import train
from kvsim.retrieval_heads import save_heads

GATES = ("0.02:256", "0.08:256", "0.32:256", "1.28:256", "0.08:1")
TIMED = 5
VALIDATION_SECONDS = 8
"""Kept for each run's validation."""


def seconds_per_update(model: Any, samples: Samples, settings: Settings) -> float:
    """Time updates, the first two, which compile, left out."""
    moments: list[float] = []
    own = replace(settings, steps=TIMED, taus=(0.1,), checkpoint_every=0)
    train(model, samples, samples[:1], own, progress=lambda *_: moments.append(time.perf_counter()))
    return float(np.median(np.diff(moments[1:])))


def gates_of(texts: Sequence[str]) -> list[tuple[float, int]]:
    """Read which gates to train."""
    if list(texts) == ["none"]:
        return []
    try:
        return [(float(penalty), int(window)) for penalty, window in (text.split(":") for text in texts)]
    except ValueError:
        raise KvsimError(f"--gate {' '.join(texts)}: must be as in 0.08:256 0.32:256, or none") from None


def choose(model: Any, samples: Samples, settings: Settings, forms: tuple[str, ...]) -> tuple[Settings, dict[str, Any]]:
    """Give the settings of the fastest form of attention, and what each took or why it did not run."""
    found: dict[str, Any] = {}
    ways: dict[str, Settings] = {}
    for form in forms:
        # The full matrices of all layers do not fit at once.
        ways[form] = replace(settings, attention=form, checkpointing=form == "plain" and settings.length > 1024)
        try:
            found[form] = seconds_per_update(model, samples, ways[form])
        except (KvsimError, RuntimeError, NotImplementedError) as error:
            found[form] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]:.200}"
        print(f"{form}: {found[form]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    timed = [form for form in found if isinstance(found[form], float)]
    if not timed:
        raise KvsimError("no form of write-gated attention runs here")
    return ways[min(timed, key=lambda form: found[form])], found


def smoke() -> tuple[Any, Samples, Samples, list[Passage]]:
    """Make a tiny random model, and tokens that repeat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    tokens = np.tile(np.random.default_rng(0).integers(0, 64, (10, 32)), 2)
    return LlamaForCausalLM(config).eval(), tokens[:8], tokens[8:], [Passage(row.tolist(), 32) for row in tokens[:2]]


def main() -> int:
    """Train, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="transformers folder or .gguf file")
    parser.add_argument("--data", help="text to train on")
    parser.add_argument("--held-out", help="text to validate with")
    parser.add_argument("--out", type=Path, required=True, help="new or empty folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=330, help="for all of it, loading included")
    parser.add_argument("--max-tokens", type=int, default=6_000_000, help="of a run")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--gate", nargs="+", default=GATES, metavar="LAMBDA:WINDOW", help="gates to train, or none")
    parser.add_argument("--form", choices=("flex", "plain"), help="of attention; by default the faster one")
    parser.add_argument("--duo-steps", type=int, default=60, help="0 for no heads")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    try:
        return run(options)
    except KvsimError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Do all of it."""
    begun = time.perf_counter()
    runs = gates_of(options.gate)
    check_folder(options.out)
    settings = Settings(
        batch=options.batch, length=options.length, steps=1, checkpoint_every=0, max_tokens=options.max_tokens
    )
    # Settings that do not fit are refused before anything is loaded.
    for penalty, window in runs:
        replace(settings, penalty=penalty, window=window)
    duo = DuoSettings(steps=max(1, options.duo_steps), length=options.length, window=settings.window)
    if options.smoke:
        settings = replace(settings, window=8, length=64, hidden=8, held_out=2)
        runs = [(penalty, min(window, settings.window)) for penalty, window in runs]
        duo = replace(duo, steps=3, sink=2, window=8, length=64)
        model, samples, held_out, questions = smoke()
    else:
        if None in (options.model, options.data, options.held_out):
            raise KvsimError("give --model, --data and --held-out, or --smoke")
        from kvsim_traces.loading import load_model

        model, tokenizer = load_model(options.model, device=options.device)
        samples, held_out = load_samples(tokenizer, options.data, settings, held_out=options.held_out)
        questions = passages(tokenizer, duo) if options.duo_steps else []
    settings, timed = choose(model, samples, settings, ("flex", "plain") if options.form is None else (options.form,))
    each = timed[settings.attention]
    left = options.seconds - (time.perf_counter() - begun) - VALIDATION_SECONDS * len(runs)
    # A head's update computes attention twice, so it takes up to twice as long.
    left -= 2 * each / settings.batch * options.duo_steps
    most = 4 if options.smoke else options.max_tokens // (settings.batch * settings.length)
    steps = max(1, min(most, int(left / max(1, len(runs)) / each)))
    settings = replace(settings, steps=steps)
    print(f"{settings.attention}, {each:.3f} s an update: {len(runs)} x {steps} updates of {options.batch} samples")

    found = sweep(
        options.out,
        model,
        samples,
        held_out,
        settings,
        runs,
        progress=lambda own: lines(lambda line: print(f"W {own.window}  {line}", flush=True), own.penalty),
    )
    print("\n".join(frontier_lines(found)))
    for window, rows in found["windows"].items():
        print(f"window {window}: nothing admitted {rows['local']['loss']:.6f}, everything {rows['full']['loss']:.2e}")
    if options.duo_steps:
        start = time.perf_counter()
        duo = replace(duo, attention=settings.attention, checkpointing=settings.checkpointing)
        heads = find_heads(model, questions, duo)
        save_heads(heads, options.out / "heads.json")
        scores = np.array(heads["scores"])
        found["duo"] = {**asdict(duo), "seconds": time.perf_counter() - start, "mean": float(scores.mean())}
        print(f"heads: alphas {scores.min():.3f} to {scores.max():.3f}, mean {scores.mean():.3f}")
    facts = {
        "command": " ".join(["python", "kernels/benchmarks/train_gates.py", *sys.argv[1:]]),
        "seconds_per_update": timed,
        "seconds": time.perf_counter() - begun,
        "samples": len(samples),
        "held_out": len(held_out),
        **gpu_facts(),
        **machine(),
    }
    write_report(options.out / "frontier.json", found | facts)
    print(f"{facts['seconds']:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
