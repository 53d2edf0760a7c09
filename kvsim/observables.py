"""What a run shows while it decodes, against how much it depends on alpha (InertiaKV Appendix I, "Failure anatomy").

The paper correlates four observables with whether an answer changes with alpha: raw/EMA disagreement (0.14), raw-top
evicted rate (0.15), boundary margin (0.03), score entropy (0.07). Here the sensitivity of a recording is how far its
kept mass, or its loss without eviction, spreads over alphas.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import numpy as np
from kvsim_traces import Trace, open_trace

from kvsim.alphas import ALPHAS, at_edge
from kvsim.correlation import centred_ranks, correlation, pearson
from kvsim.engines import DEFAULT_ENGINE
from kvsim.errors import KvsimError
from kvsim.intervals import LEVEL, RESAMPLES, TIE
from kvsim.plan import FloatArray, ScoreSource
from kvsim.policies.ema import Ema
from kvsim.policy import Policy
from kvsim.replay import choose_budget, replay_many
from kvsim.shadow_scores import ShadowScores, shadow_rows
from kvsim.tradeoff import Utility, decompose

__all__ = [
    "DEFAULT_ALPHA",
    "DEFAULT_H",
    "LEAST_TRACES",
    "OBSERVABLES",
    "SENSITIVITIES",
    "TELLING_TRACES",
    "Sensitivity",
    "correlate",
    "sensitivity",
]

DEFAULT_ALPHA = 0.8
DEFAULT_H = 8
LEAST_TRACES = 3

TELLING_TRACES = 6
"""From here on correlations over recordings are worth a table: no p is below 1/12 with 4 recordings, 1/60 with 5."""

MOST_ENUMERATED = 6
"""Recordings whose 720 orders are all tried; more are shuffled."""

OBSERVABLES = {
    "score_margin": "(s_B - s_(B+1)) / s_B of the layer-averaged scores of the full cache, sorted from the highest",
    "state_margin": "the same of the rule's state without eviction",
    "score_entropy": "entropy of the layer-averaged scores of the full cache over log n",
    "disagreement": "1 - Jaccard of the raw top-B set and the retained set",
    "raw_top_evicted": "share of the raw top-B set that is not retained",
}
"""Averages over steps. The last two say nearly the same: of sets of equal size one follows from the other."""

SENSITIVITIES = {
    "kept_mass_spread": "largest less smallest kept mass over the alphas",
    "loss_spread": "largest less smallest total loss over the alphas, without eviction (`kvsim.tradeoff`)",
    "kept_mass_tilt": "kept mass at the largest alpha less that at the smallest: which direction wins",
}


@dataclass(frozen=True)
class Sensitivity:
    """Observables of one recording, and how it responds to alpha.

    Attributes
    ----------
    trace_name, trace_hash : str
        The recording.
    rule : str
        The family of rules, such as ``ema:alpha,over=step``.
    alpha : float
        The alpha whose replay the observables are of.
    budget : int
        Tokens kept.
    steps : int
        Decode steps.
    approximate : bool
        True where scores could not be renormalised over what is visible (a ``scores`` capture).
    observed : dict
        Each of `OBSERVABLES`; None where it is defined at no step (a margin where all is kept, the entropy of zeros).
    alphas : tuple of float
        The alphas tried, ascending.
    kept_mass, loss : tuple of float
        For each of them, with eviction and without.
    """

    trace_name: str
    trace_hash: str
    rule: str
    alpha: float
    budget: int
    steps: int
    approximate: bool
    observed: dict[str, float | None]
    alphas: tuple[float, ...]
    kept_mass: tuple[float, ...]
    loss: tuple[float, ...]

    @property
    def responses(self) -> dict[str, float]:
        """Each of `SENSITIVITIES`."""
        mass, loss = self.kept_mass, self.loss
        found = (max(mass) - min(mass), max(loss) - min(loss), mass[-1] - mass[0])
        return {name: x if abs(x) > TIE else 0.0 for name, x in zip(SENSITIVITIES, found, strict=True)}

    @property
    def best_by_kept_mass(self) -> list[float]:
        """The alphas that share the highest kept mass."""
        return [a for a, mass in zip(self.alphas, self.kept_mass, strict=True) if mass >= max(self.kept_mass) - TIE]

    @property
    def best_by_loss(self) -> list[float]:
        """The alphas that share the smallest loss."""
        return [a for a, loss in zip(self.alphas, self.loss, strict=True) if loss <= min(self.loss) + TIE]

    def summary(self) -> dict[str, Any]:
        """Give everything, flat and ready for JSON."""
        own = {name: getattr(self, name) for name in ("trace_hash", "rule", "alpha", "budget", "steps", "approximate")}
        best: dict[str, Any] = {name: getattr(self, name) for name in ("best_by_kept_mass", "best_by_loss")}
        tried = {name: list(getattr(self, name)) for name in ("alphas", "kept_mass", "loss")}
        best["at_edge"] = {name: at_edge(best[f"best_by_{name}"], self.alphas) for name in ("kept_mass", "loss")}
        return {"trace": self.trace_name, **own, **self.observed, **self.responses, **best, **tried}


def sensitivity(
    trace: Trace | str | Path,
    *,
    alpha: float = DEFAULT_ALPHA,
    over: Literal["both", "step", "layer"] = "both",
    alphas: Sequence[float] = ALPHAS,
    h: int = DEFAULT_H,
    utility: Utility | None = None,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    engine: str = DEFAULT_ENGINE,
) -> Sensitivity:
    """Measure a recording's observables at one alpha and its response to several; one shared retention group.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    alpha : float
        The EMA whose state, retained set and raw-top evicted rate are observed.
    over : {"both", "step", "layer"}
        Which EMA, see `kvsim.policies.ema.Ema`; ``both`` is the paper's.
    alphas : sequence of float
        At least two different alphas.
    h, utility
        As for `kvsim.tradeoff.decompose`: what stands for the local utility in the loss.
    compression_ratio, budget, engine
        As for `kvsim.replay`.

    Raises
    ------
    KvsimError
        On an alpha out of range, fewer than two alphas, or a bad h or budget.
    TraceError
        If the recording is damaged.
    """
    chosen = choose_budget(compression_ratio, budget)
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    tried = tuple(sorted({float(one) + 0.0 for one in alphas}))
    if len(tried) < 2:
        raise KvsimError("a spread needs at least two different alphas")
    rule = Ema(alpha, over=over)
    policies = [Policy(Ema(one, over=over), budget=chosen) for one in tried]
    watched, *replays = replay_many(trace, [Policy(rule, budget=chosen), *policies], shadow_churn=False, engine=engine)
    split = decompose(trace, policies, h=h, utility=utility)
    size, seen = chosen.resolve(trace.prompt_length), watched.summary()
    observed = {
        **_of_scores(trace, rule, size),
        "disagreement": 1 - seen["raw_agreement"],
        "raw_top_evicted": seen["raw_top_evicted"],
    }
    return Sensitivity(
        trace_name=trace.path.name,
        trace_hash=trace.hash,
        rule="ema:alpha" if over == "both" else f"ema:alpha,over={over}",
        alpha=rule.alpha,
        budget=size,
        steps=trace.num_steps,
        approximate=watched.approximate,
        observed=observed,
        alphas=tried,
        kept_mass=tuple(one.summary()["kept_mass"] for one in replays),
        loss=tuple(one.total for one in split),
    )


def correlate(rows: Sequence[Sensitivity], *, resamples: int = RESAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Correlate observables with sensitivities over recordings; 95% percentile bootstrap intervals, permutation p.

    Parameters
    ----------
    rows : sequence of Sensitivity
        One a recording, of one rule, alpha and set of alphas.
    resamples : int
        Bootstrap samples of the recordings, and shuffles.
    seed : int
        Their seed.

    Returns
    -------
    list of dict
        For each observable and each sensitivity: ``observable``, ``sensitivity``, ``traces`` (those where the
        observable is defined), and ``spearman`` and ``pearson`` with ``_low``, ``_high`` and ``_p``, the share of
        orders with a correlation at least as strong: of all orders up to 6 recordings, of shuffles above. All None
        below 3 recordings or where either side is constant; an interval is None where more than half of the resamples
        are constant. Intervals from few recordings are far too narrow: three points in line give [1, 1]. Their p, 1/3,
        shows what that is worth.

    Raises
    ------
    KvsimError
        If a recording is there twice, they are of different rules or alphas, or `resamples` is below 1.
    """
    if resamples < 1:
        raise KvsimError(f"resamples must be at least 1, got {resamples}")
    if len({(row.rule, row.alpha, row.alphas) for row in rows}) > 1:
        raise KvsimError("recordings can be compared only with the same rule, alpha and alphas")
    if len({row.trace_hash for row in rows}) < len(rows):
        raise KvsimError("a recording counts once: some recording is given twice")
    found = []
    for observable in OBSERVABLES:
        known = [row for row in rows if row.observed[observable] is not None]
        x = np.array([row.observed[observable] for row in known], np.float64)
        for response in SENSITIVITIES:
            y = np.array([row.responses[response] for row in known])
            measured = _correlations(x, y, resamples, seed)
            found.append({"observable": observable, "sensitivity": response, "traces": len(known), **measured})
    return found


def _of_scores(trace: Trace, rule: Ema, budget: int) -> dict[str, float | None]:
    """Average the margins and the entropy over steps, in shadow mode."""
    layers = trace.eligible_layers
    coefficients = rule.coefficients(len(layers))
    weights, decay = coefficients.layer_weights, coefficients.step_decay
    attention, state = ShadowScores(trace, layers, ScoreSource("attention")), np.zeros(trace.num_positions)
    columns: dict[str, list[float]] = {"score_margin": [], "state_margin": [], "score_entropy": []}
    for step in range(1, trace.num_steps + 1):
        *scores, mean = attention.at(step, shadow_rows(trace, layers, step))
        m = state[: mean.size]
        m *= decay
        m += weights @ np.stack(scores)
        if budget < mean.size:
            columns["score_margin"].append(_margin(mean, budget))
            columns["state_margin"].append(_margin(m, budget))
        if mean.sum() > 0:
            p = mean / mean.sum()
            columns["score_entropy"].append(float(-(p * np.log(np.where(p > 0, p, 1))).sum() / np.log(p.size)))
    return {name: float(np.mean(column)) if column else None for name, column in columns.items()}


def _margin(values: FloatArray, budget: int) -> float:
    """Give what the B-th highest is above the next, over the B-th; 0 where that is 0."""
    place = values.size - budget
    after, last = np.partition(values, (place - 1, place))[place - 1 : place + 1]
    return float((last - after) / last) if last > 0 else 0.0


def _correlations(x: FloatArray, y: FloatArray, resamples: int, seed: int) -> dict[str, float | None]:
    names = [f"{name}{end}" for name in ("spearman", "pearson") for end in ("", "_low", "_high", "_p")]
    found: dict[str, float | None] = dict.fromkeys(names)
    if x.size < LEAST_TRACES:
        return found
    rng = np.random.default_rng(seed)
    drawn = rng.integers(x.size, size=(resamples, x.size))
    exact = x.size <= MOST_ENUMERATED
    if exact:
        shuffled = np.array(list(itertools.permutations(range(x.size))))
    else:
        shuffled = rng.permuted(np.tile(np.arange(x.size), (resamples, 1)), axis=1)
    for name, measure in (("spearman", _spearman), ("pearson", pearson)):
        value = float(measure(x, y))
        if np.isnan(value):
            continue
        chance = np.abs(measure(x, y[shuffled])) >= abs(value) - TIE
        p = chance.mean() if exact else (1 + chance.sum()) / (1 + resamples)
        found |= {name: value, f"{name}_p": float(p)}
        again = measure(x[drawn], y[drawn])
        again = again[~np.isnan(again)]
        if 2 * again.size >= resamples:
            low, high = np.quantile(again, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
            found |= {f"{name}_low": low, f"{name}_high": high}
    return found


def _spearman(x: FloatArray, y: FloatArray) -> FloatArray:
    return correlation(centred_ranks(x), centred_ranks(y))
