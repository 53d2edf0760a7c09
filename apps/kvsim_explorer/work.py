"""Work that takes seconds: it waits for a click where it is long, shows how far it is, and can be stopped."""

from collections.abc import Callable
from typing import Any, TypeVar

import streamlit as st

from kvsim import KvsimError, TraceError

__all__ = ["worked"]

T = TypeVar("T")

_DONE = "work_done"
_MOST_KEPT = 32


def worked(key: tuple[Any, ...], label: str, work: Callable[[Callable[[int, int], None]], T], *, ask: bool) -> T | None:
    """Give the outcome of a piece of work, doing it if it has not been done; None while it is not there.

    Parameters
    ----------
    key : tuple
        What the outcome is a function of.
    label : str
        What is being done, for people.
    work : callable
        Does it; is given a function to tell (done, all).
    ask : bool
        Start on a click only.
    """
    view = st.session_state.get("view")
    # Outcomes hold the recording's name, which a copy of it has not.
    name, key = repr(key), (None if view is None else view.location, *key)
    done: dict[tuple[Any, ...], Any] = _outcomes()
    if key in done:
        return done[key]  # type: ignore[no-any-return]
    stopped = st.session_state.get("work_stopped") == name
    wanted = st.session_state.get("work_wanted") == name
    if stopped or (ask and not wanted):
        st.info(f"{label}: stopped." if stopped else f"{label}: this takes a while on a recording of this size.")
        st.button("Start" if not stopped else "Start again", key=f"start {name}", on_click=_want, args=(name,))
        return None
    place = st.empty()
    with place.container(border=True):
        bar = st.progress(0.0, text=label)
        # A click on anything ends this run of the script at its next word to the page: `tell` below.
        st.button("Stop", key=f"stop {name}", on_click=_stop, args=(name,))

    def tell(count: int, total: int) -> None:
        bar.progress(min(1.0, count / max(1, total)), text=f"{label}: {count:,} of {total:,}")

    try:
        outcome = work(tell)
    except (KvsimError, TraceError):
        place.empty()
        raise
    while len(done) >= _MOST_KEPT:
        done.pop(next(iter(done)), None)
    done[key] = outcome
    st.rerun()
    return outcome


@st.cache_resource
def _outcomes() -> dict[tuple[Any, ...], Any]:
    return {}


def _want(name: str) -> None:
    st.session_state["work_wanted"] = name
    st.session_state.pop("work_stopped", None)


def _stop(name: str) -> None:
    st.session_state["work_stopped"] = name
