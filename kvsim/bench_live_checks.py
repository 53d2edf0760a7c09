"""What must hold before a time of the fast form counts: the plain form's answers, and nothing of PyTorch's inside."""

from typing import Any

import torch

from kvsim.bench_live_models import build, random_prompt
from kvsim.live.decode import decode
from kvsim.live.fast.session import Session
from kvsim.live.prefix import prefill
from kvsim.policy import parse

__all__ = ["SMALL", "found_in_step", "same_answers"]

SMALL: dict[str, dict[str, Any]] = {
    kind: {
        "kind": kind, "vocab_size": 199, "hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    for kind in ("llama", "qwen2")
}  # fmt: skip
RULES = ("ema:0.8", "ema:0.8/group=layer/refresh=3", "ema:0.8/group=head/refresh=first", "h2o", "ema:0.8/score=vnorm")
OTHERS = ("scaled_dot_product", "flash_attn", "flash_fwd", "fmha", "efficient_attention")
COPIES = ("DtoH", "Device -> Host")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item", "_local_scalar_dense")
MARK = "kvsim step"
WARM = 10


def same_answers(
    device: str,
    *,
    length: int = 120,
    steps: int = 24,
    rules: tuple[str, ...] = RULES,
    fused: tuple[bool, ...] = (True, False),
) -> dict[str, Any]:
    """Compare the fast form with the plain one on small models in float32, forced tokens.

    Returns
    -------
    dict
        ``cases``, ``evictions`` compared, ``moved`` (evicted at another step), ``near_ties`` counted, and
        ``logits_error``, the largest difference over the largest logit.
    """
    found = {"cases": 0, "evictions": 0, "moved": 0, "near_ties": 0, "logits_error": 0.0}
    generator = torch.Generator().manual_seed(0)
    for shape in SMALL.values():
        model = build(shape, device, torch.float32)
        tokens = torch.randint(0, shape["vocab_size"], (length + steps,), generator=generator).tolist()
        prefix, forced = prefill(model, tokens[:length]), tokens[length:]
        for rule in rules:
            options = {"steps": steps, "force": forced, "compression_ratio": "0.75", "keep_logits": True}
            (plain,) = decode(model, [prefix], [rule], **options)
            for way in fused:
                fast = _fast(model, prefix, plain.policy, forced, fused=way)
                found["cases"] += 1
                found["evictions"] += plain.evictions
                found["moved"] += int((plain.evicted_at != fast["evicted_at"]).sum())
                found["near_ties"] += plain.near_ties + fast["near_ties"]
                for ours, theirs in zip(fast["logits"], plain.logits, strict=True):
                    error = float((ours - theirs).abs().max() / theirs.abs().max())
                    found["logits_error"] = max(found["logits_error"], error)
    return found


def _fast(model: Any, prefix: Any, policy: str, forced: list[int], *, fused: bool) -> dict[str, Any]:
    from kvsim.live.fast import decode_fast

    (run,) = decode_fast(
        model, [prefix], [parse(policy)], steps=len(forced), forced=forced, keep_logits=True, fused=fused
    )
    return {"evicted_at": run.evicted_at, "near_ties": run.near_ties, "logits": run.logits}


def found_in_step(model: Any, policy: str, *, length: int, steps: int = 4, attention: str = "triton") -> dict[str, Any]:
    """Profile steps, once operator by operator and once as CUDA graphs, and name what must not be in them.

    Other libraries' attention must not be in steps whose attention is ours, waits and copies to the host in none.

    Returns
    -------
    dict
        ``wrong``: names of others' attention, waits and copies to the host. ``kernels``: launches a step.
        ``ours``: whether our attention was seen.
    """
    wrong, ours, kernels = set[str](), False, 0
    banned = (*OTHERS, *COPIES) if attention == "triton" else COPIES
    for graphs in (False, True):
        session = Session(
            model, [random_prompt(model, length)], [parse(policy)], steps=steps + WARM, graphs=graphs,
            attention=attention,
        )  # fmt: skip
        with session.attached():
            for _ in range(WARM):
                session.step()
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                for _ in range(steps):
                    with torch.profiler.record_function(MARK):
                        session.step()
                torch.cuda.synchronize()
        events = list(profile.events() or [])
        marks = [(e.time_range.start, e.time_range.end) for e in events if e.name == MARK and _is_host(e)]
        for event in events:
            inside = any(start <= event.time_range.start <= end for start, end in marks)
            if any(word in event.name for word in banned) or (inside and any(word in event.name for word in WAITS)):
                wrong.add(event.name)
        on_device = [e.name for e in events if not _is_host(e) and e.name != MARK]
        ours = ours or any("_attend" in name for name in on_device)
        kernels = len(on_device) // steps
    return {"wrong": sorted(wrong), "kernels": kernels, "ours": ours}


def _is_host(event: Any) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CPU)
