"""Record a model in float32 on a GPU, replay there, and check on a machine without one that the same comes out.

    python kernels/benchmarks/record_smollm2.py --model SmolLM2-135M-Instruct --out DIR     with a GPU
    python kernels/benchmarks/record_smollm2.py --check DIR                                 anywhere

Not a test: CI has no GPU. The first records one prompt in all captures, on the GPU and with the same tokens on its
machine's CPU, and replays policies on the GPU engine. The second replays the GPU's recordings on the cpu and reference
engines; every position must be evicted at the same step.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace, open_trace, record, verify_trace

from kvsim.bench import gpu_facts
from kvsim.engines import get_engine
from kvsim.policy import parse

CAPTURES = ("heads", "scores", "qk")
STEPS = 32
POLICIES = (
    "ema:0.8",
    "single",
    "cumulative",
    "ema:0.9/refresh=4",
    "ema:0.8/group=layer",
    "ema:0.8/group=head/protect=sink:2+recent:4",
)
PER_HEAD = "group=head"
TEXT = """The lighthouse keeper kept a ledger of every ship that passed the northern cape, with its name, the hour, the
weather and the colour of its sails. In the spring of the third year the ledger was full, and he began a second one on
the backs of old charts. The harbour master asked him once why he wrote down ships that never called at the port. He
said that a light is kept for those who pass as much as for those who come, and that somebody ought to remember them.
When the storm of the ninth of October took the lamp, he rowed out with a lantern and stood on the reef until morning.
Seven ships passed. He could give their names, and did, to the inspector who came to write the report. """


def plans(trace: Trace) -> list[Any]:
    """Give the policies that the recording allows, each at a tenth of the prompt."""
    texts = [text for text in POLICIES if trace.capture != "scores" or PER_HEAD not in text]
    return [parse(f"{text}/budget=10%").plan(trace) for text in texts]


def on_gpu(model_path: str, out: Path, device: str) -> dict[str, Any]:
    """Record on a device and on the CPU, replay on the GPU engine, and save what it evicted."""
    import torch
    from kvsim_traces.loading import load_model

    found: dict[str, Any] = {"captures": {}}
    model, tokenizer = load_model(model_path, dtype="float32", device="cpu")
    prompt = tokenizer(TEXT * 2).input_ids
    forced: list[int] | None = None
    traces = {}
    for capture in CAPTURES:
        model.to(device)
        trace = record(
            model, prompt, out=out / capture, steps=STEPS, capture=capture, tokenizer=tokenizer, suppress_eos=True
        )
        forced = trace.tokens[len(prompt) :].tolist()
        model.to("cpu")
        traces[capture] = trace
        plain = record(
            model, prompt, out=out / f"{capture}-cpu", steps=STEPS, capture=capture, tokenizer=tokenizer, force=forced
        )
        rows = [(trace.score_rows(t), plain.score_rows(t)) for t in range(1, trace.num_steps + 1)]
        found["captures"][capture] = {
            "check": trace.manifest.check,
            "notes": trace.manifest.notes,
            "verified": verify_trace(trace.path).ok,
            "steps": trace.num_steps,
            "prompt": trace.prompt_length,
            "largest_difference_from_cpu": max(float(abs(ours - theirs).max()) for ours, theirs in rows),
            "prompt_mass_from_cpu": float(abs(trace.prompt_mass() - plain.prompt_mass()).max()),
        }
    run = get_engine("gpu")
    saved = {}
    for capture, trace in traces.items():
        asked = plans(trace)
        for plan, outcome in zip(asked, run(trace, asked, mode="exact"), strict=True):
            saved[f"{capture} {plan.policy}"] = outcome.evicted_at
    np.savez(out / "evicted_at.npz", **saved)
    precision = torch.get_float32_matmul_precision()
    return found | {"replays": len(saved), "device": device, "float32_matmul_precision": precision, **gpu_facts()}


def check(out: Path) -> list[str]:
    """Replay the recordings on the other engines; give what differs."""
    wrong = []
    with np.load(out / "evicted_at.npz") as saved:
        for capture in CAPTURES:
            report = verify_trace(out / capture)
            if not report.ok:
                wrong += [f"{capture}: {problem}" for problem in report.problems]
                continue
            trace = open_trace(out / capture)
            asked = plans(trace)
            for engine in ("cpu", "reference"):
                for plan, outcome in zip(asked, get_engine(engine)(trace, asked), strict=True):
                    want = saved[f"{capture} {plan.policy}"]
                    if not np.array_equal(want, outcome.evicted_at):
                        count = int(np.count_nonzero(want != outcome.evicted_at))
                        wrong.append(f"{capture}, {plan.policy}: {engine} evicts {count} positions at other steps")
    return wrong


def main() -> int:
    """Do either half."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="transformers folder or .gguf file")
    parser.add_argument("--out", type=Path, help="new directory for the recordings")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", type=Path, metavar="DIR", help="check recordings made with --out DIR")
    options = parser.parse_args()
    if options.check is not None:
        wrong = check(options.check)
        print("\n".join(wrong) if wrong else "cpu and reference evict every position when the GPU engine did")
        return 1 if wrong else 0
    if options.model is None or options.out is None:
        parser.error("give --model and --out, or --check")
    options.out.mkdir(parents=True)
    found = on_gpu(options.model, options.out, options.device)
    text = json.dumps(found, indent=1)
    (options.out / "facts.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
