"""A run as it happens, with the face of a recording: what policies read, they read from here."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_traces import CaptureError, Trace, TraceError
from kvsim_traces.manifest import Manifest

from kvsim.live.prefix import Prefix

__all__ = ["RunTrace"]

Floats = npt.NDArray[np.float32]


class RunTrace(Trace):
    """A prompt and the steps after it, in memory.

    Vectors of steps that have not happened yet are zero. Rows are those over the full cache as this run's queries and
    keys make them; where evicted keys are really gone, rows cover the visible positions only.

    Parameters
    ----------
    prefix : Prefix
        The prompt.
    steps : int
        The most steps there will be, T.
    name : str
        For messages and results.
    full_rows : bool
        Whether rows cover the full cache.
    """

    def __init__(self, prefix: Prefix, steps: int, *, name: str = "live", full_rows: bool = True) -> None:
        first = prefix.layers[0]
        heads = first.keys.shape[0] if first.queries is None else first.queries.shape[0]
        if first.queries is None and prefix.trace is not None:
            heads = prefix.trace.num_heads
        self.prefix, self.full_rows = prefix, full_rows
        self.path = Path(name)
        self.manifest = Manifest(
            capture="qkv",
            prompt_length=prefix.length,
            planned_steps=steps,
            committed_steps=steps,
            num_layers=len(prefix.layers),
            num_heads=heads,
            num_kv_heads=first.keys.shape[0],
            head_dim=first.keys.shape[-1],
            layers=[layer.info for layer in prefix.layers],
            arrays=["queries", "keys", "values", "prompt_mass", "prompt_queries"],
            sink_logits=any(layer.sink_logits is not None for layer in prefix.layers),
            model={"name": "live", "config": prefix.config, "config_hash": None, "weights_hash": None},
        )
        self._fed: list[int] = []
        self._step_rows: list[Floats] = []
        self._step_queries: list[Floats] = []
        self._step_keys: list[Floats] = []
        self._step_values: list[Floats] = []
        self._made: dict[tuple[str, int], Floats] = {}

    def append(self, token: int, rows: Floats, queries: Floats, keys: Floats, values: Floats) -> None:
        """Take one step: rows [K, H, L0 + t], queries [K, H, d], keys and values [K, Hk, d] of all layers."""
        self._fed.append(token)
        self._step_rows.append(rows)
        self._step_queries.append(queries)
        self._step_keys.append(keys)
        self._step_values.append(values)
        self._made = {key: made for key, made in self._made.items() if key[0].startswith("prompt")}

    def end(self) -> None:
        """Say that no step will follow: T is what has happened."""
        self.manifest.committed_steps = self.manifest.planned_steps = len(self._fed)
        self._made.clear()

    @property
    def done(self) -> int:
        """Steps that have happened."""
        return len(self._fed)

    @property
    def hash(self) -> str:
        """SHA-256 of the tokens, and of the last step's rows."""
        digest = hashlib.sha256(np.asarray([*self.prefix.tokens, *self._fed], np.int64).tobytes())
        if self._step_rows:
            digest.update(self._step_rows[-1].tobytes())
        return digest.hexdigest()

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Token ids so far, [L0 + steps done]."""
        return np.asarray([*self.prefix.tokens, *self._fed], np.int32)

    def has(self, name: str) -> bool:
        """See `Trace.has`."""
        return name in self.manifest.arrays

    def attention_rows(self, t: int, layers: Any = None) -> Floats:
        """See `Trace.attention_rows`."""
        rows = self._step_rows[self._happened(t) - 1]
        return rows if layers is None else rows[list(layers)]

    def score_rows(self, t: int, layers: Any = None) -> Floats:
        """See `Trace.score_rows`."""
        means: Floats = self.attention_rows(t, layers).mean(axis=1)
        return means

    def row_sums(self, t: int) -> Floats:
        """See `Trace.row_sums`."""
        sums: Floats = self._step_rows[self._happened(t) - 1].sum(axis=-1)
        return sums

    def queries(self, t: int) -> Floats:
        """See `Trace.queries`; zero for a step that has not happened yet."""
        if t <= self.done:
            return self._step_queries[t - 1]
        return np.zeros((self.num_layers, self.num_heads, self.manifest.head_dim or 0), np.float32)

    def keys(self, layer: int) -> Floats:
        """See `Trace.keys`."""
        return self._along("keys", layer, self._step_keys)

    def values(self, layer: int) -> Floats:
        """See `Trace.values`."""
        return self._along("values", layer, self._step_values)

    def _along(self, name: str, layer: int, steps: list[Floats]) -> Floats:
        if (name, layer) not in self._made:
            prompt = self._prompt_vectors(name, layer)
            whole = np.zeros((prompt.shape[0], self.num_positions, prompt.shape[-1]), np.float32)
            whole[:, : self.prompt_length] = prompt
            for t, step in enumerate(steps):
                whole[:, self.prompt_length + t] = step[layer]
            self._made[name, layer] = whole
        return self._made[name, layer]

    def _prompt_vectors(self, name: str, layer: int) -> Floats:
        key = f"prompt {name}", layer
        if key not in self._made:
            self._made[key] = to_numpy(getattr(self.prefix.layers[layer], name))
        return self._made[key]

    @cached_property
    def _prompt_mass(self) -> Floats:
        mass = np.zeros((self.num_layers, self.num_heads, self.prompt_length), np.float32)
        for layer in self.prefix.eligible:
            mass[layer] = to_numpy(self.prefix.layers[layer].prompt_mass())
        return mass

    def prompt_mass(self) -> Floats:
        """See `Trace.prompt_mass`; zero for layers that are not eligible."""
        return self._prompt_mass if self._recorded is None else self._recorded.prompt_mass()

    def prompt_queries(self) -> Floats:
        """See `Trace.prompt_queries`; all of the prompt's after a prefill."""
        return self._prompt_queries if self._recorded is None else self._recorded.prompt_queries()

    @property
    def _recorded(self) -> Trace | None:
        """The recording that stands for the prompt's queries, where no prefill gave them."""
        return self.prefix.trace if self.prefix.layers[0].queries is None else None

    @cached_property
    def _prompt_queries(self) -> Floats:
        found = [layer.queries for layer in self.prefix.layers]
        return np.stack([to_numpy(queries) for queries in found if queries is not None])

    def kvzip_scores(self) -> Floats:
        """See `Trace.kvzip_scores`; a live run has no reconstruction pass."""
        if self.prefix.trace is not None:
            return self.prefix.trace.kvzip_scores()
        raise CaptureError("kvzip's scores come from a pass over the prompt that live decoding does not run")

    def _happened(self, t: int) -> int:
        if not 1 <= t <= self.done:
            raise TraceError(f"step: must be from 1 to {self.done}, got {t}")
        return t


def to_numpy(tensor: torch.Tensor) -> Floats:
    """Copy a tensor to the host in float32."""
    array: Floats = tensor.detach().float().cpu().numpy()
    return array
