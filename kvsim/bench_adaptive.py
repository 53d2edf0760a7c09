"""What adaptive alphas are worth, on synthetic recordings whose true utilities are known and on given ones."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvsim_traces import Trace

from kvsim.adaptation import DEFAULT_ADAPTIVE, Adaptation, adaptation, fixed_beside
from kvsim.controls.noise import GRID
from kvsim.correlation import spearman
from kvsim.synth import Synthetic, write_synthetic
from kvsim.version import __version__

__all__ = ["REGIMES", "SEEDS", "bench_adaptive"]

REGIMES: tuple[dict[str, Any], ...] = (
    *({"kind": "iid", "noise": noise} for noise in (0.3, 1.0, 3.0)),
    *({"kind": "drift", "drift": drift, "noise": noise} for drift in (0.01, 0.03, 0.1) for noise in (0.3, 1.0, 3.0)),
    *({"kind": "shift", "noise": noise} for noise in (0.3, 1.0, 3.0)),
    {"kind": "heavy", "noise": 1.0},
    {"kind": "sink", "noise": 1.0},
)
"""Kinds of synthetic recordings; a shift comes in the middle."""

SEEDS = (100, 101, 102, 103, 104)
"""Seeds that are reported; rules and their defaults were chosen on seeds 0 to 4."""

PROMPTS = (256, 1024, 4096, 16384)
SIGNALS = {"noise": "eta", "disagreement": "disagreement", "tracking": "signal"}


def bench_adaptive(
    directory: str | Path,
    recordings: Sequence[Trace] = (),
    *,
    regimes: Sequence[dict[str, Any]] = REGIMES,
    seeds: Sequence[int] = SEEDS,
    prompts: Sequence[int] = PROMPTS,
    steps: int = 128,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare adaptive rules with the fixed alphas of the paper. Nothing is timed: the numbers repeat.

    Parameters
    ----------
    directory : str or Path
        Where the synthetic recordings are written, one after the other.
    recordings : sequence of Trace
        Others to run on as well.
    regimes : sequence of dict
        What to give to `Synthetic`.
    seeds : sequence of int
        Recordings of each regime; their numbers are averaged.
    prompts : sequence of int
        Prompt lengths to measure the selector's eta at.
    steps : int
        Steps of a synthetic recording.
    progress : callable, optional
        Called with (recordings done, recordings in all).

    Returns
    -------
    dict
        ``synthetic`` and ``recordings``: for each regime or recording and each rule the kept mass under irreversible
        eviction, the shadow loss, and the mean alpha in both modes. ``summary``: for each rule over the regimes, the
        mean kept mass less that of the regime's best fixed alpha of the same ``over``, and the geometric mean of the
        shadow loss over that of the best. ``direction``: rank correlation over all synthetic recordings between what
        each adaptive rule with ``over=step`` watches and the fixed alpha with the least shadow loss. ``eta``: what the
        warm-up selector measures where nothing changes but the prompt's length. All at a compression ratio of 0.9.
    """
    rules = [*DEFAULT_ADAPTIVE, *map(str, fixed_beside(DEFAULT_ADAPTIVE, GRID))]
    total = len(regimes) * len(seeds) + len(prompts) + len(recordings)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    def run(given: dict[str, Any], policies: Sequence[str] = rules) -> list[Adaptation]:
        with tempfile.TemporaryDirectory(dir=directory, prefix="adaptive-") as scratch:
            spec = Synthetic(**given)
            found = adaptation(write_synthetic(spec, Path(scratch) / "trace"), policies, utility=spec.utilities)
        advance()
        return found

    synthetic, watched = [], []
    for regime in regimes:
        by_seed = [run({**regime, "steps": steps, "seed": seed}) for seed in seeds]
        synthetic.append({**regime, "rules": _means(rules, by_seed)})
        watched += by_seed
    eta = []
    for prompt in prompts:
        (row,) = run({"kind": "iid", "noise": 1.0, "prompt": prompt, "steps": 12}, ["adaptive:noise"])
        signals = {name: _round(value) for name, value in row.irreversible.signals.items()}
        eta.append(
            {"prompt": prompt, "budget": int(row.budget), **signals, "alpha": float(row.irreversible.alphas[-1])}
        )
    given = []
    for trace in recordings:
        given.append(
            {"trace": trace.path.name, "trace_hash": trace.hash, "rules": _means(rules, [adaptation(trace, rules)])}
        )
        advance()
    return {
        "synthetic": synthetic,
        "recordings": given,
        "summary": _summary(rules, synthetic) if synthetic else {},
        "direction": _direction(rules, watched),
        "eta": eta,
        "seeds": list(seeds),
        "steps": steps,
        "version": __version__,
    }


def _means(rules: Sequence[str], by_seed: Sequence[Sequence[Adaptation]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for place, rule in enumerate(rules):
        own = [rows[place] for rows in by_seed]
        found[rule] = {
            "kept_mass": _round(np.mean([row.kept_mass for row in own])),
            "shadow_loss": _round(np.mean([row.shadow_loss for row in own])),
        }
        if own[0].alpha is None:
            found[rule]["alpha"] = _round(np.mean([row.irreversible.alphas.mean() for row in own]))
            found[rule]["alpha_shadow"] = _round(np.mean([row.shadow.alphas.mean() for row in own]))
    return found


def _summary(rules: Sequence[str], regimes: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = {}
    for rule in rules:
        rivals = [one for one in rules if one.startswith("ema:") and ("over=step" in one) == ("over=step" in rule)]
        behind, ratio = [], []
        for regime in regimes:
            own, fixed = regime["rules"][rule], [regime["rules"][one] for one in rivals]
            behind.append(own["kept_mass"] - max(one["kept_mass"] for one in fixed))
            least = min(one["shadow_loss"] for one in fixed)
            ratio.append(np.log(own["shadow_loss"] / least) if least > 0 and own["shadow_loss"] > 0 else 0.0)
        found[rule] = {
            "kept_mass_of_best": _round(np.mean(behind)),
            "shadow_loss_of_best": _round(np.exp(np.mean(ratio))),
        }
    return found


def _direction(rules: Sequence[str], watched: Sequence[Sequence[Adaptation]]) -> dict[str, dict[str, float | None]]:
    fixed = [place for place, rule in enumerate(rules) if rule.startswith("ema:") and "over=step" in rule]
    best = [min((rows[place] for place in fixed), key=lambda row: row.shadow_loss).alpha for rows in watched]
    found: dict[str, dict[str, float | None]] = {}
    for how, name in SIGNALS.items():
        place = rules.index(f"adaptive:{how},over=step")
        found[name] = {}
        for mode in ("irreversible", "shadow"):
            signals = [getattr(rows[place], mode).signals.get(name) for rows in watched]
            known = [(one, alpha) for one, alpha in zip(signals, best, strict=True) if one is not None]
            rho = spearman(*zip(*known, strict=True)) if len(known) > 1 else float("nan")
            found[name][mode] = None if np.isnan(rho) else round(rho, 3)
    return found


def _round(value: Any) -> float:
    """Keep six digits: what the last ones are depends on the machine."""
    return float(f"{float(value):.6g}")
