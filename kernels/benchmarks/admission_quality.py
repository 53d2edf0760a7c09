"""Compare admissions at equal cache size on held-out texts, from a model and gates alone, on one GPU.

    python kernels/benchmarks/admission_quality.py MODEL --data held_out.jsonl --gate l*.safetensors --out q_h200.json
    python kernels/benchmarks/admission_quality.py --table q_h200.json

The first cuts the texts into pieces, records the first ones (prompt by prefill, the rest forced token by token), scores
the gates, and runs `kvsim.admission_quality` on the recordings and live on all pieces. The second prints the tables of
a file. Recordings go to ``--keep DIR``, where those that are there already are used again, or are removed.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvsim_traces import Trace, open_trace, record

from kvsim.admission_quality.command import main as compare
from kvsim.admission_quality.command import table_lines


def recorded(model: Any, tokenizer: Any, texts: list[list[int]], prompt: int, out: Path) -> list[Trace]:
    """Record texts that are not there, `prompt` tokens each as the prompt."""
    traces = []
    for number, text in enumerate(texts):
        path = out / f"text{number:03}"
        if not path.exists():
            start = time.time()
            record(
                model, text[:prompt], out=path, steps=len(text) - prompt, capture="qkv", force=text[prompt:],
                tokenizer=tokenizer, prompt_queries=256, pre_rope_keys=True,
            )  # fmt: skip
            print(f"recorded {path.name} in {time.time() - start:.1f} s", file=sys.stderr, flush=True)
        trace = open_trace(path)
        if trace.tokens is None or trace.tokens.tolist() != text or trace.prompt_length != prompt:
            raise SystemExit(f"{path}: is of another text or prompt; name a new directory with --keep")
        traces.append(trace)
    return traces


def run(options: argparse.Namespace, folder: Path) -> int:
    """Record and compare."""
    from kvsim_traces.loading import load_model

    from kvsim.bench import gpu_facts
    from kvsim.gating.data import read_texts, samples_of

    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    texts = samples_of(tokenizer, read_texts(options.data), length=options.length, instruction="")
    chosen = texts[options.skip : options.skip + options.recordings].tolist()
    traces = recorded(model, tokenizer, chosen, options.prompt, folder)
    del model
    arguments: list[Any] = ["--trace", *(trace.path for trace in traces), "--gate", *options.gate]
    arguments += ["--model", options.model, "--data", options.data, "--length", options.length]
    arguments += ["--prompt", options.prompt, "--texts", options.texts, "--skip", options.skip]
    arguments += ["--size", *options.size, "--budget", *options.budget, "--sink", options.sink]
    arguments += ["--dtype", options.dtype, "--out", options.out]
    for name in ("heads", "window", "device"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", getattr(options, name)]
    start = time.time()
    code = compare([str(one) for one in arguments])
    if code == 0:
        report = json.loads(options.out.read_text())
        report |= {"machine": gpu_facts(), "seconds": time.time() - start, "dtype": options.dtype}
        options.out.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    return code


def main() -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--table", type=Path, metavar="FILE")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--gate", nargs="+")
    parser.add_argument("--heads")
    parser.add_argument("--window", type=int)
    parser.add_argument("--sink", type=int, default=128)
    parser.add_argument("--size", nargs="+", default=["0.1", "0.2", "0.3", "0.5"])
    parser.add_argument("--budget", nargs="*", default=["15%", "25%"])
    parser.add_argument("--length", type=int, default=4608)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--texts", type=int, default=16, help="pieces for losses")
    parser.add_argument("--recordings", type=int, default=8, help="pieces that are recorded")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(table_lines(json.loads(options.table.read_text()))))
        return 0
    missing = [name for name in ("model", "data", "gate", "out") if getattr(options, name) is None]
    if missing:
        parser.error(f"missing: {', '.join(missing)}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        return run(options, options.keep)
    with tempfile.TemporaryDirectory(dir=options.out.absolute().parent) as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
