"""Replay on an NVIDIA GPU: one Triton program for each retention group of each plan, all of them at once."""

import importlib.util
import os
from collections.abc import Sequence

from kvsim_traces import Trace

from kvsim.engines.outcome import Mode, Outcome, Progress
from kvsim.errors import KvsimError, PolicyError
from kvsim.plan import Plan

__all__ = ["check", "refusal", "run_many"]


def run_many(
    trace: Trace,
    plans: Sequence[Plan],
    *,
    shadow: bool = False,
    raw: bool = True,
    mode: Mode = "exact",
    progress: Progress | None = None,
) -> list[Outcome]:
    """Replay plans on the GPU; see `kvsim.engines.reference.run_many`, whose `evicted_at` the exact mode returns.

    Everything runs there in float64: the replay in Triton kernels, the metrics that need raw sets or values in PyTorch.
    The fast mode holds the states of linear rules in float32 and may order near-ties differently.

    Parameters
    ----------
    trace : Trace
        The recording; its token-major rows are uploaded on first use and the most recent ones kept.
    plans : sequence of Plan
        What to run.
    shadow, raw, mode, progress
        As for `kvsim.engines.cpu.run_many`.

    Returns
    -------
    list of Outcome
        One for each plan, in order.

    Raises
    ------
    KvsimError
        Without torch, triton or a GPU. ``TRITON_INTERPRET=1`` runs the kernels on the CPU, thousands of times slower.
    PolicyError
        If one of the plans needs what these kernels cannot do; nothing has run then.
    """
    check()
    for plan in plans:
        if shadow:
            plan.check_shadow()
        reason = refusal(plan)
        if reason is not None:
            raise PolicyError(f"{plan.policy}: engine gpu cannot run it: {reason}; engines that can: cpu, reference")
    from kvsim.engines.gpu.engine import run_batches

    return run_batches(trace, plans, shadow=shadow, raw=raw, mode=mode, progress=progress)


def refusal(plan: Plan) -> str | None:
    """Say why the kernels cannot run a plan, None if they can."""
    if plan.control is not None:
        return "its control decides between steps in Python"
    if plan.score.redundancy is not None:
        return "its ranking compares all pairs of visible keys"
    return None


def check() -> None:
    """Make sure that there is something to run on.

    Raises
    ------
    KvsimError
        If there is not; the message says what is missing.
    """
    missing = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        lack = f"{' and '.join(missing)} not installed"
    else:
        import torch

        if os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available():
            return
        lack = "no CUDA device found"
    raise KvsimError(f"engine gpu needs an NVIDIA GPU with torch and triton ({lack}); engines here: cpu, reference")
