"""The component: static data once for each recording, policy and group, and what changes often beside it."""

import base64
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import streamlit as st
from kvsim_traces import Trace

from kvsim import Result
from kvsim.attending import Shading
from kvsim.fates import Fates, Given
from kvsim.plan import FloatArray
from kvsim.token_display import Kind, display

__all__ = ["KEY", "draw", "live_data", "static_data"]

KEY = "tokens"
"""Key of the component; its states are ``step`` and ``selected``."""

FIGURES = {"kept_mass": "kept mass", "churn": "churn", "retained": "tokens held"}

_HERE = Path(__file__).parent
_WORDS = {
    "irreversible": {
        "kept": "kept",
        "protected": "protected",
        "gone": "evicted at this step",
        "old": "evicted earlier",
        "absent": "not there yet",
        "query": "the step's own token",
        "will": "will be evicted at step",
        "later": "after its eviction",
    },
    "shadow": {
        "kept": "in the set",
        "protected": "protected",
        "gone": "left the set at this step",
        "old": "left it earlier",
        "absent": "not there yet",
        "query": "the step's own token",
        "will": "will leave the set at step",
        "later": "while it was out",
    },
}

_tokens = st.components.v2.component(
    "kvsim_tokens", css=(_HERE / "tokens.css").read_text(), js=(_HERE / "tokens.js").read_text()
)
_live = st.components.v2.component("kvsim_tokens_live", js=(_HERE / "live.js").read_text())


def draw(static: bytes, live: dict[str, Any], moved: Any, chosen: Any) -> None:
    """Mount the tokens.

    Parameters
    ----------
    static : bytes
        From `static_data`. Equal bytes travel to a browser once.
    live : dict
        From `live_data`.
    moved, chosen : callable
        Called where the step, or the selection, has come to rest at another value.
    """
    _tokens(key=KEY, data=static, on_step_change=moved, on_selected_change=chosen)
    _live(key=f"{KEY} live", data=live, height=1)


def static_data(trace: Trace, result: Result, fates: Fates, given: Given | None) -> bytes:
    """Give what does not change with the step: a line that says what it is, and JSON."""
    shown = display(trace)
    kinds = {kind: place for place, kind in enumerate(get_args(Kind))}
    metrics = result.outcome.metrics
    header = {
        "recording": trace.hash,
        "policy": fates.policy,
        "mode": fates.mode,
        "group": fates.group,
        "mass": given is not None,
    }
    body = {
        "recording": trace.hash,
        "prompt": trace.prompt_length,
        "steps": trace.num_steps,
        "texts": [one.text for one in shown],
        "kinds": _packed(np.array([kinds[one.kind] for one in shown]), np.uint8),
        "ids": None if trace.tokens is None else _packed(trace.tokens, np.int32),
        "starts": _packed(fates.starts, np.int32),
        "changes": _packed(fates.changes, np.int32),
        "held": _packed(fates.held, np.int32),
        "sink": fates.n_sink,
        "recent": fates.n_recent,
        "mass": None if given is None else _packed(given.mass, np.float32),
        "later": None if given is None else _packed(given.mass_later, np.float32),
        "figures": {label: _known(metrics[name]) for name, label in FIGURES.items()},
        "label": fates.label,
        "several": fates.groups.count > 1,
        "words": _WORDS[fates.mode],
    }
    return json.dumps(header).encode() + b"\n" + json.dumps(body, allow_nan=False).encode()


def live_data(
    trace: Trace,
    step: int,
    selected: str,
    colour: str,
    *,
    values: FloatArray | None = None,
    shading: Shading | None = None,
    states: FloatArray | None = None,
) -> dict[str, Any]:
    """Give what changes often: where a fresh view starts, the attention of the selected tokens, the step's states."""
    return {
        "recording": trace.hash,
        "step": step,
        "selected": selected,
        "colour": colour,
        "values": None if values is None else _packed(values, np.float32),
        "levels": None if shading is None else _packed(shading.levels, np.uint8),
        "shading": None if shading is None else _legend(shading),
        "states": None if states is None else _packed(states, np.float32),
    }


def _legend(shading: Shading) -> dict[str, Any]:
    others = f"; {shading.beyond} other{'s' * (shading.beyond != 1)} at the end of the scale" if shading.edges else ""
    return {
        "edges": list(shading.edges),
        "before": "attention, log scale from the median to the 99th percentile without position 0:",
        "after": f"position 0, the sink, gets {shading.sink:.4g}{others}",
    }


def _packed(values: Any, dtype: Any) -> str:
    return base64.b64encode(np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _known(column: FloatArray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in column]
