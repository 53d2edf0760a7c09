"""The state by which a policy ranks, after any step: what the engines do not keep."""

import numpy as np
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.engines.reference import rows_of
from kvsim.engines.stepper import Stepper
from kvsim.errors import KvsimError
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["states_after"]


def states_after(result: Result, trace: Trace, step: int, *, progress: Progress | None = None) -> FloatArray:
    """Run a replay's plan again on the reference engine up to a step, and give its state m.

    Positions are evicted by m, lowest first, where the plan neither pools it over neighbours (SnapKV) nor takes
    redundancy off (R-KV).

    Parameters
    ----------
    result : Result
        A replay of the recording.
    trace : Trace
        The recording.
    step : int
        0 (before step 1) to T.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    array
        [G, L0+T]; NaN for positions that the step's query does not see and, before step 1, for those already evicted.

    Raises
    ------
    KvsimError
        If the result is of another recording, or there is no such step.
    """
    if result.trace_hash != trace.hash:
        raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
    if not 0 <= step <= trace.num_steps:
        raise KvsimError(f"step must be in 0..{trace.num_steps}, got {step}")
    shadow = result.mode == "shadow"
    plan, known = result.plan, trace.capture != "scores"
    stepper = Stepper(plan, trace.prompt_length, trace.num_positions, shadow=shadow, heads_known=known)
    seen = stepper.retained
    for t in range(1, step + 1):
        seen = stepper.step(t, rows_of(trace, plan, t)).visible
        if progress is not None:
            progress(t, step)
    if shadow:
        seen = np.broadcast_to(np.arange(trace.num_positions) < trace.prompt_length + step, seen.shape)
    return np.where(seen, stepper.state, np.nan)
