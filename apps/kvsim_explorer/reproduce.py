"""The commands and the lines of Python that give what a page shows."""

import shlex
from collections.abc import Sequence

import streamlit as st

from kvsim import Policy
from kvsim_explorer.picker import UPLOADED
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
    view: View | None = st.session_state.get("view")
    lines, code = "\n".join(commands), python.strip()
    if view is not None and st.session_state.get("offered") == UPLOADED:
        # The imported copy goes with the session.
        own = view.trace.path.name
        lines, code = (text.replace(view.location, own) for text in (lines, code))
        lines = f"{command('trace', 'import', f'{own}.npz', '--out', own)}\n{lines}"
    with st.expander("Reproduce"):
        st.code(lines, language="bash", wrap_lines=True)
        st.code(code, language="python", wrap_lines=True)
