"""Which tokens attend to which: the attention of chosen queries, that on chosen positions, and a scale to see it on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.fates import Fates
from kvsim.mass import group_rows
from kvsim.plan import FloatArray, Groups

__all__ = ["LEVELS", "Attended", "Shading", "attention_of", "attention_on", "shade"]

LEVELS = 6
"""Levels of a `Shading` above 0."""

QUANTILE = 0.99


@dataclass(frozen=True)
class Attended:
    """The attention that some positions get together, step by step.

    Attributes
    ----------
    positions : tuple of int
        The positions.
    full : array
        [T]: the share of a step's attention with the full cache, averaged over layers and heads; NaN before the first
        of them is there.
    visible : array or None
        [T]: the same of those that a policy's cache still showed that step; None where there is no such policy.
    """

    positions: tuple[int, ...]
    full: FloatArray
    visible: FloatArray | None


@dataclass(frozen=True)
class Shading:
    """Values on a scale that neither the attention sink nor a few others swallow.

    Attributes
    ----------
    levels : array of uint8
        [n]: 0 below `edges[0]`, else how many of `edges` a value reaches: up to `LEVELS`.
    edges : tuple of float
        `LEVELS` thresholds, evenly spaced in the logarithm, from the median to the 99th percentile of the values other
        than position 0's; empty where all of these are 0.
    sink : float
        The value of position 0, where attention sinks; it has the level of what lies beyond the scale.
    beyond : int
        How many others reach the last threshold.
    """

    levels: npt.NDArray[np.uint8]
    edges: tuple[float, ...]
    sink: float
    beyond: int


def attention_of(
    trace: Trace, positions: Sequence[int], layer: int | None = None, *, fates: Fates | None = None
) -> FloatArray:
    """Sum the recorded full-cache attention rows of generated tokens, [L0+T].

    The query of step t belongs to position ``L0 + t - 1``; prompt positions have no recorded query and add nothing.

    Parameters
    ----------
    trace : Trace
        The recording.
    positions : sequence of int
        The tokens.
    layer : int, optional
        One recorded layer; heads are averaged.
    fates : Fates, optional
        Without a layer, a retention group whose layers and heads are averaged; all eligible ones by default.

    Raises
    ------
    KvsimError
        If a position or the layer does not exist.
    """
    total, (groups, group) = np.zeros(trace.num_positions), _source(trace, layer, fates)
    for position in _checked(trace, positions):
        if position >= trace.prompt_length:
            total[: position + 1] += group_rows(trace, groups, position - trace.prompt_length + 1, [group])[0]
    return total


def attention_on(
    trace: Trace,
    positions: Sequence[int],
    layer: int | None = None,
    *,
    fates: Fates | None = None,
    progress: Progress | None = None,
) -> Attended:
    """Sum the full-cache attention that positions get, step by step.

    Parameters
    ----------
    trace : Trace
        The recording.
    positions : sequence of int
        The tokens, at least one.
    layer, fates
        As for `attention_of`. There is an `Attended.visible` where all of the attention comes from the group's own
        layers and heads, and so was subject to its eviction.
    progress : callable, optional
        Called with (steps done, steps in all).

    Raises
    ------
    KvsimError
        If a position or the layer does not exist, or none is named.
    """
    chosen = np.array(_checked(trace, positions), dtype=np.intp)
    if not chosen.size:
        raise KvsimError("name a position, such as 12 or 12-20,31")
    groups, group = _source(trace, layer, fates)
    evicting = fates if fates is not None and (layer is None or layer in _governed(fates)) else None
    full, visible = np.full(trace.num_steps, np.nan), np.full(trace.num_steps, np.nan)
    for step in range(1, trace.num_steps + 1):
        there = chosen[chosen < trace.prompt_length + step]
        if there.size:
            row = group_rows(trace, groups, step, [group])[0]
            full[step - 1] = row[there].sum()
            if evicting is not None:
                visible[step - 1] = row[there[evicting.visible(step)[there]]].sum()
        if progress is not None:
            progress(step, trace.num_steps)
    return Attended(tuple(chosen.tolist()), full, None if evicting is None else visible)


def shade(values: FloatArray) -> Shading:
    """Put attention on a scale of levels; see `Shading`.

    Parameters
    ----------
    values : array
        [n], by position, none negative. Values of 0, of positions that a query cannot see, do not shape the scale.
    """
    others = values[1:][values[1:] > 0]
    levels = np.zeros(values.size, dtype=np.uint8)
    if not others.size:
        levels[:1] = LEVELS * (values[:1] > 0)
        return Shading(levels, (), float(values[0]), 0)
    low, high = (float(np.quantile(others, share, method="nearest")) for share in (0.5, QUANTILE))
    edges = np.geomspace(low, high, LEVELS)
    # Rounding must not lift the last threshold above the value that it is.
    edges[-1] = high
    levels[:] = np.searchsorted(edges, values, side="right")
    levels[0] = LEVELS if values[0] >= high else levels[0]
    return Shading(levels, tuple(edges.tolist()), float(values[0]), int((others >= high).sum()))


def _source(trace: Trace, layer: int | None, fates: Fates | None) -> tuple[Groups, int]:
    """Give the layers and heads that are averaged, as a group and its number."""
    if layer is not None and not 0 <= layer < trace.num_layers:
        raise KvsimError(f"layer must be in 0..{trace.num_layers - 1}, got {layer}")
    if layer is None and fates is not None:
        return fates.groups, fates.group
    layers = trace.eligible_layers if layer is None else (layer,)
    return Groups("shared", layers, trace.num_heads, trace.num_kv_heads), 0


def _governed(fates: Fates) -> tuple[int, ...]:
    """Give the layers all of whose heads a group evicts for."""
    groups = fates.groups
    layers, _, _ = groups.members(fates.group)
    return groups.layers[layers] if groups.kind != "head" or groups.num_kv_heads == 1 else ()


def _checked(trace: Trace, positions: Sequence[int]) -> list[int]:
    found = sorted({int(position) for position in positions})
    if found and not 0 <= found[0] <= found[-1] < trace.num_positions:
        wrong = found[0] if found[0] < 0 else found[-1]
        raise KvsimError(f"position must be in 0..{trace.num_positions - 1}, got {wrong}")
    return found
