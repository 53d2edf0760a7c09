"""What was asked of the recorder, checked before the model runs and before anything is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvsim_traces.errors import TraceError
from kvsim_traces.manifest import CAPTURES, LIMIT, LayerInfo
from kvsim_traces.paths import check_new_directory, local_path

QK_DTYPES = ("float16", "float32")


def _integer(field: str, value: object, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value < LIMIT:
        raise TraceError(f"{field}: must be an integer of at least {low}, got {value!r}")
    return int(value)


def _choice(field: str, value: object, valid: Sequence[str]) -> str:
    if value not in valid:
        raise TraceError(f"{field}: {value!r} is not one of {', '.join(valid)}")
    return str(value)


def token_ids(field: str, value: Any, vocab_size: int) -> list[int]:
    """Turn a sequence, array or tensor of token ids into a list, or raise a TraceError naming `field`."""
    array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    if array.size == 0:
        raise TraceError(f"{field}: is empty; at least one token is needed")
    if array.dtype.kind not in "iu":
        raise TraceError(f"{field}: must hold integers (token ids), got {array.dtype}")
    if array.ndim == 2 and array.shape[0] != 1:
        raise TraceError(f"{field}: holds a batch of {array.shape[0]}; a trace holds one sequence (batch size 1)")
    if array.ndim not in (1, 2):
        raise TraceError(f"{field}: must have shape [L] or [1, L], got {list(array.shape)}")
    array = array.reshape(-1)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise TraceError(f"{field}: token {int(outside[0])} is outside the vocabulary of {vocab_size}")
    return [int(token) for token in array]


@dataclass(frozen=True)
class Request:
    """Checked arguments of `record`; see there for their meaning.

    Attributes
    ----------
    prompt : list of int
    forced : list of int or None
        At most `steps` of them.
    steps : int
        The most steps the recording can have.
    last_queries : int
        W, at most the prompt's length; 0 for none.
    """

    out: str | Path
    prompt: list[int]
    forced: list[int] | None
    steps: int
    capture: str
    last_queries: int
    prompt_mass: bool
    temperature: float
    seed: int
    suppress_eos: bool
    eligible: str | tuple[int, ...]
    qk_dtype: str
    vocab_size: int
    pre_rope_keys: bool = False


def checked(
    *,
    out: str | Path,
    input_ids: Any,
    force: Any,
    steps: int,
    capture: str,
    prompt_queries: int | str,
    prompt_mass: bool,
    temperature: float,
    seed: int,
    suppress_eos: bool,
    eligible: str | Sequence[int] | None,
    qk_dtype: str,
    vocab_size: int,
    pre_rope_keys: bool = False,
) -> Request:
    """Check every argument.

    Raises
    ------
    TraceError
        Naming the argument that is wrong.
    """
    local_path(out)
    check_new_directory(Path(out), "; a recording needs a new one")
    steps = _integer("steps", steps, 1)
    _choice("capture", capture, tuple(CAPTURES))
    _choice("qk_dtype", qk_dtype, QK_DTYPES)
    if pre_rope_keys and capture not in ("qk", "qkv"):
        raise TraceError(f"pre_rope_keys: capture {capture!r} keeps no keys; use 'qk' or 'qkv'")
    prompt = token_ids("input_ids", input_ids, vocab_size)
    forced = None if force is None else token_ids("force", force, vocab_size)[:steps]
    if isinstance(prompt_queries, str):
        _choice("prompt_queries", prompt_queries, ("all", "a number of queries"))
        last_queries = len(prompt)
    else:
        last_queries = min(_integer("prompt_queries", prompt_queries, 0), len(prompt))
    if not (isinstance(temperature, int | float) and 0 <= temperature < math.inf):
        raise TraceError(f"temperature: must be finite and at least 0, got {temperature!r}")
    if isinstance(eligible, str):
        eligible = _choice("eligible", eligible, ("full", "all"))
    elif eligible is not None:
        eligible = tuple(_integer("eligible", layer, 0) for layer in eligible)
        if not eligible:
            raise TraceError("eligible: is an empty list; name at least one layer")
    return Request(
        out=out,
        prompt=prompt,
        forced=forced,
        steps=steps if forced is None else len(forced),
        capture=capture,
        last_queries=last_queries,
        prompt_mass=bool(prompt_mass),
        temperature=float(temperature),
        seed=_integer("seed", seed, 0),
        suppress_eos=bool(suppress_eos),
        eligible="full" if eligible is None else eligible,
        qk_dtype=qk_dtype,
        vocab_size=vocab_size,
        pre_rope_keys=bool(pre_rope_keys),
    )


def eligible_flags(eligible: str | tuple[int, ...], layers: list[LayerInfo]) -> list[bool]:
    """Which recorded layers policies score and evict.

    Raises
    ------
    TraceError
        When a named layer does not exist, or no layer has full attention and none was named.
    """
    if eligible == "all":
        return [True] * len(layers)
    if isinstance(eligible, tuple):
        beyond = [layer for layer in eligible if layer >= len(layers)]
        if beyond:
            raise TraceError(f"eligible: layer {beyond[0]} does not exist; the model has 0..{len(layers) - 1}")
        return [index in eligible for index in range(len(layers))]
    flags = [layer.type == "full_attention" for layer in layers]
    if not any(flags):
        kinds = ", ".join(sorted({layer.type for layer in layers}))
        raise TraceError(
            f"eligible: the model has no full-attention layer (only {kinds}), so none is eligible by default; "
            "record with eligible='all' to score and evict them all the same"
        )
    return flags
