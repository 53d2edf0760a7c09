"""The commands and the lines of Python that give what a page shows."""

import shlex
from collections.abc import Sequence

import streamlit as st

from kvsim import Policy
from kvsim_explorer.view import View

__all__ = ["command", "policy_options", "reproduce"]


def command(*words: str) -> str:
    """Join the words of a command, quoted where a shell needs it."""
    return shlex.join(["kvsim", *words])


def policy_options(view: View, policies: Sequence[Policy]) -> list[str]:
    """Give ``--policy`` for each policy, and the budget that those without one have."""
    words = [word for policy in policies for word in ("--policy", view.text_of(policy))]
    return [*words, "--budget", str(view.budget)]


def reproduce(*commands: str, python: str) -> None:
    """Show the box with the commands and the lines of Python."""
    with st.expander("Reproduce"):
        st.code("\n".join(commands), language="bash")
        st.code(python.strip(), language="python")
