"""Replay: what a policy would have kept of a recording."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from kvsim_traces import Trace, open_trace

from kvsim.budget import DEFAULT_COMPRESSION_RATIO, Budget
from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.engines.outcome import MODES, Mode, Outcome, Progress
from kvsim.errors import KvsimError, unknown_name
from kvsim.policy import Policy, parse
from kvsim.result import Result, mean_of

__all__ = ["choose_budget", "replay", "replay_many"]


def choose_budget(compression_ratio: float | str | Decimal | None = None, budget: int | str | None = None) -> Budget:
    """Turn the two ways of asking into one budget; the default is a compression ratio of 0.9.

    Parameters
    ----------
    compression_ratio : float, str or Decimal, optional
        Fraction of the prompt REMOVED, in [0, 1).
    budget : int or str, optional
        Tokens to keep, or ``"10%"`` of the prompt.

    Raises
    ------
    KvsimError
        If both are given or either is out of range.
    """
    if budget is not None:
        if compression_ratio is not None:
            raise KvsimError("give compression_ratio or budget, not both")
        return Budget.parse(budget) if isinstance(budget, str) else Budget(tokens=budget)
    return Budget.from_compression_ratio(DEFAULT_COMPRESSION_RATIO if compression_ratio is None else compression_ratio)


def replay(
    trace: Trace | str | Path,
    policy: Policy | str,
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    shadow: bool = False,
    shadow_churn: bool = True,
    engine: str = DEFAULT_ENGINE,
    mode: Mode = "exact",
    progress: Progress | None = None,
) -> Result:
    """Replay a policy on a recording, open loop.

    Parameters
    ----------
    trace : Trace or path
        The recording.
    policy : Policy or str
        The policy; a budget of its own beats `compression_ratio` and `budget`.
    compression_ratio : float, optional
        Fraction of the prompt removed, in [0, 1); 0.9 if neither it nor `budget` is given.
    budget : int or str, optional
        Tokens to keep, or ``"10%"``.
    shadow : bool
        Evict nothing; rank all positions at every step (measures ranking, not consequences).
    shadow_churn : bool
        In irreversible mode, run the shadow mode as well for its churn; not for policies that admit.
    engine : str
        Name of the engine.
    mode : {"exact", "fast"}
        ``exact`` is equal to the definition; ``fast`` may order near-ties differently where the engine has such a path.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    Result

    Raises
    ------
    KvsimError
        On a bad policy, budget or engine.
    TraceError
        If the recording is damaged, or its capture level lacks what the policy reads.

    Examples
    --------
    >>> import kvsim
    >>> result = kvsim.replay("traces/samples/smollm2-needle-512", "ema:0.9", compression_ratio=0.9)
    >>> result.evicted_at.shape
    (1, 560)
    """
    return replay_many(
        trace,
        [policy],
        compression_ratio=compression_ratio,
        budget=budget,
        shadow=shadow,
        shadow_churn=shadow_churn,
        engine=engine,
        mode=mode,
        progress=progress,
    )[0]


def replay_many(
    trace: Trace | str | Path,
    policies: Sequence[Policy | str],
    *,
    compression_ratio: float | str | Decimal | None = None,
    budget: int | str | None = None,
    shadow: bool = False,
    shadow_churn: bool = True,
    raw: bool = True,
    engine: str = DEFAULT_ENGINE,
    mode: Mode = "exact",
    progress: Progress | None = None,
) -> list[Result]:
    """Replay several policies on one recording; the cpu engine runs those it can in one pass over the rows.

    Parameters
    ----------
    trace, compression_ratio, budget, shadow, shadow_churn, engine, mode
        As for `replay`.
    policies : sequence of Policy or str
        The policies.
    raw : bool
        Compute the metrics that need the raw top-B sets and the values; without it they are NaN.
    progress : callable, optional
        Called with (policies done, policies in all); with one policy (steps done, steps in all).

    Returns
    -------
    list of Result
        In the order of `policies`.
    """
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    run_many = get_engine(engine)
    chosen = choose_budget(compression_ratio, budget)
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    parsed = [(parse(policy) if isinstance(policy, str) else policy).with_budget(chosen) for policy in policies]
    plans = [policy.plan(trace) for policy in parsed]
    passes = 2 if shadow_churn and not shadow else 1

    def advance(offset: int) -> Progress:
        return lambda done, total: progress(done + offset * total, total * passes) if progress else None

    outcomes = run_many(trace, plans, shadow=shadow, raw=raw, mode=mode, progress=advance(0))
    beside: dict[int, Outcome] = {}
    if passes == 2:
        # Admission has no meaning in shadow mode, and selection changes no set.
        ranked = {index: replace(plan, selection=None) for index, plan in enumerate(plans) if plan.admission is None}
        found = run_many(trace, list(ranked.values()), shadow=True, raw=False, mode=mode, progress=advance(1))
        beside = dict(zip(ranked, found, strict=True))
    return [
        Result(
            policy=plan.policy,
            trace_name=trace.path.name,
            trace_hash=trace.hash,
            prompt_length=trace.prompt_length,
            num_steps=trace.num_steps,
            head_dim=trace.head_dim,
            plan=plan,
            outcome=outcome,
            engine=engine,
            approximate=trace.capture == "scores" and not shadow and plan.score.kind == "attention",
            shadow_churn=mean_of(beside[index].metrics["churn"]) if index in beside else None,
        )
        for index, (plan, outcome) in enumerate(zip(plans, outcomes, strict=True))
    ]
