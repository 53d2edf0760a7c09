"""What each layer and KV head keeps and could still see, and how its attention divides over parts of the context.

>>> import kvsim
>>> from kvsim.heads import by_head
>>> trace = kvsim.open_trace("traces/samples/smollm2-needle-512")  # doctest: +SKIP
>>> by_head(kvsim.replay_many(trace, ["nonuniform/score=knorm/group=head"]), trace).rows()  # doctest: +SKIP
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kvsim_traces import Trace

from kvsim.engines.outcome import Progress
from kvsim.errors import KvsimError
from kvsim.held import held_counts, seen
from kvsim.plan import FloatArray
from kvsim.result import Result

__all__ = ["N_RECENT", "N_SINK", "PARTS", "ByHead", "by_head", "kept_fraction", "size_rows"]

N_SINK, N_RECENT = 4, 64
"""Positions counted as sinks and as recent ones."""

PARTS = ("sink", "prompt", "rest", "recent")
"""Parts of the context: the first positions; the last up to the query's own; the prompt and what was generated between
them. A position in several of them is a sink first, then recent."""


@dataclass(frozen=True)
class ByHead:
    """Kept fraction and kept mass of policies by layer and KV head, and where the attention goes.

    Attributes
    ----------
    trace_name, trace_hash, mode : str
        The recording, and the mode of the replays.
    layers : tuple of int
        The K eligible layers, by their numbers in the recording.
    heads_known : bool
        Whether the recording has single heads; if not, there is one column, the mean over heads.
    policies : tuple of str
        P canonical policies with their budgets.
    kept_fraction : array
        [P, T, K, Hk] see `kept_fraction`.
    kept_mass : array
        [P, T, K, Hk] attention to V_t, averaged over the query heads that read the KV head: what step t's queries of
        that layer and head could still see. Its mean over layers and heads is the metric of that name.
    attention : array
        [T, K, Hk, 4] the full cache's attention to each of `PARTS`, averaged likewise. Rows sum to 1, or to less in a
        model whose softmax has a sink logit.
    n_sink, n_recent : int
        Sizes of the parts.
    """

    trace_name: str
    trace_hash: str
    mode: str
    layers: tuple[int, ...]
    heads_known: bool
    policies: tuple[str, ...]
    kept_fraction: FloatArray = field(repr=False)
    kept_mass: FloatArray = field(repr=False)
    attention: FloatArray = field(repr=False)
    n_sink: int = N_SINK
    n_recent: int = N_RECENT

    def rows(self, step: int | None = None) -> list[dict[str, Any]]:
        """Give one row a policy, layer and KV head, at a step or averaged over steps.

        Parameters
        ----------
        step : int, optional
            From 1; the mean over all steps by default.

        Returns
        -------
        list of dict
            ``trace``, ``trace_hash``, ``policy``, ``mode``, ``step`` (None for the mean), ``layer``, ``head`` (None
            where the recording has none), ``kept_fraction``, ``kept_mass``.

        Raises
        ------
        KvsimError
            If there is no such step.
        """
        fraction, mass = (self._at(values, step, 1) for values in (self.kept_fraction, self.kept_mass))
        common = {"trace": self.trace_name, "trace_hash": self.trace_hash}
        return [
            {
                **common,
                "policy": policy,
                "mode": self.mode,
                "step": step,
                "layer": layer,
                "head": head if self.heads_known else None,
                "kept_fraction": float(fraction[p, k, head]),
                "kept_mass": float(mass[p, k, head]),
            }
            for p, policy in enumerate(self.policies)
            for k, layer in enumerate(self.layers)
            for head in range(fraction.shape[2])
        ]

    def part_rows(self, step: int | None = None) -> list[dict[str, Any]]:
        """Give one row a layer and part of the context, averaged over heads; `step` and errors as for `rows`.

        Returns
        -------
        list of dict
            ``trace``, ``trace_hash``, ``step``, ``layer``, ``part`` (of `PARTS`), ``attention``, ``n_sink``,
            ``n_recent``.
        """
        mean = self._at(self.attention, step, 0).mean(axis=1)
        common = {"trace": self.trace_name, "trace_hash": self.trace_hash, "step": step}
        sizes = {"n_sink": self.n_sink, "n_recent": self.n_recent}
        return [
            {**common, "layer": layer, "part": part, "attention": float(mean[k, place]), **sizes}
            for k, layer in enumerate(self.layers)
            for place, part in enumerate(PARTS)
        ]

    def _at(self, values: FloatArray, step: int | None, axis: int) -> FloatArray:
        if step is None:
            mean: FloatArray = values.mean(axis=axis)
            return mean
        steps = values.shape[axis]
        if not 1 <= step <= steps:
            raise KvsimError(f"{self.trace_name}: step must be from 1 to {steps}, got {step}")
        one: FloatArray = np.take(values, [step - 1], axis=axis).squeeze(axis)
        return one


def kept_fraction(result: Result) -> FloatArray:
    """Give ``|R_t| / (L0 + t)`` of each layer and KV head: its cache over that of a head that keeps everything.

    WG-KV (Fig. 13) shows it by layer and head. Groups of equal budgets keep equal fractions.

    Returns
    -------
    array
        [T, K, Hk].
    """
    groups = result.plan.groups
    lengths = result.prompt_length + np.arange(1, result.num_steps + 1)
    fraction = held_counts(result) / lengths[:, None]
    return fraction[:, [groups.of_layer(k) for k in range(len(groups.layers))]]


def size_rows(result: Result, step: int | None = None) -> list[dict[str, Any]]:
    """Give one row a layer and KV head: its `kept_fraction` alone, for which no attention is read.

    Parameters
    ----------
    result : Result
        Of either mode.
    step : int, optional
        From 1; the mean over all steps by default.

    Returns
    -------
    list of dict
        ``trace``, ``trace_hash``, ``policy``, ``mode``, ``step``, ``layer``, ``head``, ``kept_fraction``.

    Raises
    ------
    KvsimError
        If there is no such step.
    """
    if step is not None and not 1 <= step <= result.num_steps:
        raise KvsimError(f"{result.trace_name}: step must be from 1 to {result.num_steps}, got {step}")
    every = kept_fraction(result)
    fraction = every.mean(axis=0) if step is None else every[step - 1]
    common = {"trace": result.trace_name, "trace_hash": result.trace_hash, "policy": result.policy}
    return [
        {**common, "mode": result.mode, "step": step, "layer": layer, "head": head, "kept_fraction": float(value)}
        for layer, values in zip(result.plan.groups.layers, fraction, strict=True)
        for head, value in enumerate(values)
    ]


def by_head(
    results: Sequence[Result],
    trace: Trace,
    *,
    n_sink: int = N_SINK,
    n_recent: int = N_RECENT,
    progress: Progress | None = None,
) -> ByHead:
    """Work out kept fraction, kept mass and the parts of the attention by layer and KV head, in one pass over the rows.

    Rows are read a layer at a time: memory is that of one layer's row, and of one set a group and result.

    Parameters
    ----------
    results : sequence of Result
        Open-loop replays of the recording, all of one mode; any groups.
    trace : Trace
        The recording.
    n_sink, n_recent : int
        How many of the first and of the last positions count as sinks and as recent.
    progress : callable, optional
        Called with (steps done, steps in all).

    Returns
    -------
    ByHead

    Raises
    ------
    KvsimError
        If there is no result, one is of another recording, another loop or another mode than the first, or a size is
        negative.
    """
    results = list(results)
    _check(results, trace, n_sink, n_recent)
    layers, heads_known = trace.eligible_layers, trace.capture != "scores"
    columns = trace.num_kv_heads if heads_known else 1
    shape = trace.num_steps, len(layers), columns
    mass, attention = np.empty((len(results), *shape)), np.empty((*shape, len(PARTS)))
    members = [[result.plan.groups.of_layer(k)[:columns] for k in range(len(layers))] for result in results]
    for t in range(1, trace.num_steps + 1):
        n = trace.prompt_length + t
        sets = [seen(result, t)[:, :n] for result in results]
        edges = _edges(n, trace.prompt_length, n_sink, n_recent)
        for k, layer in enumerate(layers):
            if heads_known:
                rows = trace.attention_rows(t, [layer])[0].reshape(columns, -1, n).mean(axis=1, dtype=np.float64)
            else:
                rows = trace.score_rows(t, [layer]).astype(np.float64)
            for place, (start, end) in enumerate(edges):
                attention[t - 1, k, :, place] = rows[:, start:end].sum(axis=1)
            for p, marks in enumerate(sets):
                mass[p, t - 1, k] = np.where(marks[members[p][k]], rows, 0).sum(axis=1)
        if progress is not None:
            progress(t, trace.num_steps)
    fractions = np.stack([kept_fraction(result)[..., :columns] for result in results])
    names = tuple(result.policy for result in results)
    first = results[0]
    return ByHead(
        trace_name=first.trace_name,
        trace_hash=first.trace_hash,
        mode=first.mode,
        layers=layers,
        heads_known=heads_known,
        policies=names,
        kept_fraction=fractions,
        kept_mass=mass,
        attention=attention,
        n_sink=n_sink,
        n_recent=n_recent,
    )


def _edges(n: int, prompt: int, n_sink: int, n_recent: int) -> list[tuple[int, int]]:
    """Give the spans of `PARTS` among n positions."""
    sink = min(n_sink, n)
    recent = max(sink, n - n_recent)
    return [(0, sink), (sink, min(max(sink, prompt), recent)), (min(max(sink, prompt), recent), recent), (recent, n)]


def _check(results: list[Result], trace: Trace, n_sink: int, n_recent: int) -> None:
    if not results:
        raise KvsimError("name at least one policy")
    if n_sink < 0 or n_recent < 0:
        raise KvsimError(f"numbers of sinks and of recent positions must be at least 0, got {n_sink} and {n_recent}")
    for result in results:
        if result.trace_hash != trace.hash:
            raise KvsimError(f"{result.policy}: is a replay of {result.trace_name}, not of {trace.path}")
        if result.loop != "open":
            raise KvsimError(f"{result.policy}: is a {result.loop}-loop result; the recording's rows are not its own")
        if result.mode != results[0].mode:
            raise KvsimError(f"{result.policy} is {result.mode}, {results[0].policy} {results[0].mode}: give one mode")
