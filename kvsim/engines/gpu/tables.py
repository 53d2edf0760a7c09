"""The arguments of the replay kernels for some plans of one variant: tables of numbers, state, answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kvsim_kernels.replay.kernel import FIELDS
from kvsim_traces import Trace

from kvsim.engines.gpu.rows import device
from kvsim.engines.gpu.variant import KINDS, Variant
from kvsim.plan import FloatArray, Plan
from kvsim.scoring import unit_vectors

__all__ = ["Tables", "bytes_of"]


@dataclass(frozen=True)
class Tables:
    """Arrays on the device, and the shape of a group; names are those of the kernels' arguments.

    Attributes
    ----------
    shape : dict
        ``depth``, ``heads``, ``kv_heads``, ``dim``: layers of a group, heads of one of its layers, size of a vector.
    given : dict of Tensor
        What the plans say.
    state : dict of Tensor
        Positions held, their state and work space, carried from launch to launch.
    answers : dict of Tensor
        ``evicted_at`` [N, L] and what is measured in each step, [N, T]; in shadow mode ``history`` [N, T, L].
    """

    shape: dict[str, int]
    given: dict[str, Any]
    state: dict[str, Any]
    answers: dict[str, Any]

    @classmethod
    def of(cls, trace: Trace, plans: Sequence[Plan], variant: Variant, *, shadow: bool) -> "Tables":
        """Upload plans of one variant, and make room for their state."""
        groups, steps, positions = plans[0].groups, trace.num_steps, trace.num_positions
        per_layer = 1 if trace.capture == "scores" else groups.num_heads
        share = groups.num_heads // groups.num_kv_heads
        kv_heads = 1 if groups.kind == "head" else groups.num_kv_heads
        heads = share if groups.kind == "head" else per_layer
        shape = {"depth": groups.depth, "heads": heads, "kv_heads": kv_heads, "dim": variant.dim}
        programs = len(plans) * groups.count

        table = np.zeros((len(plans), groups.count, len(FIELDS)), np.int64)
        column = {name: table[:, :, index] for index, name in enumerate(FIELDS)}
        for p, plan in enumerate(plans):
            column["budget"][p], column["n_sink"][p], column["n_recent"][p] = plan.budgets, plan.n_sink, plan.n_recent
            column["reset"][p], column["window"][p], column["pool"][p] = plan.reset, plan.window, plan.pool
            column["rescue"][p] = 0 if plan.rescue is None else plan.rescue
            column["local"][p] = 0 if plan.admission is None else plan.admission.window
        column["plan"][:] = np.arange(len(plans))[:, None]
        column["element"][:] = [
            (layers.start or 0) * per_layer + (head.start or 0)
            for layers, head, _ in map(groups.members, range(groups.count))
        ]
        a, b = _coefficients(plans, column)
        given = {
            "a": a,
            "b": b,
            "scored": np.stack([plan.scored for plan in plans]).view(np.uint8),
            "evicts": np.stack([plan.evicts for plan in plans]).view(np.uint8),
            "batch": np.repeat([plan.batch for plan in plans], groups.count),
            "source": _packed(column["source"], [_source(plan, variant) for plan in plans]),
            "queries": _packed(column["queries"], [_queries(plan, variant) for plan in plans]),
            "weight": _packed(column["weight"], [_weight(plan, variant) for plan in plans]),
            "ring": _packed(column["ring"], [_ring(plan, variant, positions) for plan in plans]),
            "admitted": _admitted(plans),
            "targets": _targets(plans),
            "programs": table,
        }
        uploaded = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device()) for name, array in given.items()}
        state = _state(plans, variant, programs, positions, shape, shadow)
        state["ring"] = uploaded.pop("ring")
        answers = _answers(programs, steps, positions, shadow)
        if variant.admitted:
            _resolve_prompt(plans, state, answers["evicted_at"])
        return cls(shape, uploaded, state, answers)


def bytes_of(trace: Trace, plan: Plan, variant: Variant, *, shadow: bool) -> int:
    """Estimate how much memory a plan takes on the device."""
    positions, steps, groups = trace.num_positions, trace.num_steps, plan.groups.count
    # pos, m, keys, evicted_at, and sets of one byte that are compared with raw ones.
    each = 32 + 8 * variant.layerwise + 8 * plan.window * variant.windowed + 9 * variant.rescued
    each += variant.admitted
    total = groups * (positions * (each + shadow * steps) + (32 + 4 * variant.targeted) * steps)
    for array in (plan.score.values, plan.score.queries, plan.score.weight):
        total += 0 if array is None else 8 * array.size
    return total


def _coefficients(plans: Sequence[Plan], column: dict[str, npt.NDArray[np.int64]]) -> tuple[FloatArray, FloatArray]:
    """Lay out a and b, layers padded to a multiple of 4 by ones that change nothing; once where steps are alike."""
    depth = plans[0].groups.depth
    width = -(-depth // 4) * 4
    parts: list[list[FloatArray]] = [[], []]
    offset = 0
    for p, plan in enumerate(plans):
        rows = 1 if _is_constant(plan.a) and _is_constant(plan.b) else plan.a.shape[0]
        for part, array, neutral in zip(parts, (plan.a, plan.b), (1.0, 0.0), strict=True):
            padded = np.full((rows, width), neutral)
            padded[:, :depth] = array[:rows]
            part.append(padded.ravel())
        column["coefficients"][p] = offset
        column["coefficient_step"][p] = width if rows > 1 else 0
        offset += rows * width
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def _is_constant(array: FloatArray) -> bool:
    return array.strides[0] == 0 or bool((array == array[:1]).all())


def _packed(offsets: npt.NDArray[np.int64], arrays: list[FloatArray | None]) -> FloatArray:
    """Put arrays [G, ...] one after the other and note where each group's begins."""
    found, start = [np.zeros(0)], 0
    for p, array in enumerate(arrays):
        if array is not None:
            each = array[0].size
            offsets[p] = start + np.arange(len(array)) * each
            start += array.size
            found.append(array.ravel())
    return np.concatenate(found)


def _source(plan: Plan, variant: Variant) -> FloatArray | None:
    """Give static scores [G, K, L], or vectors [G, K, Hk, L, d]."""
    if variant.kind == KINDS["attention"]:
        return None
    values = plan.score.values
    assert values is not None
    if variant.kind == KINDS["cosine"]:
        values = unit_vectors(values)
    own = [values[layers, kv] for layers, _, kv in map(plan.groups.members, range(plan.groups.count))]
    if variant.kind == KINDS["static"]:
        own = [part.max(axis=1) if plan.score.heads == "max" else part.mean(axis=1) for part in own]
    return np.stack(own)


def _queries(plan: Plan, variant: Variant) -> FloatArray | None:
    """Give the queries of each step, [G, T, K, Hk, d]."""
    if variant.kind != KINDS["bilinear"]:
        return None
    queries = plan.score.queries
    assert queries is not None
    return np.stack([queries[:, layers, kv] for layers, _, kv in map(plan.groups.members, range(plan.groups.count))])


def _weight(plan: Plan, variant: Variant) -> FloatArray | None:
    """Give the weights, [G, L, K, Hk]."""
    if not variant.weighted:
        return None
    weight = plan.score.weight
    assert weight is not None
    own = [weight[layers, kv] for layers, _, kv in map(plan.groups.members, range(plan.groups.count))]
    return np.stack([part.transpose(2, 0, 1) for part in own])


def _ring(plan: Plan, variant: Variant, positions: int) -> FloatArray | None:
    """Give the scores of the last steps, [G, W, L]."""
    if not variant.windowed:
        return None
    ring = np.zeros((plan.groups.count, plan.window, positions))
    if plan.ring is not None:
        ring[:, :, : plan.ring.shape[2]] = plan.ring
    return ring


def _admitted(plans: Sequence[Plan]) -> npt.NDArray[np.uint8]:
    """Say which positions stay when they leave the local window, [N, L]."""
    given = [plan.admission.admitted for plan in plans if plan.admission is not None]
    return np.concatenate(given).view(np.uint8) if given else np.zeros(0, np.uint8)


def _targets(plans: Sequence[Plan]) -> npt.NDArray[np.int32]:
    """Say how many positions stay after each step, [N, T + 1]."""
    given = [plan.targets for plan in plans if plan.targets is not None]
    return np.concatenate(given).astype(np.int32) if given else np.zeros(0, np.int32)


def _resolve_prompt(plans: Sequence[Plan], state: dict[str, Any], evicted_at: Any) -> None:
    """Leave out the prompt's positions that left the local window while it was read, and were not admitted."""
    program = 0
    for plan in plans:
        assert plan.admission is not None
        prompt = plan.m0.shape[1]
        outside = max(0, plan.admission.leaving(prompt, 0))
        for admitted in plan.admission.admitted:
            stays = torch.from_numpy(np.r_[admitted[:outside], np.ones(prompt - outside, np.bool_)]).to(device())
            kept = stays.nonzero().flatten()
            state["pos"][program, : kept.numel()] = kept.int()
            state["m"][program, : kept.numel()] = state["m"][program, kept]
            state["sizes"][program, 0] = kept.numel()
            evicted_at[program, :prompt][~stays] = 0
            program += 1


def _state(
    plans: Sequence[Plan], variant: Variant, programs: int, positions: int, shape: dict[str, int], shadow: bool
) -> dict[str, Any]:
    prompt = plans[0].m0.shape[1]
    depth, heads, kv_heads, dim = shape.values()
    m = torch.zeros((programs, positions), dtype=torch.float64, device=device())
    if any(plan.m0.any() for plan in plans):
        m[:, :prompt] = torch.from_numpy(np.concatenate([plan.m0 for plan in plans])).to(device())

    def room(width: int, dtype: Any, needed: bool = True) -> Any:
        return torch.zeros((programs if needed else 1, width), dtype=dtype, device=device())

    sizes = room(3, torch.int32)
    sizes[:, 0] = prompt
    return {
        "sizes": sizes,
        "pos": torch.arange(positions, dtype=torch.int32, device=device()).repeat(programs, 1),
        "m": m,
        "keys": room(positions, torch.int64),
        "s": room(positions, torch.float64, variant.layerwise),
        "factor": room(depth * heads, torch.float64),
        "share": room(depth * kv_heads + kv_heads * dim, torch.float64),
        "peak": room(positions, torch.float64, variant.rescued),
        "guard": room(positions, torch.uint8, variant.rescued),
        "member": room(positions, torch.uint8, shadow) + 1,
    }


def _answers(programs: int, steps: int, positions: int, shadow: bool) -> dict[str, Any]:
    def room(shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.zeros(shape, dtype=dtype, device=device())

    return {
        "evicted_at": room((programs, positions), torch.int32) - 1,
        "kept_mass": room((programs, steps), torch.float64),
        "ties": room((programs, steps), torch.int32),
        "retained": room((programs, steps), torch.int32),
        "both": room((programs if shadow else 1, steps), torch.int32),
        "history": room((programs, steps, positions) if shadow else (1, 1, 1), torch.uint8),
    }
