"""A run as it happens, with the face of a recording: what policies read, they read from here."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import CaptureError, Trace, TraceError
from kvsim_traces.manifest import Manifest

from kvsim.live.prefix import Floats, Prefix, to_numpy

__all__ = ["RunTrace"]


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

    on_disk = False

    def __init__(self, prefix: Prefix, steps: int, *, name: str = "live", full_rows: bool = True) -> None:
        first = prefix.layers[0]
        self.prefix, self.full_rows = prefix, full_rows
        self.path = Path(name)
        arrays = ["queries", "keys", "values", "prompt_mass", "prompt_queries"]
        if prefix.trace is not None and prefix.trace.has("kvzip_scores"):
            arrays.append("kvzip_scores")
        self.manifest = Manifest(
            capture="qkv",
            prompt_length=prefix.length,
            planned_steps=steps,
            committed_steps=steps,
            num_layers=len(prefix.layers),
            num_heads=prefix.num_heads,
            num_kv_heads=first.keys.shape[0],
            head_dim=first.keys.shape[-1],
            layers=[layer.info for layer in prefix.layers],
            arrays=arrays,
            sink_logits=any(layer.sink_logits is not None for layer in prefix.layers),
            model={"name": "live", "config": prefix.config, "config_hash": None, "weights_hash": None},
        )
        self._fed: list[int] = []
        self._step_rows: list[Floats] = []
        self._step_queries: list[Floats] = []
        self._step_vectors: dict[str, list[Floats]] = {"keys": [], "values": []}
        self._whole: dict[tuple[str, int], Floats] = {}
        self._digest = ""

    def append(self, token: int, rows: Floats, queries: Floats, keys: Floats, values: Floats) -> None:
        """Take one step: rows [K, H, L0 + t], queries [K, H, d], keys and values [K, Hk, d] of all layers.

        Rows that do not cover the full cache are not kept.
        """
        position = self.prompt_length + self.done
        for (name, layer), whole in self._whole.items():
            whole[:, position] = (keys if name == "keys" else values)[layer]
        self._fed.append(token)
        if self.full_rows:
            self._step_rows.append(rows)
        self._step_queries.append(queries)
        self._step_vectors["keys"].append(keys)
        self._step_vectors["values"].append(values)
        self._digest = ""

    def copy(self) -> "RunTrace":
        """Give a run that goes its own way from here."""
        other = RunTrace(self.prefix, self.manifest.planned_steps, name=str(self.path), full_rows=self.full_rows)
        other._fed, other._step_rows, other._step_queries = (
            list(self._fed),
            list(self._step_rows),
            list(self._step_queries),
        )
        other._step_vectors = {name: list(steps) for name, steps in self._step_vectors.items()}
        other._whole = {key: whole.copy() for key, whole in self._whole.items()}
        return other

    def end(self) -> None:
        """Say that no step will follow: T is what has happened."""
        self.manifest.committed_steps = self.manifest.planned_steps = self.done
        self._whole.clear()

    @property
    def done(self) -> int:
        """Steps that have happened."""
        return len(self._fed)

    @property
    def hash(self) -> str:
        """SHA-256 of the tokens, and of the queries and keys of the steps."""
        if not self._digest:
            digest = hashlib.sha256(np.asarray([*self.prefix.tokens, *self._fed], np.int64).tobytes())
            for queries, keys in zip(self._step_queries, self._step_vectors["keys"], strict=True):
                digest.update(queries.tobytes())
                digest.update(keys.tobytes())
            self._digest = digest.hexdigest()
        return self._digest

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
        return self._along("keys", layer)

    def values(self, layer: int) -> Floats:
        """See `Trace.values`."""
        return self._along("values", layer)

    def _along(self, name: str, layer: int) -> Floats:
        if (name, layer) not in self._whole:
            prompt = to_numpy(getattr(self.prefix.layers[layer], name))
            whole = np.zeros((prompt.shape[0], self.num_positions, prompt.shape[-1]), np.float32)
            whole[:, : self.prompt_length] = prompt
            for t, step in enumerate(self._step_vectors[name]):
                whole[:, self.prompt_length + t] = step[layer]
            self._whole[name, layer] = whole
        view = self._whole[name, layer].view()
        view.setflags(write=False)
        return view

    def prompt_mass(self) -> Floats:
        """See `Trace.prompt_mass`; zero for layers that are not eligible."""
        return self.prefix.prompt_mass

    def prompt_queries(self) -> Floats:
        """See `Trace.prompt_queries`; all of the prompt's after a prefill."""
        return self.prefix.prompt_queries

    def kvzip_scores(self) -> Floats:
        """See `Trace.kvzip_scores`; those of the recording of this prompt, for live decoding has no such pass."""
        if self.prefix.trace is None:
            raise CaptureError("kvzip's scores come from a pass over the prompt that live decoding does not run")
        return self.prefix.trace.kvzip_scores()

    def _happened(self, t: int) -> int:
        if not 1 <= t <= self.done:
            raise TraceError(f"step: must be from 1 to {self.done}, got {t}")
        return t
