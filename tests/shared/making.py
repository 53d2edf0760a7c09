"""Small random recordings, and traces made of them."""

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import LayerInfo, Manifest, TraceWriter

CAPTURES = {
    "heads": ["attention", "row_sums"],
    "scores": ["scores"],
    "qk": ["queries", "keys"],
    "qkv": ["queries", "keys", "values"],
}
PRE = ["keys_pre", "gates"]
"""Arrays that only captures with keys have."""

EVERYTHING = ["tokens", "text", "text_ends", "prompt_queries", "prompt_mass", "kvzip_scores"]


@dataclass
class Recording:
    """What a recorder would have seen; plain arrays over all steps."""

    prompt: int = 13
    steps: int = 21
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    window: int = 5
    seed: int = 0
    attention: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        k, h, hk, d, p = self.layers, self.heads, self.kv_heads, self.dim, self.prompt + self.steps
        self.tokens = rng.integers(0, 1000, p)
        self.texts = [bytes(rng.integers(0, 256, rng.integers(0, 6)).astype(np.uint8)) for _ in range(p)]
        self.queries = rng.normal(size=(self.steps, k, h, d)).astype(np.float16)
        self.keys = rng.normal(size=(k, hk, p, d)).astype(np.float16)
        self.values = rng.normal(size=(k, hk, p, d)).astype(np.float16)
        self.keys_pre = np.random.default_rng(99).normal(size=(k, hk, p, d)).astype(np.float16)
        self.gates = np.random.default_rng(98).random((k, hk, p)).astype(np.float32)
        self.prompt_queries = rng.normal(size=(k, h, min(self.window, self.prompt), d)).astype(np.float16)
        self.prompt_mass = rng.random((k, h, self.prompt)).astype(np.float32)
        self.kvzip_scores = rng.random((k, hk, self.prompt)).astype(np.float32)
        self.attention = []
        for step in range(1, self.steps + 1):
            rows = rng.exponential(size=(k, h, self.prompt + step)).astype(np.float32) ** 3
            self.attention.append(rows / rows.sum(axis=-1, keepdims=True))

    def stored(self, step: int) -> np.ndarray:
        """The attention of a step as fp16 keeps it, in float32."""
        return (self.attention[step - 1] * 32768).astype(np.float16).astype(np.float32) / 32768

    def manifest(self, capture: str, arrays: list[str] | None = None, **changes: Any) -> Manifest:
        values: dict[str, Any] = {
            "capture": capture,
            "prompt_length": self.prompt,
            "planned_steps": self.steps,
            "num_layers": self.layers,
            "num_heads": self.heads,
            "num_kv_heads": self.kv_heads,
            "head_dim": self.dim,
            "arrays": CAPTURES[capture] + (EVERYTHING if arrays is None else arrays),
            "layers": [LayerInfo()] * self.layers,
            **changes,
        }
        return Manifest(**values)

    def prompt_arguments(self, arrays: list[str]) -> dict[str, Any]:
        given: dict[str, Any] = {
            "tokens": self.tokens[: self.prompt],
            "text": self.texts[: self.prompt],
            "keys": self.keys[:, :, : self.prompt],
            "values": self.values[:, :, : self.prompt],
            "keys_pre": self.keys_pre[:, :, : self.prompt],
            "gates": self.gates,
            "prompt_queries": self.prompt_queries,
            "prompt_mass": self.prompt_mass,
            "kvzip_scores": self.kvzip_scores,
        }
        return {name: value for name, value in given.items() if name in arrays}

    def step_arguments(self, step: int, arrays: list[str]) -> dict[str, Any]:
        position = self.prompt + step - 1
        given = {
            "attention": self.attention[step - 1],
            "scores": self.attention[step - 1].mean(axis=1),
            "queries": self.queries[step - 1],
            "keys": self.keys[:, :, position],
            "values": self.values[:, :, position],
            "keys_pre": self.keys_pre[:, :, position],
            "text": self.texts[position],
        }
        found: dict[str, Any] = {name: value for name, value in given.items() if name in arrays}
        if "tokens" in arrays:
            found["token"] = int(self.tokens[position])
        return found

    def write(
        self, path: Path, capture: str, arrays: list[str] | None = None, *, qk_dtype: str = "float16", **changes: Any
    ) -> Path:
        """Write a whole trace."""
        manifest = self.manifest(capture, arrays, **changes)
        with TraceWriter(path, manifest, qk_dtype=qk_dtype) as writer:
            writer.write_prompt(**self.prompt_arguments(manifest.arrays))
            for step in range(1, self.steps + 1):
                writer.append(**self.step_arguments(step, manifest.arrays))
        return path

    def npz(self, capture: str) -> dict[str, Any]:
        """The arrays an import takes."""
        full = np.zeros((self.steps, self.layers, self.heads, self.prompt + self.steps), np.float32)
        for step, rows in enumerate(self.attention):
            full[step, ..., : rows.shape[-1]] = rows
        arrays: dict[str, Any] = {"prompt_length": self.prompt}
        if capture == "heads":
            arrays["attention"] = full
        elif capture == "scores":
            arrays["scores"] = full.mean(axis=2)
        else:
            arrays |= {"queries": self.queries, "keys": self.keys}
            if capture == "qkv":
                arrays["values"] = self.values
        return arrays


def files_of(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes."""
    return {str(one.relative_to(path)): one.read_bytes() for one in sorted(path.rglob("*")) if one.is_file()}


def bounded(read: Callable[[], Any]) -> None:
    """Run with a second of time and no room for an allocation in proportion to a claim."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, limits[1]))
    start = time.perf_counter()
    try:
        read()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert time.perf_counter() - start < 1
