"""Adaptive rules at work: the alphas they choose, why, and what that is worth beside the alphas they could have had."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace, open_trace

from kvsim.alphas import ALPHAS, at_edge
from kvsim.control import Control, Decide, Moment
from kvsim.controls.base import AlphaChooser
from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.engines.outcome import Progress
from kvsim.engines.reference import settle
from kvsim.errors import KvsimError, PolicyError
from kvsim.plan import FloatArray, Plan
from kvsim.policies.adaptive import Adaptive
from kvsim.policies.ema import Ema
from kvsim.policy import Policy, parse
from kvsim.replay import choose_budget
from kvsim.shadow_loss import shadow_losses
from kvsim.tradeoff import Utility

__all__ = ["DEFAULT_ADAPTIVE", "Adaptation", "Alphas", "adaptation", "fixed_beside", "hindsight"]

DEFAULT_ADAPTIVE = tuple(
    f"adaptive:{how}{over}" for over in ("", ",over=step") for how in ("noise", "disagreement", "tracking")
)


@dataclass(frozen=True)
class Alphas:
    """The alphas of the scored steps of one run.

    Attributes
    ----------
    steps : array of int
        [N] scored steps, from 1.
    alphas : array
        [N] alpha at each.
    signals : dict of str to float
        What they were chosen by: the estimates of `noise` (``sigma``, ``delta``, and ``eta`` unless delta is 0), the
        mean ``disagreement``, the mean tracking ``signal`` beside its ``random`` value. Empty for a fixed alpha, and
        where the run was too short to know anything.
    """

    steps: npt.NDArray[np.intp]
    alphas: FloatArray
    signals: dict[str, float]

    @property
    def switches(self) -> int:
        """Steps whose alpha is not that of the scored step before."""
        return int((np.diff(self.alphas) != 0).sum())

    @property
    def first_switch(self) -> int | None:
        """The first of them; None if there is none."""
        changed = np.flatnonzero(np.diff(self.alphas))
        return int(self.steps[changed[0] + 1]) if changed.size else None

    def summary(self) -> dict[str, Any]:
        """Give the range of the alphas, the switches and the signals, ready for JSON."""
        return {
            "alpha_min": float(self.alphas.min()),
            "alpha_mean": float(self.alphas.mean()),
            "alpha_max": float(self.alphas.max()),
            "switches": self.switches,
            "first_switch": self.first_switch,
            "signals": self.signals,
        }


@dataclass(frozen=True)
class Adaptation:
    """One rule, adaptive or fixed, on one recording.

    Attributes
    ----------
    policy : str
        Canonical policy with its budget.
    trace_name, trace_hash : str
        The recording.
    family : str
        What an adaptive rule has in common with the fixed ones that it could have been: ``ema:alpha,over=step``.
    alpha : float or None
        Alpha of a fixed rule.
    budget : float
        Tokens kept, averaged over groups.
    kept_mass : float
        With irreversible eviction, open loop.
    shadow_loss : float
        Without eviction: the utility that its sets lose, see `kvsim.shadow_loss`.
    irreversible, shadow : Alphas
        Its alphas in the one mode and in the other.
    """

    policy: str
    trace_name: str
    trace_hash: str
    family: str
    alpha: float | None
    budget: float
    kept_mass: float
    shadow_loss: float
    irreversible: Alphas = field(repr=False)
    shadow: Alphas = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """Give everything, ready for JSON."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.repr}
        own["trace"] = own.pop("trace_name")
        return own | {"irreversible": self.irreversible.summary(), "shadow": self.shadow.summary()}


def adaptation(
    trace: Trace | str | Path,
    policies: Sequence[Policy | str] = DEFAULT_ADAPTIVE,
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    h: int = 8,
    utility: Utility | None = None,
    progress: Progress | None = None,
) -> list[Adaptation]:
    """Run rules on a recording in both modes and say which alphas they ran at.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policies : sequence of Policy or str
        Heads `adaptive` and `ema`, with any axes.
    compression_ratio, budget
        As for `kvsim.replay`; a policy's own budget beats them.
    h : int
        Half width of the moving average that stands for the local utility in the shadow loss.
    utility : callable, optional
        True utilities, instead of moving averages.
    progress : callable, optional
        Called with (rules done, rules in all).

    Returns
    -------
    list of Adaptation
        In the order of `policies`.

    Raises
    ------
    KvsimError
        If h is negative, there are no policies, one is neither `adaptive` nor `ema`, or a utility has the wrong shape.
    """
    chosen = choose_budget(compression_ratio, budget)
    if isinstance(h, bool) or not isinstance(h, int) or h < 0:
        raise KvsimError(f"h must be a number of steps of at least 0, got {h!r}")
    if not policies:
        raise KvsimError("name at least one policy")
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    parsed = [(parse(policy) if isinstance(policy, str) else policy).with_budget(chosen) for policy in policies]
    heads = [_head(policy) for policy in parsed]
    plans = [policy.plan(trace) for policy in parsed]
    kept, paths, shadow_paths, sets = [], [], [], []
    run = get_engine(DEFAULT_ENGINE)
    for done, plan in enumerate(plans, start=1):
        path, settled = _follow(trace, plan, shadow=False)
        kept.append(float(run(trace, [settled], raw=False)[0].metrics["kept_mass"].mean()))
        shadow_path, settled = _follow(trace, plan, shadow=True)
        retained = run(trace, [settled], shadow=True, raw=False)[0].retained
        assert retained is not None
        sets.append(retained)
        paths.append(path)
        shadow_paths.append(shadow_path)
        if progress is not None:
            progress(done, len(plans))
    losses = np.zeros(len(plans))
    kinds = [(str(policy.expand().score), plan.groups.kind) for policy, plan in zip(parsed, plans, strict=True)]
    for kind in dict.fromkeys(kinds):
        members = [p for p, own in enumerate(kinds) if own == kind]
        lost = shadow_losses(trace, [plans[p] for p in members], [sets[p] for p in members], h=h, utility=utility)
        losses[members] = lost.mean(axis=1)
    return [
        Adaptation(
            policy=plan.policy,
            trace_name=trace.path.name,
            trace_hash=trace.hash,
            family=_family(parsed[p], heads[p]),
            alpha=getattr(heads[p], "alpha", None),
            budget=float(plan.budgets.mean()),
            kept_mass=kept[p],
            shadow_loss=float(losses[p]),
            irreversible=paths[p],
            shadow=shadow_paths[p],
        )
        for p, plan in enumerate(plans)
    ]


def fixed_beside(policies: Sequence[Policy | str], alphas: Sequence[float] = ALPHAS) -> list[Policy]:
    """Give the fixed rules that adaptive ones could have been: `ema` at these alphas, with the same axes."""
    parsed = [parse(policy) if isinstance(policy, str) else policy for policy in policies]
    found = [
        dataclasses.replace(policy, head=Ema(alpha, over=policy.head.over))
        for policy in parsed
        if isinstance(policy.head, Adaptive)
        for alpha in alphas
    ]
    return list(dict.fromkeys(found))


def hindsight(rows: Sequence[Adaptation]) -> list[dict[str, Any]]:
    """Say which fixed alpha was best for each recording and family, on the numbers that `adaptation` gave.

    Returns
    -------
    list of dict
        ``trace``, ``family``, ``kept_mass`` and ``kept_mass_alpha``, ``shadow_loss`` and ``shadow_loss_alpha``; the
        lowest alpha of equally good ones. ``at_edge``: for both whether an alpha beyond those tried might do better.
    """
    families: dict[tuple[str, str, str], dict[float, Adaptation]] = {}
    for row in rows:
        if row.alpha is not None:
            families.setdefault((row.trace_name, row.trace_hash, row.family), {})[row.alpha] = row
    found = []
    for (trace, _, name), by_alpha in families.items():
        alphas = sorted(by_alpha)
        most = max(alphas, key=lambda alpha: by_alpha[alpha].kept_mass)
        least = min(alphas, key=lambda alpha: by_alpha[alpha].shadow_loss)
        best: dict[str, Any] = {"kept_mass": by_alpha[most].kept_mass, "kept_mass_alpha": most}
        best |= {"shadow_loss": by_alpha[least].shadow_loss, "shadow_loss_alpha": least}
        best["at_edge"] = {"kept_mass": at_edge([most], alphas), "shadow_loss": at_edge([least], alphas)}
        found.append({"trace": trace, "family": name, **best})
    return found


def _head(policy: Policy) -> Adaptive | Ema:
    head = policy.expand().head
    if not isinstance(head, Adaptive | Ema):
        raise PolicyError(f"{policy}: has no alpha to follow (valid heads: adaptive, ema)")
    return head


def _family(policy: Policy, head: Adaptive | Ema) -> str:
    return str(dataclasses.replace(policy.expand(), head=Ema(0.0, over=head.over))).replace("ema:0", "ema:alpha", 1)


@dataclass(frozen=True)
class _Choice:
    step: int
    alpha: float
    signals: dict[str, float]


@dataclass(frozen=True)
class _Watched(Control):
    """A control that writes down what it chooses."""

    control: Control
    log: list[_Choice]

    def begin(self, plan: Plan) -> Decide:
        """See `Control.begin`."""
        decide = self.control.begin(plan)
        assert isinstance(decide, AlphaChooser)

        def follow(moment: Moment) -> tuple[FloatArray, FloatArray]:
            coefficients = decide(moment)
            self.log.append(_Choice(moment.step, decide.alpha, dict(decide.signals)))
            return coefficients

        return follow


def _follow(trace: Trace, plan: Plan, *, shadow: bool) -> tuple[Alphas, Plan]:
    """Settle a plan; give its alphas, and the plan to run."""
    steps = np.flatnonzero(plan.scored) + 1
    if plan.control is None:
        return Alphas(steps, plan.a[plan.scored, 0], {}), plan
    log: list[_Choice] = []
    settled = settle(trace, dataclasses.replace(plan, control=_Watched(plan.control, log)), shadow=shadow)
    known = [choice.signals for choice in log if choice.signals]
    # The estimates of a warm-up are settled once and for all; other signals are new at every step.
    names = dict.fromkeys(name for signals in known for name in signals)
    signals = {name: float(np.mean([one[name] for one in known if name in one])) for name in names}
    return Alphas(steps, np.array([choice.alpha for choice in log]), signals), settled
