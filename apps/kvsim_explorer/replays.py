"""Replays and analyses, kept by what they are a function of: the recording's hash, the policy and the settings."""

from collections.abc import Sequence
from typing import Any

import streamlit as st

import kvsim
from kvsim import Policy, Result, Trace
from kvsim.policies.ema import Ema
from kvsim_explorer.view import View

__all__ = ["raw_policy", "result_of", "results_of"]


def result_of(view: View, policy: Policy | None = None, *, shadow: bool | None = None) -> Result:
    """Replay a policy on the view's recording, the chosen one in the chosen mode if nothing else is said.

    Raises
    ------
    KvsimError
        If the policy cannot run on the recording.
    """
    evicts_nothing = view.shadow if shadow is None else shadow
    return _replayed(view.trace, view.trace.hash, str(policy or view.policy), evicts_nothing)


def results_of(view: View, policies: Sequence[Policy], *, shadow: bool | None = None) -> list[Result]:
    """Replay several policies; errors as for `result_of`."""
    return [result_of(view, policy, shadow=shadow) for policy in policies]


def raw_policy(policy: Policy) -> Policy:
    """Give the policy whose shadow sets are the raw top-B sets of a policy's groups and budget."""
    return Policy(Ema(0, over="step"), group=policy.expand().group, budget=policy.budget)


@st.cache_resource(max_entries=64, show_spinner="Replaying")
def _replayed(_trace: Trace, trace_hash: str, policy: str, shadow: bool) -> Result:
    result: Any = kvsim.replay(_trace, policy, shadow=shadow, shadow_churn=not shadow)
    assert isinstance(result, Result)
    return result
