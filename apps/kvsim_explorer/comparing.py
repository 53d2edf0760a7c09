"""What comparing policies takes: replays of those that run, where their sets part, how far they are from the best."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from kvsim import KvsimError, Policy, Result, TraceError
from kvsim.anatomy import Anatomy, Difference, dissect
from kvsim.optima import Beside, beside_optimum
from kvsim_explorer.literal import literal
from kvsim_explorer.replays import result_of
from kvsim_explorer.view import View
from kvsim_explorer.work import worked

__all__ = ["Runs", "best_of", "dissected", "pair_of", "run_all"]

MANY_READ = 2e8
"""Elements of attention rows, beyond which reading them all again waits for a click."""

MANY_PRICED = 5e6
"""Groups times positions times steps, beyond which finding optima waits for a click."""


@dataclass(frozen=True)
class Runs:
    """The policies that run on the recording.

    Attributes
    ----------
    policies : list of Policy
        They, in the order of the sidebar.
    results : list of Result
        Their replays in the chosen mode.
    failed : list of str
        What was wrong with the others.
    """

    policies: list[Policy]
    results: list[Result]
    failed: list[str]

    def alike(self) -> list[Result]:
        """Give the results whose sets can be compared with the first one's: those with the same kind of groups."""
        kind = self.results[0].plan.groups.kind
        return [one for one in self.results if one.plan.groups.kind == kind]


def run_all(view: View) -> Runs:
    """Replay every policy; one that cannot run does not stop the others."""
    runs = Runs([], [], [])
    for policy in view.policies:
        try:
            result = result_of(view, policy)
        except (KvsimError, TraceError) as error:
            runs.failed.append(str(error))
            continue
        runs.policies.append(policy)
        runs.results.append(result)
    return runs


def dissected(view: View, results: Sequence[Result]) -> Anatomy | None:
    """Compare the sets of results with those of the first; None while that is not done.

    Raises
    ------
    KvsimError
        As `kvsim.anatomy.dissect`.
    """
    trace = view.trace
    size = trace.num_steps * trace.num_positions * len(trace.eligible_layers)
    names = tuple(one.policy for one in results)

    def work(tell: Callable[[int, int], None]) -> Anatomy:
        return dissect(results, trace, progress=tell)

    key = ("dissect", trace.hash, results[0].mode, names)
    return worked(key, f"Comparing the sets of {len(names)} policies", work, ask=size > MANY_READ)


def pair_of(view: View, a: Result, b: Result, known: Anatomy | None) -> Difference | None:
    """Give the difference of two results, from what is known where it is there; errors as for `dissected`."""
    for pair in known.pairs if known is not None else ():
        if {pair.a, pair.b} == {a.policy, b.policy}:
            return pair
    found = dissected(view, [a, b])
    return None if found is None else found.pairs[0]


def best_of(view: View, runs: Runs) -> list[Beside] | None:
    """Put each policy with a budget beside the optimum of its groups; None while that is not done."""
    trace = view.trace
    pairs = zip(runs.policies, runs.results, strict=True)
    results = [result for policy, result in pairs if policy.budget is not None]
    cells = trace.num_positions * trace.num_steps * sum(one.plan.groups.count for one in results)

    def work(tell: Callable[[int, int], None]) -> list[Beside]:
        return beside_optimum(results, trace, progress=tell)

    key = ("optima", trace.hash, tuple(one.policy for one in results))
    return worked(key, "Finding the optimum", work, ask=cells > MANY_PRICED)


def say_failed(runs: Runs) -> None:
    """Say what is wrong with the policies that do not run."""
    for message in runs.failed:
        st.error(literal(message))
