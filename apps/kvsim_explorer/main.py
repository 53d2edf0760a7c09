"""The app: the sidebar that all pages share, and the pages."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import streamlit as st

from kvsim import Budget, KvsimError, TraceError
from kvsim.replay import choose_budget
from kvsim_explorer import pages
from kvsim_explorer.builder import choose_policy
from kvsim_explorer.literal import literal
from kvsim_explorer.paper import notice_width
from kvsim_explorer.picker import pick
from kvsim_explorer.view import MOST_POLICIES, View, read_policies

__all__ = ["main"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

OTHERS = "cumulative\nsingle"
STYLE = Path(__file__).with_name("style.css")


def main() -> None:
    """Show the app."""
    st.set_page_config(page_title="kvsim", layout="wide", initial_sidebar_state="auto")
    st.html(STYLE)
    with st.sidebar:
        view = _inline(_choose)
        notice_width()
    _start_anew(view)
    st.session_state["view"] = view
    # Pages are a parameter of one address: below a path of its own Streamlit asks for its services in vain first.
    page = pages.PAGES[_page()]
    if view is None:
        st.info("A recording and a policy are needed: the sidebar says what is missing.")
        return
    _inline(lambda: page.show(view))


OF_A_RECORDING = ("positions", "steps", "heads_step", "group", "layer", "scorers_layer", "a", "b")
"""Widgets whose values mean something on one recording only."""


def _start_anew(view: View | None) -> None:
    """Forget what was chosen on another recording: its parts, steps and groups."""
    if view is None:
        return
    before, now = st.session_state.get("seen"), view.trace.hash
    st.session_state["seen"] = now
    if before not in (None, now):
        for name in OF_A_RECORDING:
            st.session_state.pop(name, None)


def _page() -> str:
    names = list(pages.PAGES)
    # The address decides: the browser's Back changes it, and nothing else.
    wanted = st.query_params.get("page", names[0])
    st.session_state["page"] = wanted if wanted in names else names[0]
    chosen = st.segmented_control(
        "Page",
        names,
        key="page",
        format_func=lambda name: pages.PAGES[name].TITLE,
        label_visibility="collapsed",
        required=True,
        on_change=_turn,
    )
    return chosen or names[0]


def _turn() -> None:
    st.query_params["page"] = st.session_state["page"]


def _inline(work: Callable[[], T]) -> T | None:
    """Run a part of the page; what kvsim refuses is said there, and the app goes on."""
    try:
        return work()
    except (KvsimError, TraceError) as error:
        st.error(literal(str(error)))
    except OSError as error:
        st.error(literal(f"{error.filename or 'a file'}: {error.strerror or error}"))
    except MemoryError as error:
        st.error(literal(f"this recording takes more memory than there is: {error}"))
    except (ValueError, OverflowError) as error:
        # Numbers in an address that Python or Streamlit cannot hold.
        _log.exception("the page was not finished")
        st.error(literal(str(error)))
    return None


def _choose() -> View | None:
    picked = _inline(pick)
    policy = choose_policy(None if picked is None else picked[0])
    budget = _budget()
    lines = st.text_area(
        "Compare with",
        OTHERS,
        key="others",
        bind="query-params",
        height=90,
        help=f"Policies, one a line, at most {MOST_POLICIES - 1}.",
    )
    shadow = st.toggle(
        "Shadow mode",
        key="shadow",
        bind="query-params",
        help="Evict nothing; rank all positions at every step. It measures ranking, not consequences.",
    )
    if picked is None or policy is None or budget is None:
        return None
    others, wrong = read_policies(lines, budget)
    for message in wrong:
        st.error(literal(message))
    if len(others) >= MOST_POLICIES:
        st.error(f"Compare with at most {MOST_POLICIES - 1} policies; the first {MOST_POLICIES - 1} are used.")
    trace, location = picked
    return View(trace, location, policy.with_budget(budget), tuple(others[: MOST_POLICIES - 1]), budget, shadow)


def _budget() -> Budget | None:
    text = st.text_input(
        "Budget",
        "10%",
        key="budget",
        bind="query-params",
        help="Tokens kept (64), or a share of the prompt (10%); a policy's own budget= beats it.",
    )
    try:
        return choose_budget(budget=text.strip())
    except KvsimError as error:
        st.error(literal(str(error)))
        return None
