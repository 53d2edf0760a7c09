"""Recordings whose true utilities are known, to test theory and tools on."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from kvsim_traces import LayerInfo, Manifest, Trace, TraceWriter, open_trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.plan import FloatArray

__all__ = ["KINDS", "Synthetic", "synthetic_of", "write_synthetic"]

KINDS = ("iid", "drift", "shift", "heavy", "sink")

MODEL_TYPE = "kvsim-synthetic"
NUM_SINKS = 4
SINK_SHARE = 0.5
LAYER_CORRELATION = 0.8
SPREAD = 1.0
TAIL = 1.2
LEAST_NOISE, MOST_NOISE = 1e-6, 10.0
SCALE = 2.0**15
"""What a trace multiplies its float16 rows by."""


@dataclass(frozen=True)
class Synthetic:
    """A synthetic recording, as a recipe: the same numbers make the same rows and utilities.

    Every position i >= 1 has a utility ``u[t, l, i]``; its attention at a step, layer and head is u times independent
    noise of mean 1 and standard deviation `noise` (a scaled Beta, bounded). The rest of the row goes to position 0, so
    that it sums to 1 and the other positions stay independent of one another.

    Attributes
    ----------
    kind : {"iid", "drift", "shift", "heavy", "sink"}
        ``iid``: log-normal utilities that never change. ``drift``: they turn towards others by `drift` radians a step.
        ``shift``: from step `shift_at` on they are others. ``heavy``: as iid, with a Pareto tail (index 1.2).
        ``sink``: as iid, with positions 1 to 3 worth as much as
        a quarter of all the others each.
    prompt, steps, layers, heads : int
        L0, T, K and H.
    noise : float
        Standard deviation of one head's attention over its utility; the head mean's is smaller by sqrt(H).
    drift : float
        Radians a step, for ``drift`` only.
    shift_at : int or None
        First step with the new utilities, for ``shift`` only; the middle by default.
    seed : int
        Seed.
    """

    kind: Literal["iid", "drift", "shift", "heavy", "sink"] = "iid"
    prompt: int = 256
    steps: int = 64
    layers: int = 4
    heads: int = 2
    noise: float = 0.3
    drift: float = 0.0
    shift_at: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown_name("kind", self.kind, KINDS)
        for name in ("prompt", "steps", "layers", "heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**24:
                raise KvsimError(f"{name} must be a whole number from 1 to {2**24 - 1}, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise KvsimError(f"seed must be a whole number of at least 0, got {self.seed!r}")
        if self.noise != 0 and not LEAST_NOISE <= self.noise <= MOST_NOISE:
            raise KvsimError(f"noise must be 0, or from {LEAST_NOISE} to {MOST_NOISE:g}, got {self.noise}")
        if not math.isfinite(self.drift) or self.drift < 0 or (self.drift > 0 and self.kind != "drift"):
            hint = "" if self.kind == "drift" else f"; kind {self.kind} has none, use kind drift"
            raise KvsimError(f"drift must be an angle of at least 0, got {self.drift}{hint}")
        if self.shift_at is None and self.kind == "shift":
            object.__setattr__(self, "shift_at", self.steps // 2 + 1)
        if self.shift_at is not None and (self.kind != "shift" or not 1 <= self.shift_at <= self.steps):
            hint = "" if self.kind == "shift" else f"; kind {self.kind} has none, use kind shift"
            raise KvsimError(f"shift_at must be a step from 1 to {self.steps}, got {self.shift_at}{hint}")

    def utilities(self, step: int) -> FloatArray:
        """Give the true utilities of a step (from 1), [K, L0 + step]: the row that is recorded without noise."""
        return _as_stored(self._with_rest(self._true(step)))

    def rows(self, step: int) -> FloatArray:
        """Give the attention of a step (from 1) before it is rounded for storage, [K, H, L0 + step]."""
        u = np.repeat(self._true(step)[:, None], self.heads, axis=1)
        if self.noise:
            rng = np.random.default_rng([self.seed, 1, step])
            shape = 1 / (2 * self.noise**2)
            u *= rng.beta(shape, shape + 1, size=u.shape) * self._most
        return self._with_rest(u)

    @property
    def _most(self) -> float:
        """Largest factor that noise can put on a utility."""
        return 2 * (1 + self.noise**2)

    def _true(self, step: int) -> FloatArray:
        if not 1 <= step <= self.steps:
            raise KvsimError(f"step must be from 1 to {self.steps}, got {step}")
        before, after = self._fields
        if self.kind == "shift":
            assert self.shift_at is not None
            chosen = after if step >= self.shift_at else before
        elif self.kind == "drift":
            angle = self.drift * (step - 1)
            chosen = math.cos(angle) * before + math.sin(angle) * after
        else:
            chosen = before
        worth = np.exp(chosen)
        # Shares of all positions there will ever be, so that a utility does not change as others are appended, and of
        # a total that leaves noise its room.
        top = SINK_SHARE if self.kind == "sink" else 1.0
        u: FloatArray = worth[:, : self.prompt + step] * (top / self._most / worth.sum(axis=1, keepdims=True))
        if self.kind == "sink":
            u[:, 1:NUM_SINKS] = SINK_SHARE / NUM_SINKS / self._most
        return u

    @cached_property
    def _fields(self) -> tuple[FloatArray, FloatArray]:
        return self._worth(0), self._worth(1)

    def _worth(self, which: int) -> FloatArray:
        """Draw a field of log utilities, [K, L0 + T]: partly the layers' own, partly common to them."""
        rng = np.random.default_rng([self.seed, 0, which])
        positions = self.prompt + self.steps
        if self.kind == "heavy":
            common = rng.exponential(1 / TAIL, size=positions)
            own = rng.normal(scale=0.3, size=(self.layers, positions))
            return common + own
        common, own = rng.normal(size=positions), rng.normal(size=(self.layers, positions))
        return SPREAD * (math.sqrt(LAYER_CORRELATION) * common + math.sqrt(1 - LAYER_CORRELATION) * own)

    def _with_rest(self, u: FloatArray) -> FloatArray:
        u[..., 0] = 0
        u[..., 0] = 1 - u.sum(axis=-1)
        return u


def write_synthetic(spec: Synthetic, out: str | Path, *, progress: Progress | None = None) -> Trace:
    """Write a synthetic recording (a `heads` capture), whole or not at all.

    Parameters
    ----------
    spec : Synthetic
        What to write; it is kept in the recording's manifest, see `synthetic_of`.
    out : path
        New trace directory.
    progress : callable, optional
        Called with (steps done, steps in all).

    Raises
    ------
    TraceError
        If `out` is not empty or cannot be written.
    """
    given = dataclasses.asdict(spec)
    manifest = Manifest(
        capture="heads",
        prompt_length=spec.prompt,
        planned_steps=spec.steps,
        num_layers=spec.layers,
        num_heads=spec.heads,
        num_kv_heads=spec.heads,
        arrays=["attention", "row_sums"],
        layers=[LayerInfo()] * spec.layers,
        source="import",
        model={
            "name": f"synthetic {spec.kind}",
            "config": {"model_type": MODEL_TYPE, **given},
            "config_hash": None,
            "weights_hash": None,
        },
        notes=["synthetic: the true utilities follow from model.config (kvsim.synth)"],
    )
    with TraceWriter(out, manifest) as writer:
        writer.write_prompt()
        for step in range(1, spec.steps + 1):
            writer.append(attention=spec.rows(step), row_sums=np.ones((spec.layers, spec.heads), np.float32))
            if progress is not None:
                progress(step, spec.steps)
    return open_trace(out)


def synthetic_of(trace: Trace) -> Synthetic | None:
    """Give the recipe of a synthetic recording, and with it the true utilities; None for any other recording.

    Raises
    ------
    KvsimError
        If the recording claims to be synthetic but its recipe is not one, or is that of another shape.
    """
    config = (trace.manifest.model or {}).get("config", {})
    if config.get("model_type") != MODEL_TYPE:
        return None
    names = {field.name for field in dataclasses.fields(Synthetic)}
    try:
        spec = Synthetic(**{name: value for name, value in config.items() if name in names})
    except (KvsimError, TypeError) as error:
        raise KvsimError(f"{trace.path}: model.config is no recipe of a synthetic recording ({error})") from None
    shape = (spec.prompt, spec.layers, spec.heads)
    if shape != (trace.prompt_length, trace.num_layers, trace.num_heads) or spec.steps < trace.num_steps:
        raise KvsimError(f"{trace.path}: model.config is the recipe of a recording of another shape")
    return spec


def _as_stored(rows: FloatArray) -> FloatArray:
    return (rows * SCALE).astype(np.float16).astype(np.float64) / SCALE
