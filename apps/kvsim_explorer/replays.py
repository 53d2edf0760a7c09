"""Replays and analyses, kept by what they are a function of: the recording's hash, the policy and the settings."""

from collections.abc import Sequence
from typing import Any

import streamlit as st

import kvsim
from kvsim import KvsimError, Policy, Result, Trace, TraceError
from kvsim.candidates import reason
from kvsim.policies.ema import Ema
from kvsim_explorer.view import View

__all__ = ["raw_policy", "replayed", "result_of"]


def result_of(view: View, policy: Policy | None = None, *, shadow: bool | None = None) -> Result:
    """Replay a policy on the view's recording, the chosen one in the chosen mode if nothing else is said.

    Raises
    ------
    KvsimError
        If the policy cannot run on the recording.
    """
    evicts_nothing = view.shadow if shadow is None else shadow
    return _replayed(view.trace, str(view.trace.path), view.trace.hash, str(policy or view.policy), evicts_nothing)


def replayed(
    view: View, policies: Sequence[Policy], *, shadow: bool | None = None
) -> tuple[list[Result], list[tuple[Policy, str]]]:
    """Replay those of several policies that can run on the recording; give the others with the reason."""
    results: list[Result] = []
    failed: list[tuple[Policy, str]] = []
    for policy in policies:
        try:
            results.append(result_of(view, policy, shadow=shadow))
        except (KvsimError, TraceError) as error:
            failed.append((policy, reason(error, view.trace, str(policy))))
    return results, failed


def raw_policy(policy: Policy) -> Policy:
    """Give the policy whose shadow sets are the raw top-B sets of a policy's groups and budget."""
    return Policy(Ema(0, over="step"), group=policy.group_kind, budget=policy.budget)


@st.cache_resource(max_entries=64, show_spinner="Replaying")
def _replayed(_trace: Trace, path: str, trace_hash: str, policy: str, shadow: bool) -> Result:
    result: Any = kvsim.replay(_trace, policy, shadow=shadow, shadow_churn=not shadow)
    assert isinstance(result, Result)
    return result
