"""How far an open-loop replay can be trusted: its sets beside those of a run whose evicted tokens are really gone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.errors import KvsimError
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["SEEDS", "Fidelity", "fidelity"]

SEEDS = 20
"""Draws of the random null."""

BoolArray = npt.NDArray[np.bool_]
Drop = Callable[[npt.NDArray[np.intp], int], npt.NDArray[np.intp]]


@dataclass(frozen=True)
class Fidelity:
    """One policy, replayed in open loop and run in closed loop or live, on one recording.

    The first eviction is exact in open loop, so the nulls get it for free: they start from the run's own first set, and
    then drop at every step as many tokens as the run does, at random or the oldest first. An open loop that does no
    better than they do says nothing beyond the first eviction.

    Attributes
    ----------
    policy, trace_name : str
        Canonical policy with its budget, and the recording.
    loop : {"closed", "live"}
        What the open loop is compared with.
    budget : float
        Tokens kept, averaged over groups.
    jaccard, jaccard_last : float
        Of the two retained sets: mean over steps and groups, and after the last step.
    random, random_last, oldest, oldest_last : float
        The same of the nulls with the run.
    same_evictee : float or None
        Share of the evictions after the first one in which both drop the same tokens; None without any.
    same_evictee_random : float or None
        What drawing one of the held tokens would give.
    kept_mass_open, kept_mass : float
        Kept mass that the replay claims, and that the run had.
    kept_mass_error : float
        Mean absolute difference over steps.
    total_variation : float
        Between what the replay thinks the queries look at and what they do: half the L1 distance of the two rows, each
        renormalised over what the run's query sees; mean over steps, layers and heads.
    steps : array
        [T] Jaccard at each step.
    by_layer : array
        [K] total variation of each eligible layer.
    """

    policy: str
    trace_name: str
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
    steps: FloatArray = field(repr=False, compare=False)
    by_layer: FloatArray = field(repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Give everything but the steps, ready for JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("steps", "by_layer", "trace_name")}
        return {"trace": self.trace_name, **own, "total_variation_by_layer": self.by_layer.tolist()}


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
        If the two are not one policy on one sequence, or are shadow results.
    """
    if (replayed.policy, replayed.prompt_length, replayed.num_steps) != (
        run.policy,
        run.prompt_length,
        run.num_steps,
    ) or replayed.evicted_at.shape != run.evicted_at.shape:
        raise KvsimError(f"cannot compare {replayed.policy} with {run.policy}: not one policy on one sequence")
    if seeds < 1:
        raise KvsimError(f"seeds must be at least 1, got {seeds}")
    own, theirs = _sets(replayed), _sets(run)
    jaccard = _jaccard(own, theirs)
    draws = [_jaccard(_null(theirs, run.prompt_length, _random(seed)), theirs) for seed in range(seeds)]
    oldest = _jaccard(_null(theirs, run.prompt_length, _oldest), theirs)
    claimed, had = replayed.outcome.metrics["kept_mass"], run.outcome.metrics["kept_mass"]
    same, chance = _same_evictee(replayed, run)
    by_layer = _total_variation(run, recorded, seen)
    return Fidelity(
        policy=run.policy,
        trace_name=run.trace_name,
        loop=run.loop,
        budget=float(run.budget),
        jaccard=float(jaccard.mean()),
        jaccard_last=float(jaccard[-1]),
        random=float(np.mean(draws)),
        random_last=float(np.mean([draw[-1] for draw in draws])),
        oldest=float(oldest.mean()),
        oldest_last=float(oldest[-1]),
        same_evictee=same,
        same_evictee_random=chance,
        kept_mass_open=float(claimed.mean()),
        kept_mass=float(had.mean()),
        kept_mass_error=float(np.abs(claimed - had).mean()),
        total_variation=float(by_layer.mean()),
        steps=jaccard,
        by_layer=by_layer,
    )


def _sets(result: Result) -> BoolArray:
    """Give the retained sets of all steps, [T, G, L0 + T]."""
    steps = np.arange(1, result.num_steps + 1)[:, None, None]
    there = np.arange(result.evicted_at.shape[1]) < result.prompt_length + steps
    gone = (result.evicted_at >= 0) & (result.evicted_at <= steps)
    sets: BoolArray = there & ~gone
    return sets


def _jaccard(own: BoolArray, theirs: BoolArray) -> FloatArray:
    """Mean over groups of the Jaccard index at each step, [T]."""
    index: FloatArray = ((own & theirs).sum(axis=-1) / (own | theirs).sum(axis=-1)).mean(axis=-1)
    return index


def _null(sets: BoolArray, prompt: int, drop: Drop) -> BoolArray:
    """Start from the first set, append each step's position, and drop down to the size of the run's own set."""
    null = np.zeros_like(sets)
    null[0] = sets[0]
    for t in range(1, len(sets)):
        for g in range(sets.shape[1]):
            held = np.append(np.flatnonzero(null[t - 1, g]), prompt + t)
            stay = int(sets[t, g].sum())
            null[t, g, drop(held, stay) if held.size > stay else held] = True
    return null


def _random(seed: int) -> Drop:
    rng = np.random.default_rng(seed)
    return lambda held, stay: rng.choice(held, stay, replace=False)


def _oldest(held: npt.NDArray[np.intp], stay: int) -> npt.NDArray[np.intp]:
    return held[held.size - stay :]


def _same_evictee(replayed: Result, run: Result) -> tuple[float | None, float | None]:
    """Share of later evictions in which both drop the same tokens, and that of a draw from what is held."""
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
    if recorded.capture == "scores":
        raise KvsimError(f"{recorded.path}: a 'scores' capture has no attention of single heads to compare")
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
