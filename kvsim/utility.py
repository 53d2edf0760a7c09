"""What single tokens get from single heads, step by step: tokens differ, and one token differs between heads.

>>> import kvsim
>>> from kvsim.utility import token_utility
>>> trace = kvsim.open_trace("traces/samples/smollm2-needle-512")  # doctest: +SKIP
>>> token_utility(trace, positions=[0, 513], heads=[(3, 1), (20, 4)]).received.shape  # doctest: +SKIP
(2, 2, 48)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.plan import FloatArray

__all__ = ["TokenUtility", "read_head", "token_utility"]


@dataclass(frozen=True)
class TokenUtility:
    """The attention that single positions get from single query heads (WG-KV Fig. 3).

    Attributes
    ----------
    trace_name : str
        The recording.
    prompt_length : int
        L0: step t's query is that of position L0 + t - 1.
    positions : tuple of int
        N positions.
    heads : tuple of (int, int)
        P layers with a query head each.
    received : array
        [P, N, T] share of the full cache's attention at each step; NaN before a position is there.
    """

    trace_name: str
    prompt_length: int
    positions: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    received: FloatArray = field(repr=False)

    @property
    def even(self) -> FloatArray:
        """[T] what each would get of attention spread evenly over all positions."""
        shares: FloatArray = 1.0 / (self.prompt_length + np.arange(1, self.received.shape[2] + 1))
        return shares


def read_head(text: str) -> tuple[int, int]:
    """Read a layer and a query head, such as ``10.19``.

    Raises
    ------
    KvsimError
        If it is not two numbers.
    """
    match = re.fullmatch(r"(\d{1,6})\.(\d{1,6})", text, re.ASCII)
    if match is None:
        raise KvsimError(f"a head is LAYER.HEAD, such as 10.19, got {text!r}")
    return int(match[1]), int(match[2])


def token_utility(
    trace: Trace,
    positions: Sequence[int],
    heads: Sequence[tuple[int, int]],
    *,
    progress: Progress | None = None,
) -> TokenUtility:
    """Look up what positions get from query heads at every step of a recording.

    A recording has no attention from within the prompt; a generated position is seen from its own step on.

    Parameters
    ----------
    trace : Trace
        The recording, with single heads.
    positions : sequence of int
        Positions, at least one.
    heads : sequence of (int, int)
        Recorded layers with a query head each, at least one.
    progress : callable, optional
        Called with (steps done, steps in all).

    Raises
    ------
    KvsimError
        If a position, layer or head does not exist, none is named, or the recording has head means only.
    """
    if trace.capture == "scores":
        raise KvsimError(f"{trace.path}: holds head means, not single heads")
    wanted, chosen = tuple(dict.fromkeys(positions)), tuple(dict.fromkeys(heads))
    if not wanted or not chosen:
        raise KvsimError("name a position, such as 12 or 12-20,31, and a head, such as 10.19")
    for name, value, count in (
        *(("position", position, trace.num_positions) for position in wanted),
        *(("layer", layer, trace.num_layers) for layer, _ in chosen),
        *(("head", head, trace.num_heads) for _, head in chosen),
    ):
        if not 0 <= value < count:
            raise KvsimError(f"{name} must be in 0..{count - 1}, got {value}")
    received = np.full((len(chosen), len(wanted), trace.num_steps), np.nan)
    layers = sorted({layer for layer, _ in chosen})
    for t in range(1, trace.num_steps + 1):
        rows = trace.attention_rows(t, layers)
        for p, (layer, head) in enumerate(chosen):
            for n, position in enumerate(wanted):
                if position < trace.prompt_length + t:
                    received[p, n, t - 1] = rows[layers.index(layer), head, position]
        if progress is not None:
            progress(t, trace.num_steps)
    return TokenUtility(trace.path.name, trace.prompt_length, wanted, chosen, received)
