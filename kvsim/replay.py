"""Replay: what a policy would have kept of a recording."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

from kvsim_traces import Trace, open_trace

from kvsim.budget import DEFAULT_COMPRESSION_RATIO, Budget
from kvsim.engines import DEFAULT_ENGINE, get_engine
from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.policy import Policy, parse
from kvsim.result import Result

__all__ = ["choose_budget", "replay"]


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
        In irreversible mode, run the shadow mode as well for its churn.
    engine : str
        Name of the engine.
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
    (1, 595)
    """
    run = get_engine(engine)
    chosen = choose_budget(compression_ratio, budget)
    trace = trace if isinstance(trace, Trace) else open_trace(trace)
    policy = (parse(policy) if isinstance(policy, str) else policy).with_budget(chosen)
    plan = policy.plan(trace)
    passes = 2 if shadow_churn and not shadow else 1

    def advance(done: int, total: int, offset: int = 0) -> None:
        if progress is not None:
            progress(done + offset, total * passes)

    outcome = run(trace, plan, shadow=shadow, progress=advance)
    result = Result(
        policy=plan.policy,
        trace_name=trace.path.name,
        trace_hash=trace.hash,
        prompt_length=trace.prompt_length,
        num_steps=trace.num_steps,
        plan=plan,
        outcome=outcome,
        engine=engine,
        approximate=trace.capture == "scores" and not shadow and plan.score.kind == "attention",
    )
    if passes == 1:
        return result
    beside = run(trace, plan, shadow=True, progress=lambda done, total: advance(done, total, total))
    churn = replace(result, outcome=beside).summary()["churn"]
    return replace(result, shadow_churn=churn)
