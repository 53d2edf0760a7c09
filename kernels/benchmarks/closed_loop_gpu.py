"""Time closed-loop replay on a GPU beside live decoding of the same text by transformers' loop, one policy at a time.

    python kernels/benchmarks/closed_loop_gpu.py MODEL --out closed_loop_h200.json

MODEL (SmolLM2-135M in float32) reads 512 tokens of Alice's Adventures in Wonderland, and the 512 tokens after them are
the text that every policy runs over: 32 policies in closed loop (`kvsim.live.device`), to the certificate. A few of
them are decoded live for the first 64 steps; their time is scaled to 32 policies of 512 steps, which favours live
decoding, whose later steps see a longer cache. Sets must agree up to near-ties. Then a model of Llama-3.1-8B's shape
with random weights in bfloat16 runs 4 policies of 128 steps after 2,048 random tokens: passes and time.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvsim.bench_live import machine
from kvsim.bench_live_models import SHAPES, build
from kvsim.budget import Budget
from kvsim.live import decode, prefill
from kvsim.live.device import DeviceLoop, closed_loop_on_device
from kvsim.live.device.replayer import ENGINES
from kvsim.live.prefix import Prefix
from kvsim.policy import parse

RULES = ("ema:0.8", "ema:0.95", "ema:0.9,over=step", "ema:0.8/refresh=4")
GROUPS = ("shared", "head")
RATIOS = ("0.5", "0.75", "0.9", "0.95")
WARM = 16
"""Steps of a run that is not timed: as many as leave rows aligned as the timed ones are, which a kernel is made for."""
SWAPS = 1e-3
"""The largest share of evictions in which rounding may make the two differ."""


def policies() -> list[str]:
    """Give 32 policies: rules, kinds of groups, ratios."""
    return [
        str(parse(f"{rule}/group={group}").with_budget(Budget.from_compression_ratio(ratio)))
        for group, rule, ratio in product(GROUPS, RULES, RATIOS)
    ]


def timed(device: str, action: Callable[[], Any]) -> tuple[float, Any]:
    """Run an action; give the seconds until the device has done it, and its answer."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    answer = action()
    wait()
    return time.perf_counter() - start, answer


def figures(loops: list[DeviceLoop], seconds: float, steps: int) -> dict[str, Any]:
    """Say what some closed loops took."""
    passes = [len(loop.passes) for loop in loops]
    return {
        "policies": len(loops),
        "steps": steps,
        "seconds": round(seconds, 3),
        "passes_of_policies": sum(passes),
        "passes_median": statistics.median(passes),
        "passes_max": max(passes),
        "exact": all(loop.passes[-1].exact_steps == steps for loop in loops),
        "passes_per_s": round(sum(passes) / seconds, 1),
        "policies_per_hour": round(3600 * len(loops) / seconds),
        "evictions": sum(loop.evictions for loop in loops),
        "near_ties": sum(loop.near_ties for loop in loops),
    }


def text(model_path: str, options: argparse.Namespace) -> tuple[Any, Prefix, list[int]]:
    """Load the model, read the prompt, and give the tokens after it."""
    from kvsim_traces.loading import load_model

    from kvsim.tasks.words import prose

    model, tokenizer = load_model(model_path, dtype="float32", device=options.device)
    needed = options.prompt + options.steps
    tokens = tokenizer(" ".join(prose(2 * needed)), add_special_tokens=False).input_ids[:needed]
    if len(tokens) < needed:
        raise SystemExit(f"the text has {len(tokens)} tokens, {needed} are needed")
    return model, prefill(model, tokens[: options.prompt]), tokens[options.prompt :]


def closed(
    model: Any, prefix: Prefix, tokens: list[int], options: argparse.Namespace
) -> tuple[dict[str, Any], list[DeviceLoop]]:
    """Run all policies in closed loop, each kind of groups by itself; a short run before warms up."""
    asked = policies()
    closed_loop_on_device(model, prefix, tokens[:WARM], [asked[0], asked[-1]])
    found: dict[str, Any] = {}
    loops: list[DeviceLoop] = []
    seconds = 0.0
    for group in GROUPS:
        own = [
            policy for policy in asked if f"group={group}" in policy or (group == "shared" and "group=" not in policy)
        ]
        took, part = timed(
            options.device, lambda own=own: closed_loop_on_device(model, prefix, tokens, own, batch=options.batch)
        )
        found[group] = figures(part, took, len(tokens))
        seconds += took
        loops += part
        print(f"closed loop, {group} sets:", found[group], flush=True)
    return {**figures(loops, seconds, len(tokens)), "by_groups": found}, loops


def engines(model: Any, prefix: Prefix, tokens: list[int]) -> dict[str, Any]:
    """Run a few policies for some steps by the kernel and by PyTorch's operations; sets and passes must be the same."""
    few, asked = tokens[:64], [text for number, text in enumerate(policies()) if number % 5 == 2]
    found: dict[str, Any] = {"policies": len(asked), "steps": len(few)}
    answers = []
    for engine in ENGINES:
        go = lambda engine=engine: closed_loop_on_device(model, prefix, few, asked, engine=engine)  # noqa: E731
        go()
        seconds, loops = timed(str(prefix.layers[0].keys.device), go)
        found[f"seconds_{engine}"] = round(seconds, 3)
        answers.append(loops)
    pairs = list(zip(*answers, strict=True))
    found["swaps"] = sum(int(np.count_nonzero(one.evicted_at != other.evicted_at)) for one, other in pairs)
    found["near_ties_apart"] = sum(abs(one.near_ties - other.near_ties) for one, other in pairs)
    found["passes_apart"] = sum(len(one.passes) != len(other.passes) for one, other in pairs)
    return found


def live(
    model: Any, prefix: Prefix, tokens: list[int], loops: list[DeviceLoop], options: argparse.Namespace, end: float
) -> dict[str, Any]:
    """Decode a few policies live for some steps, compare their sets, and scale their time to all."""
    few, rows = min(options.live_steps, len(tokens)), []
    half = len(loops) // 2
    # Of each kind of groups in turn: 90%, the other ratios, other rules.
    order = [place + offset for place in (2, 7, 8, 13) for offset in (0, half) if place + offset < len(loops)]
    decode(model, [prefix], [loops[0].policy], steps=2, force=tokens[:2])
    for number in dict.fromkeys(order):
        if time.monotonic() > end and len(rows) >= 2:
            break
        loop = loops[number]
        seconds, (run,) = timed(
            options.device,
            lambda loop=loop: decode(model, [prefix], [loop.policy], steps=few, force=tokens[:few]),
        )
        ours = loop.evicted_at[:, : run.evicted_at.shape[1]]
        ours = np.where(ours > few, -1, ours)
        rows.append(
            {
                "policy": loop.policy,
                "group": "head" if number >= half else "shared",
                "steps": few,
                "seconds": round(seconds, 3),
                "ms_per_step": 1e3 * seconds / few,
                "evictions": run.evictions,
                "near_ties": run.near_ties,
                "swaps": int(np.count_nonzero(ours != run.evicted_at)),
            }
        )
        print("live:", rows[-1], flush=True)
    scaled = 0.0
    for group in GROUPS:
        own = [row["seconds"] / few for row in rows if row["group"] == group]
        scaled += (len(loops) // len(GROUPS)) * len(tokens) * statistics.mean(own)
    return {
        "rows": rows,
        "extrapolated": f"from {few} steps of {len(rows)} policies to {len(tokens)} of {len(loops)}, by kind of groups",
        "seconds_extrapolated": round(scaled, 1),
        "policies_per_hour": round(3600 * len(loops) / scaled, 1),
        **{name: sum(row[name] for row in rows) for name in ("evictions", "near_ties", "swaps")},
    }


def fast(model: Any, prefix: Prefix, tokens: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Decode one policy by our kernels over all the tokens: the other quick way to the same sets."""
    policy = policies()[2]
    go = lambda: decode(model, [prefix], [policy], steps=len(tokens), force=tokens, engine="triton")  # noqa: E731
    first, _ = timed(options.device, go)
    seconds, _ = timed(options.device, go)
    return {"policy": policy, "steps": len(tokens), "seconds": round(seconds, 3), "seconds_of_first": round(first, 3)}


def large(options: argparse.Namespace) -> dict[str, Any]:
    """Run a model of an 8B shape."""
    prompt, steps = (2048, 128) if options.device.startswith("cuda") else (16, 8)
    shape = SHAPES["llama-3.1-8b"]
    if not options.device.startswith("cuda"):
        shape = {**shape, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}
    model = build(shape, options.device, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape["vocab_size"], (prompt + steps,), generator=generator).tolist()
    prefix, forced = prefill(model, tokens[:prompt]), tokens[prompt:]
    asked = [f"{rule}/budget={budget}" for rule, budget in product(("ema:0.8", "ema:0.95"), ("10%", "25%"))]
    closed_loop_on_device(model, prefix, forced[:WARM], asked[:1])
    seconds, loops = timed(options.device, lambda: closed_loop_on_device(model, prefix, forced, asked))
    found = {"prompt": prompt, "dtype": "bfloat16", **figures(loops, seconds, steps)}
    few = min(16, steps)
    decode(model, [prefix], asked[:1], steps=2, force=forced[:2])
    took, _ = timed(options.device, lambda: decode(model, [prefix], asked[:1], steps=few, force=forced[:few]))
    found["live_ms_per_step"] = 1e3 * took / few
    found["live_seconds_extrapolated"] = round(len(asked) * steps * took / few, 1)
    found["live_over_closed"] = round(found["live_seconds_extrapolated"] / seconds, 1)
    return found


def main() -> None:
    """Run the parts, print and save; a part that fails says why, and the others run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="SmolLM2-135M: a transformers folder")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--live-steps", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="policies that run together")
    parser.add_argument("--seconds", type=float, default=200, help="start nothing new after so long")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    start, failed = time.monotonic(), []
    report: dict[str, Any] = {
        "machine": {**machine(options.device), "command": " ".join(["python", *sys.argv])},
        "text": f"Alice, {options.prompt} tokens read and {options.steps} forced, float32",
    }

    def part(name: str, action: Callable[[], Any]) -> Any:
        if time.monotonic() - start > options.seconds:
            report[name] = {"error": f"not started: {options.seconds:g} seconds are over"}
        else:
            try:
                answer = action()
                report[name] = answer[0] if isinstance(answer, tuple) else answer
                print(f"{name}: {report[name]}", flush=True)
                save()
                return answer
            except Exception as error:
                report[name] = {"error": f"{type(error).__name__}: {error}"[:1000]}
        failed.append(name)
        print(f"{name}: {report[name]}", flush=True)
        save()
        return None

    def save() -> None:
        report["seconds"] = round(time.monotonic() - start, 1)
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n")

    try:
        model, prefix, tokens = text(options.model, options)
        done = part("closed_loop", lambda: closed(model, prefix, tokens, options))
        if done is not None:
            loops, limit = done[1], start + 0.5 * options.seconds
            beside = part("live", lambda: live(model, prefix, tokens, loops, options, limit))
            if beside is not None:
                report["live_over_closed"] = round(beside["seconds_extrapolated"] / done[0]["seconds"], 1)
                print(f"live over closed loop: {report['live_over_closed']} (goal: 20)", flush=True)
                if beside["swaps"] > SWAPS * beside["evictions"]:
                    failed.append(f"equality: {beside['swaps']} of {beside['evictions']} evictions differ")
            same = part("engines", lambda: engines(model, prefix, tokens))
            if same is not None and (same["swaps"] or same["near_ties_apart"] or same["passes_apart"]):
                failed.append(f"engines: {same}")
            part("engine_triton", lambda: fast(model, prefix, tokens, options))
    except Exception as error:
        failed.append(f"{type(error).__name__}: {error}"[:1000])
    part("llama_8b_shape", lambda: large(options))
    report["failed"] = failed
    save()
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
