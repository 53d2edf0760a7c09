"""The choice of a policy: drop-downs made of the registry beside a free text box; each updates the other."""

import dataclasses
import inspect
import types
import typing
from typing import Any

import streamlit as st

from kvsim import KvsimError, Policy, PolicyError, Trace, parse
from kvsim.grammar import parse_value
from kvsim.head import HEADS, Preset
from kvsim.plan import GROUP_KINDS
from kvsim.policy import AXES
from kvsim.scorers import SCORERS
from kvsim_explorer.literal import literal

__all__ = ["TEXT", "choose_policy"]

TEXT = "policy"
"""Key of the text box, and its name in the URL."""

DEFAULT = "ema:0.8"
AS_HEAD = "(as the head says)"

_REGISTRIES: dict[str, dict[str, Any]] = {"head": HEADS, "score": SCORERS}
_FREE = {
    "budget": "10% or 64",
    "protect": "sink:4+recent:32",
    "when": "every, prefill, overflow:10%",
    "refresh": "4",
    "admit": "local:window=32,sink=4",
    "select": "quest:64",
}
assert {*_FREE, "score", "group"} == {*AXES}, "an axis without a field in the builder"


def choose_policy(trace: Trace | None) -> Policy | None:
    """Show the text box and the builder; give the policy, or None where the text is not one.

    Parameters
    ----------
    trace : Trace or None
        The recording that it shall run on, for arguments that fit it.
    """
    st.session_state["build window"] = _longest_window(trace)
    if TEXT not in st.session_state:
        st.session_state[TEXT] = st.query_params.get(TEXT) or DEFAULT
    text = st.text_input(
        "Policy",
        key=TEXT,
        bind="query-params",
        on_change=_spread,
        placeholder=DEFAULT,
        help="A policy string such as ema:0.9/refresh=4; `kvsim policies` explains them.",
    )
    # Empty too after the browser's Back to an address without it.
    found, message = _read(text.strip() or DEFAULT)
    if message:
        st.error(literal(message))
    with st.expander("Build a policy", expanded=False):
        _build()
    if found is not None:
        st.caption(_meaning(found))
    return found


def _read(text: str) -> tuple[Policy | None, str]:
    try:
        return parse(text), ""
    except KvsimError as error:
        return None, str(error)


def _meaning(policy: Policy) -> str:
    expanded = str(policy.expand())
    summary = (inspect.getdoc(type(policy.head)) or "").partition("\n")[0]
    return summary if expanded == str(policy) else f"{summary} Stands for {literal(expanded)}."


def _build() -> None:
    if "build head" not in st.session_state:
        _spread()
    head = st.selectbox("Head", sorted(HEADS), key="build head", on_change=_gather_anew, format_func=_with_kind)
    _fields("head", head)
    score = st.selectbox("Score", [AS_HEAD, *sorted(SCORERS)], key="build score", on_change=_gather)
    if score != AS_HEAD:
        _fields("score", score)
    st.selectbox("Group", [AS_HEAD, *GROUP_KINDS], key="build group", on_change=_gather, help=AXES["group"].doc)
    for axis, example in _FREE.items():
        label, about = (
            f"{axis.capitalize()}{' of its own' * (axis == 'budget')}",
            f"{AXES[axis].doc} Takes {AXES[axis].values}.",
        )
        st.text_input(label, key=f"build {axis}", on_change=_gather, placeholder=example, help=about)
    if message := st.session_state.get("build error"):
        st.error(literal(message))


def _with_kind(name: str) -> str:
    return f"{name} (preset)" if issubclass(HEADS[name], Preset) else name


def _fields(part: str, name: str) -> None:
    """Show a field for each argument of a head or a scorer."""
    cls = _REGISTRIES[part][name]
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, label = _key(part, name, field.name), f"{name}: {field.name}"
        choices = _choices(hints[field.name])
        if choices:
            st.selectbox(label, choices, key=key, on_change=_gather)
        else:
            default = "" if field.default in (dataclasses.MISSING, None) else str(field.default)
            st.text_input(label, key=key, on_change=_gather, placeholder=default or "needed")


def _choices(hint: Any) -> list[str]:
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return ["false", "true"] if hint is bool else []


def _key(part: str, name: str, field: str) -> str:
    return f"build {part} {name} {field}"


def _spread() -> None:
    """Set the builder's fields to what the text says; text that is no policy leaves them."""
    policy, _ = _read(st.session_state.get(TEXT) or DEFAULT)
    if policy is None:
        return
    state = st.session_state
    state.pop("build error", None)
    _spread_part("head", policy.head)
    state["build score"] = AS_HEAD if policy.score is None else policy.score.name
    if policy.score is not None:
        _spread_part("score", policy.score)
    state["build group"] = policy.group or AS_HEAD
    for axis in _FREE:
        value = getattr(policy, axis)
        state[f"build {axis}"] = "" if value is None else AXES[axis].write(value)


def _spread_part(part: str, given: Any) -> None:
    st.session_state[f"build {part}"] = given.name
    for field in dataclasses.fields(given):
        key, value = _key(part, given.name, field.name), getattr(given, field.name)
        st.session_state[key] = _written(value)


def _written(value: Any) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _gather_anew() -> None:
    """Take another head: its arguments start at their defaults or, where one is needed, at an example."""
    cls: Any = HEADS[st.session_state["build head"]]
    for field in dataclasses.fields(cls):
        st.session_state[_key("head", cls.name, field.name)] = _first_value(cls, field)
    _gather()


def _longest_window(trace: Trace | None) -> int | None:
    """Give how many of the prompt's queries a recording holds, None where it does not say."""
    if trace is None or not trace.has("prompt_queries"):
        return None
    return int(trace.stored("prompt_queries").layout.shape[2])


def _first_value(cls: Any, field: "dataclasses.Field[Any]") -> str:
    longest = st.session_state.get("build window")
    if field.name == "window_size" and isinstance(field.default, int) and longest is not None:
        return str(min(field.default, longest))
    if field.default is not dataclasses.MISSING:
        return _written(field.default)
    hint = typing.get_type_hints(cls)[field.name]
    return {float: "0.8", int: "16"}.get(hint, "") if not _choices(hint) else _choices(hint)[0]


def _gather() -> None:
    """Write the text from the builder's fields; what does not make a policy is said below them."""
    state = st.session_state
    try:
        axes: dict[str, Any] = {}
        if state["build score"] != AS_HEAD:
            axes["score"] = _part("score", state["build score"])
        if state["build group"] != AS_HEAD:
            axes["group"] = state["build group"]
        for axis in _FREE:
            if text := state.get(f"build {axis}", "").strip():
                axes[axis] = AXES[axis].read(text)
        policy = Policy(_part("head", state["build head"]), **axes)
    except KvsimError as error:
        state["build error"] = str(error)
        return
    state.pop("build error", None)
    state[TEXT] = str(policy)


def _part(part: str, name: str) -> Any:
    """Make a head or a scorer of its fields."""
    cls = _REGISTRIES[part][name]
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        text = str(st.session_state.get(_key(part, name, field.name)) or "").strip()
        if text:
            values[field.name] = parse_value(text, hints[field.name], f"{field.name} of {name!r}")
        elif field.default is dataclasses.MISSING:
            raise PolicyError(f"{name!r} needs {field.name}")
    return cls(**values)
