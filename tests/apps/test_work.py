"""Long work: asked for where it is long, told, stopped, and done once."""

from streamlit.testing.v1 import AppTest

SCRIPT = """
import streamlit as st
from kvsim_explorer.work import worked

def work(tell):
    st.session_state["runs"] = st.session_state.get("runs", 0) + 1
    tell(1, 2)
    return 42

outcome = worked(("answer", {key!r}), "Counting", work, ask={ask})
st.text(f"{{outcome}}")
"""


def shown(key: str, *, ask: bool) -> AppTest:
    return AppTest.from_string(SCRIPT.format(key=key, ask=ask)).run()


def test_short_work_is_done_once():
    app = shown("short", ask=False)
    assert app.text[0].value == "42"
    app.run()
    assert app.session_state["runs"] == 1


def test_long_work_waits_for_a_click():
    app = shown("long", ask=True)
    assert app.text[0].value == "None"
    assert "runs" not in app.session_state
    app.button[0].click().run()
    assert app.text[0].value == "42"
    assert app.session_state["runs"] == 1


def test_stopped_work_stays_stopped_until_it_is_asked_for():
    app = AppTest.from_string(SCRIPT.format(key="stopped", ask=False))
    app.session_state["work_stopped"] = repr(("answer", "stopped"))
    app.run()
    assert app.info[0].value == "Counting: stopped."
    app.run()
    assert "runs" not in app.session_state
    app.button[0].click().run()
    assert app.text[0].value == "42"
