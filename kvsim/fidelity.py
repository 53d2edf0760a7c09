"""How far an open-loop replay can be trusted: its sets beside those of a run whose evicted tokens are really gone."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace

from kvsim.errors import KvsimError
from kvsim.nulls import at_random, null_sets, oldest_first, overlap, sets_of
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["SEEDS", "Fidelity", "check_recording", "fidelity", "read_fidelity"]

SEEDS = 20
"""Draws of the random null."""


@dataclass(frozen=True)
class Fidelity:
    """One policy, replayed in open loop and run in closed loop or live, on one recording.

    A group's first eviction is exact in open loop where all groups evict together, so the nulls get it for free: they
    start from the run's own set after it, and then drop at every step as many tokens as the run does, at random or the
    oldest first. An open loop that does no better than they do says nothing beyond the first eviction.

    Attributes
    ----------
    policy, trace_name, trace_hash, version : str
        Canonical policy with its budget, the recording, and the version of kvsim.
    loop : {"closed", "live"}
        What the open loop is compared with.
    budget : float
        Tokens kept, averaged over groups.
    jaccard, jaccard_last : float
        Of the two retained sets: mean over steps and groups, and after the last step.
    random, random_last, oldest, oldest_last : float
        The same of the nulls with the run; `random` is the mean of `SEEDS` draws.
    same_evictee : float or None
        Share of the evictions after the first one in which both drop the same tokens; None without any.
    same_evictee_random : float or None
        What drawing as many of the visible tokens would give.
    kept_mass_open, kept_mass : float
        Kept mass that the replay claims, and that the run had.
    kept_mass_error : float
        Mean absolute difference over steps.
    total_variation : float
        Between what the replay thinks the queries look at and what they do: half the L1 distance of the two rows, each
        renormalised over what the run's query sees; mean over steps, layers and heads. Attention recomputed from a
        recording's float16 queries and keys has some 0.001 of it by rounding alone.
    total_variation_most : float
        In the layer with the largest.
    layers : list of int
        The K eligible layers.
    steps, random_steps, oldest_steps : array
        [T] Jaccard after each step: the replay's, and the nulls'.
    by_layer : array
        [K] total variation of each of `layers`.
    """

    policy: str
    trace_name: str
    trace_hash: str
    version: str
    loop: str
    budget: float
    jaccard: float
    jaccard_last: float
    random: float
    random_last: float
    oldest: float
    oldest_last: float
    same_evictee: float | None
    same_evictee_random: float | None
    kept_mass_open: float
    kept_mass: float
    kept_mass_error: float
    total_variation: float
    total_variation_most: float
    layers: list[int]
    steps: FloatArray = field(repr=False, compare=False)
    random_steps: FloatArray = field(repr=False, compare=False)
    oldest_steps: FloatArray = field(repr=False, compare=False)
    by_layer: FloatArray = field(repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON; `steps` is called ``jaccard_steps``."""
        arrays = {
            "jaccard_steps": self.steps,
            "random_steps": self.random_steps,
            "oldest_steps": self.oldest_steps,
            "total_variation_by_layer": self.by_layer,
        }
        own = {name: value for name, value in vars(self).items() if not isinstance(value, np.ndarray)}
        own = {"trace": own.pop("trace_name"), **own}
        return own | {name: values.tolist() for name, values in arrays.items()}


def check_recording(trace: Trace) -> None:
    """Refuse a recording without the attention of single heads.

    Raises
    ------
    KvsimError
        If it has head means only.
    """
    if trace.capture == "scores":
        raise KvsimError(f"{trace.path}: a 'scores' capture has no attention of single heads to compare")


def fidelity(replayed: Result, run: Result, recorded: Trace, seen: Trace, *, seeds: int = SEEDS) -> Fidelity:
    """Compare an open-loop replay with a run of the same policy on the same tokens.

    Parameters
    ----------
    replayed : Result
        In open loop.
    run : Result
        In closed loop or live.
    recorded : Trace
        The recording that was replayed.
    seen : Trace
        The run's own attention (`ClosedLoop.trace`, `LiveRun.sequence.trace`).
    seeds : int
        Draws of the random null.

    Raises
    ------
    KvsimError
        If the two are not one policy on one sequence, are shadow results, or the recording holds head means only.
    """
    check_recording(recorded)
    if seeds < 1:
        raise KvsimError(f"seeds must be at least 1, got {seeds}")
    if replayed.loop != "open" or run.loop == "open":
        raise KvsimError(
            f"fidelity compares an open loop with a closed or live one, got {replayed.loop} and {run.loop}"
        )
    shapes = replayed.evicted_at.shape, run.evicted_at.shape
    if replayed.policy != run.policy or shapes[0] != shapes[1] or replayed.prompt_length != run.prompt_length:
        raise KvsimError(f"cannot compare {replayed.policy} with {run.policy}: not one policy on one sequence")
    own, theirs = sets_of(replayed), sets_of(run)
    draws = [overlap(null_sets(run, at_random(seed)), theirs) for seed in range(seeds)]
    steps, random = overlap(own, theirs), np.mean(draws, axis=0)
    oldest = overlap(null_sets(run, oldest_first), theirs)
    claimed, had = replayed.outcome.metrics["kept_mass"], run.outcome.metrics["kept_mass"]
    same, chance = _same_evictee(replayed, run)
    by_layer = _total_variation(run, recorded, seen)
    return Fidelity(
        policy=run.policy,
        trace_name=recorded.path.name,
        trace_hash=recorded.hash,
        version=run.version,
        loop=run.loop,
        budget=float(run.budget),
        jaccard=float(steps.mean()),
        jaccard_last=float(steps[-1]),
        random=float(random.mean()),
        random_last=float(random[-1]),
        oldest=float(oldest.mean()),
        oldest_last=float(oldest[-1]),
        same_evictee=same,
        same_evictee_random=chance,
        kept_mass_open=float(claimed.mean()),
        kept_mass=float(had.mean()),
        kept_mass_error=float(np.abs(claimed - had).mean()),
        total_variation=float(by_layer.mean()),
        total_variation_most=float(by_layer.max()),
        layers=list(run.plan.groups.layers),
        steps=steps,
        random_steps=random,
        oldest_steps=oldest,
        by_layer=by_layer,
    )


def read_fidelity(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Read rows that ``kvsim fidelity --out`` wrote: `Fidelity.summary` of each.

    Raises
    ------
    KvsimError
        If a file cannot be read or holds something else.
    """
    rows: list[dict[str, Any]] = []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise KvsimError(f"{file}: cannot be read ({error.strerror or error})") from error
        except ValueError:
            raise KvsimError(f"{file}: is not JSON") from None
        own = found.get("results") if isinstance(found, dict) else None
        if not isinstance(own, list) or not own:
            raise KvsimError(f"{file}: is not a file of kvsim fidelity: it has no results")
        for row in own:
            _check_row(file, row)
        rows += own
    return rows


def _check_row(file: Path, row: Any) -> None:
    what = f"{file}: is not a file of kvsim fidelity"
    if not isinstance(row, dict):
        raise KvsimError(f"{what}: a result is no object")
    for name in ("policy", "trace", "loop"):
        if not isinstance(row.get(name), str):
            raise KvsimError(f"{what}: a result has no text {name!r}")
    for names in (("jaccard_steps", "random_steps", "oldest_steps"), ("layers", "total_variation_by_layer")):
        lengths = set()
        for name in names:
            values = row.get(name)
            if not isinstance(values, list) or not values or not all(map(_is_number, values)):
                raise KvsimError(f"{what}: a result has no numbers {name!r}")
            lengths.add(len(values))
        if len(lengths) > 1:
            raise KvsimError(f"{what}: {' and '.join(names)} are not of one length")
    if not _is_number(row.get("budget")):
        raise KvsimError(f"{what}: a result has no numbers 'budget'")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _same_evictee(replayed: Result, run: Result) -> tuple[float | None, float | None]:
    """Share of later evictions in which both drop the same tokens, and that of a draw from what is visible."""
    own, theirs = replayed.evicted_at, run.evicted_at
    same, chance = [], []
    for g in range(len(theirs)):
        moments = np.unique(theirs[g][theirs[g] >= 0])[1:]
        for t in moments.tolist():
            dropped = theirs[g] == t
            same.append(bool((dropped == (own[g] == t)).all()))
            visible = int(((theirs[g] < 0) | (theirs[g] >= t))[: run.prompt_length + t].sum())
            # The chance of drawing just these, one after the other.
            count = int(dropped.sum())
            chance.append(float(np.prod([(count - i) / (visible - i) for i in range(count)])))
    return (float(np.mean(same)), float(np.mean(chance))) if same else (None, None)


def _total_variation(run: Result, recorded: Trace, seen: Trace) -> FloatArray:
    """Mean over steps and heads of the distance between recorded and seen rows over what is visible, [K]."""
    groups = run.plan.groups
    layers = list(groups.layers)
    share = groups.num_heads // groups.num_kv_heads
    total = np.zeros(len(layers))
    for t in range(1, run.num_steps + 1):
        n = run.prompt_length + t
        visible = ((run.evicted_at < 0) | (run.evicted_at >= t))[:, :n]
        rows = [trace.attention_rows(t, layers).astype(np.float64) for trace in (recorded, seen)]
        for layer in range(len(layers)):
            mask = np.repeat(visible[groups.of_layer(layer)], share, axis=0)
            ours, theirs = (_renormalised(one[layer] * mask) for one in rows)
            total[layer] += np.abs(ours - theirs).sum(axis=-1).mean() / 2
    mean: FloatArray = total / run.num_steps
    return mean


def _renormalised(rows: FloatArray) -> FloatArray:
    mass = rows.sum(axis=-1, keepdims=True)
    own: FloatArray = np.divide(rows, mass, out=np.zeros_like(rows), where=mass > 0)
    return own
