"""The shared case list: every engine and kernel is compared with the reference on these."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, TraceWriter, open_trace
from kvsim_traces.manifest import LayerInfo, Manifest

from kvsim.engines import ENGINES
from kvsim.write_gate import WriteGate, save_gate

CPU_ENGINES = sorted(set(ENGINES) - {"gpu"})
"""Engines that run every policy on any machine; test_gpu_engine.py has the other one run those that it can."""

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"

# One line a policy.
POLICIES = [
    "full",
    "single",
    "single/group=layer",
    "single/group=head",
    "cumulative",
    "cumulative/group=layer",
    "cumulative:start=prompt/group=head",
    "cumulative:start=prompt/when=prefill",
    "ema:0",
    "ema:0.5",
    "ema:0.8",
    "ema:0.95/group=layer",
    "ema:0.9/group=head",
    "ema:0.8,over=step",
    "ema:0.8,over=layer",
    "ema:0.8/refresh=4",
    "ema:0.8/refresh=first",
    "ema:0.6/refresh=3/group=head",
    "ema:0.8/protect=sink:2+recent:3",
    "ema:0.8/budget=10%",
    "ema:0.8/budget=13/group=layer",
    "cumulative/protect=recent:50%",
    "ema:0.8/score=entropy",
    "ema:0.8/score=vnorm",
    "cumulative/score=vnorm/group=head",
    "ema:0.8/score=keydiff",
    "ema:0.5/score=knorm/refresh=2",
    "ema:0.8/score=recency",
    "window:5",
    "window:3,pool=3/group=head",
    "window:4/score=vnorm/refresh=2",
    "window:3,start=prompt/group=layer",
    "ema:0.8/when=overflow",
    "cumulative/when=overflow:30%/group=head",
    "ema:0.5/score=attention:heads=max/group=head",
    "tova",
    "h2o",
    "snapkv:6",
    "snapkv:6,kernel=3,heads=max/when=every",
    "scissorhands:6",
    "streaming:4",
    "recency",
    "keydiff",
    "keydiff/when=prefill",
    "knorm",
    "random:7",
    "expected",
    "cumulative/score=expected:n_future=9,n_sink=2,vnorm=false/refresh=3",
    "pyramidkv:6",
    "pyramid:2,start=prompt,beta=3/group=layer/protect=sink:1",
    "adakv:snapkv,window_size=3,kernel=3",
    "adakv:expected,floor=0.5",
    "adahead:2,safeguard=minimum/group=head",
    "adahead:0/score=knorm/group=head/when=overflow",
    "kvzip",
    "nonuniform/score=kvzip/group=layer",
    "nonuniform/score=knorm/group=head/protect=sink:1+recent:20%/when=prefill",
    "cumulative/score=kvzip",
    "rkv:6",
    "rkv:3,kernel=1,mix=0.5/when=overflow:40%",
    "ema:0.8/score=rkv:0.3,threshold=0.1,heads=mean",
    "cumulative:start=prompt/score=rkv:0.5,threshold=0.2/group=layer/when=prefill",
    "lagkv:4",
    "ema:0.5/score=lagkv:3,n_sink=1/group=layer",
    "cake:3",
    "preference:4,gamma=1,tau1=1.6,tau2=0.4/group=layer/when=prefill/protect=sink:1",
    "rescue:0.6,40/protect=recent:1",
    "rescue:0.8,30/group=head/refresh=3",
    "rescue:0.5,20/when=overflow:50%",
    "inertiakv",
    "inertiakv-aux",
    "inertiakv-lazy:4",
    "score-free",
    "adaptive:noise,warmup=3",
    "adaptive:noise,over=step,warmup=2/group=head",
    "adaptive:disagreement,high=0.9",
    "adaptive:disagreement,over=step,threshold=0.1,share=1/group=layer/refresh=2",
    "adaptive:tracking",
    "adaptive:tracking,over=step,low=0/refresh=2",
    "adaptive:tracking,over=step,beta=0.4/group=head/protect=sink:1+recent:1",
    "oracle:future",
    "oracle:exact",
    "oracle:bound",
    "oracle:exact/group=layer",
    "oracle:bound/group=head/budget=10%",
]

# One line for each admission and selection, and what they are combined with; {gate} and {heads} are files, see `named`.
ADMITTING = [
    "full/admit=local:window=5,sink=3",
    "full/admit=local:window=1,sink=0",
    "full/admit=local:window=5000,sink=0",
    "full/admit=random:0.25,window=4",
    "full/admit=random:0.4,seed=3,window=1",
    "full/admit=oracle:0.25,window=5",
    "full/admit=wgkv:{gate},tau=0.5",
    "full/admit=wgkv:{gate},tau=0,window=3",
    "full/admit=wgkv:{gate},tau=1.5,window=3",
    "full/admit=duo:{heads},window=4,sink=2",
    "full/admit=duo:{heads},window=4,sink=0,share=0.5",
    "full/admit=duo:{heads}",
    "ema:0.8/admit=random:0.5,window=4",
    "tova/admit=local:window=1,sink=9",
    "single/refresh=3/admit=wgkv:{gate},window=2",
    "cumulative/score=keydiff/protect=sink:1+recent:2/admit=random:0.6,seed=1,window=3",
    "window:3,pool=3/admit=random:0.5,seed=2,window=2",
    "snapkv:3/admit=duo:{heads},window=2,sink=4",
    "snapkv:3,heads=max/when=overflow/admit=random:0.5,window=4",
    "cumulative:start=prompt/when=overflow:40%/admit=random:0.3,seed=4,window=4",
    "ema:0.5/when=overflow:1%/admit=duo:{heads},window=3,sink=0",
    "rkv:3,kernel=1,mix=0.5/admit=random:0.5,seed=5,window=2",
    "rkv:2,kernel=1,mix=0.5/when=overflow:40%/admit=random:0.5,seed=5,window=3",
    "rescue:0.6,40/admit=random:0.5,seed=6,window=1",
    "rescue:0.5,20/when=overflow:50%/admit=random:0.5,window=2",
    "adaptive:tracking,over=step/admit=random:0.5,window=2",
    "random:7/admit=random:0.5,window=2",
]
SELECTING = [
    "full/select=topk:6",
    "full/select=quest:32",
    "ema:0.8/select=topk:3",
    "single/group=layer/select=quest:16",
    "full/admit=random:0.5,window=4/select=quest:32",
    "full/admit=local:window=1,sink=20/select=quest:16",
    "full/admit=local:window=9,sink=20/select=topk:7",
    "snapkv:3,heads=max/when=overflow/admit=random:0.5,window=4/select=quest:16",
]

PER_HEAD = (
    "h2o",
    "keydiff",
    "knorm",
    "snapkv",
    "scissorhands",
    "expected",
    "pyramidkv",
    "adakv",
    "kvzip",
    "rkv",
    "lagkv",
    "cake",
)
NEEDS_HEADS = [p for p in POLICIES if "group=head" in p or p.startswith(PER_HEAD)]
READS_KEYS = (
    "vnorm",
    "keydiff",
    "knorm",
    "kvzip",
    "rkv",
    "lagkv",
    "cake",
    "preference",
    "expected",
    "pyramid:",
    "start=prompt/group=layer",
)
NEEDS_KEYS = [p for p in POLICIES if any(word in p for word in READS_KEYS)]
MODEL = {
    "name": "synthetic",
    "config": {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "config_hash": None,
    "weights_hash": None,
}


def named(policy: str, trace: Trace) -> str:
    """Put files for a recording, beside it, in place of a policy's {gate} and {heads}."""
    folder, layers, heads = trace.path.parent, trace.num_layers, trace.num_kv_heads
    gate, heads_file = folder / f"{trace.path.name}.gate.safetensors", folder / f"{trace.path.name}.heads.json"
    if "{gate}" in policy and not gate.exists():
        save_gate(random_gate(layers, heads, trace.head_dim or 0), gate)
    if "{heads}" in policy and not heads_file.exists():
        scores = np.random.default_rng(6).random((layers, heads))
        facts = {"model": "synthetic", "num_layers": layers, "num_kv_heads": heads, "window": 5, "sink": 3}
        heads_file.write_text(json.dumps({**facts, "scores": scores.tolist(), "threshold": 0.5}))
    return policy.replace("{gate}", str(gate)).replace("{heads}", str(heads_file))


def random_gate(layers: int, kv_heads: int, head_dim: int, *, window: int = 4) -> WriteGate:
    """Give a gate of random numbers, whose scores spread over (0, 1)."""
    rng = np.random.default_rng(5)
    w1, b1, w2, b2 = (
        rng.normal(size=(layers, kv_heads, *shape)).astype(np.float32) for shape in ((8, 2 * head_dim), (8,), (8,), ())
    )
    return WriteGate(w1, b1, w2, b2, tuple(range(layers)), kv_heads, head_dim, window, 0.5, 0.08, "synthetic")


def random_attention(
    rng: np.random.Generator, steps: int, layers: int, heads: int, prompt: int
) -> npt.NDArray[np.float32]:
    """[T, K, H, L0+T] rows that sum to 1 over 0..p_t, peaked as attention is, with a drifting preference."""
    positions = prompt + steps
    taste = rng.normal(size=(layers, heads, positions))
    rows = np.zeros((steps, layers, heads, positions), dtype=np.float32)
    for t in range(steps):
        taste = 0.9 * taste + 0.6 * rng.normal(size=taste.shape)
        weights = np.exp(1.5 * taste[..., : prompt + t + 1])
        rows[t, ..., : prompt + t + 1] = weights / weights.sum(-1, keepdims=True)
    return rows


def write_trace(
    path: Path,
    *,
    capture: str = "heads",
    seed: int = 0,
    steps: int = 12,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    prompt: int = 40,
    attention: npt.NDArray[np.float32] | None = None,
    keys: npt.NDArray[np.float32] | None = None,
    eligible: list[int] | None = None,
    sink_logits: bool = False,
    model: dict[str, Any] | None = MODEL,
) -> Trace:
    """Write a synthetic recording; `heads` ones hold keys and values as well, so that every policy can run on them."""
    rng = np.random.default_rng(seed)
    if attention is None:
        attention = random_attention(rng, steps, layers, heads, prompt)
    steps, layers, heads, _ = attention.shape
    queries = rng.normal(size=(steps, layers, heads, head_dim)).astype(np.float32)
    drawn = rng.normal(size=(layers, kv_heads, prompt + steps, head_dim)).astype(np.float32)
    keys = drawn if keys is None else keys
    values = rng.normal(size=keys.shape).astype(np.float32)
    prompt_queries = rng.normal(size=(layers, heads, min(8, prompt), head_dim)).astype(np.float32)
    mass = rng.gamma(1.0, size=(layers, heads, prompt)).astype(np.float32)
    kvzip_scores = rng.random(size=(layers, kv_heads, prompt)).astype(np.float32) ** 4
    arrays = {
        "heads": ["attention", "queries", "keys", "values", "prompt_mass", "prompt_queries", "kvzip_scores"],
        "scores": ["scores", "prompt_mass"],
        "qk": ["queries", "keys", "prompt_mass", "prompt_queries", "kvzip_scores"],
        "qkv": ["queries", "keys", "values", "prompt_mass", "prompt_queries", "kvzip_scores"],
    }[capture]
    manifest = Manifest(
        capture=capture,
        prompt_length=prompt,
        planned_steps=steps,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim if capture != "scores" else None,
        arrays=[*arrays, "row_sums"],
        layers=[LayerInfo(eligible=eligible is None or layer in eligible) for layer in range(layers)],
        sink_logits=sink_logits,
        model=model,
    )
    with TraceWriter(path, manifest) as writer:
        writer.write_prompt(
            keys=keys[:, :, :prompt] if "keys" in arrays else None,
            values=values[:, :, :prompt] if "values" in arrays else None,
            prompt_mass=mass,
            prompt_queries=prompt_queries if "prompt_queries" in arrays else None,
            kvzip_scores=kvzip_scores if "kvzip_scores" in arrays else None,
        )
        for t in range(steps):
            row = attention[t, :, :, : prompt + t + 1]
            writer.append(
                attention=row if capture == "heads" else None,
                scores=row.mean(axis=1) if capture == "scores" else None,
                queries=queries[t] if "queries" in arrays else None,
                keys=keys[:, :, prompt + t] if "keys" in arrays else None,
                values=values[:, :, prompt + t] if "values" in arrays else None,
                row_sums=row.sum(-1),
            )
    return open_trace(path)


def rows_trace(
    path: Path,
    rows: list[Any],
    prompt: int,
    *,
    keys: npt.NDArray[np.float32] | None = None,
    sink_logits: bool = False,
) -> Trace:
    """Write a recording with one head: for each step its attention, [K][n], and the keys [K, L0+T, d] if given."""
    manifest = Manifest(
        capture="heads",
        prompt_length=prompt,
        planned_steps=len(rows),
        num_layers=len(rows[0]),
        num_heads=1,
        num_kv_heads=1,
        head_dim=None if keys is None else keys.shape[-1],
        arrays=["attention", "row_sums"] + ([] if keys is None else ["queries", "keys"]),
        layers=[LayerInfo()] * len(rows[0]),
        sink_logits=sink_logits,
    )
    with TraceWriter(path, manifest) as writer:
        writer.write_prompt(keys=None if keys is None else keys[:, None, :prompt])
        for t, step in enumerate(rows):
            writer.append(
                attention=np.array(step, np.float32)[:, None],
                queries=None if keys is None else np.zeros((len(step), 1, keys.shape[-1]), np.float32),
                keys=None if keys is None else keys[:, None, prompt + t],
            )
    return open_trace(path)
