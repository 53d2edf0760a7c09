"""Which policies run on which of several recordings, found before anything runs; the rest is said."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsim_traces import CaptureError, Trace

from kvsim.cli.output import say, stderr
from kvsim.errors import PolicyError
from kvsim.policy import Policy

__all__ = ["LeftOut", "runnable", "say_left_out"]


@dataclass(frozen=True)
class LeftOut:
    """A policy that a recording cannot run, and why; the fields are ready for JSON."""

    trace: str
    policy: str
    why: str


def runnable(traces: Sequence[Trace], policies: Sequence[Policy]) -> tuple[list[list[int]], list[LeftOut]]:
    """Say for each recording which policies run on it.

    Parameters
    ----------
    traces : sequence of Trace
        The recordings.
    policies : sequence of Policy
        With their budgets.

    Returns
    -------
    places : list of list of int
        For each recording the places of its policies.
    left_out : list of LeftOut
        The others.

    Raises
    ------
    PolicyError, CaptureError
        If a policy runs on none of the recordings.
    """
    places: list[list[int]] = [[] for _ in traces]
    left_out: list[LeftOut] = []
    for place, policy in enumerate(policies):
        errors: list[PolicyError | CaptureError] = []
        for own, trace in zip(places, traces, strict=True):
            try:
                policy.plan(trace)
            except (PolicyError, CaptureError) as error:
                errors.append(error)
                left_out.append(LeftOut(trace.path.name, str(policy), str(error)))
            else:
                own.append(place)
        if errors and len(errors) == len(traces):
            raise errors[0]
    return places, left_out


def say_left_out(left_out: Sequence[LeftOut]) -> None:
    """Tell on stderr what was left out, a line each."""
    for one in left_out:
        say(f"left out: {one.trace}: {one.why}", to=stderr)
