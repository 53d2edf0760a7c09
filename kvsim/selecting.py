"""Selection in replay: S_t from what an engine retained, and the metrics of what it reads."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from kvsim_traces import Trace

from kvsim.engines.outcome import Outcome
from kvsim.engines.output import output_error_of_step
from kvsim.plan import FloatArray, Plan, Selection

__all__ = ["page_bounds", "quest_marks", "selected", "topk_marks", "visible_of"]

BoolArray = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]


def selected(trace: Trace, plan: Plan, outcome: Outcome, *, raw: bool = True) -> Outcome:
    """Replace kept mass and output error by those of S_t, the positions read of V_t.

    Parameters
    ----------
    trace : Trace
        The recording, with attention of single heads.
    plan : Plan
        A plan with a selection.
    outcome : Outcome
        What an engine returned for it.
    raw : bool
        Whether output errors are wanted.

    Returns
    -------
    Outcome
        The retained sets are as they were.
    """
    selection, groups, layers = plan.selection, plan.groups, list(plan.groups.layers)
    assert selection is not None
    group_of = np.array([groups.of_layer(layer) for layer in range(len(layers))]).reshape(-1)
    share = groups.num_heads // groups.num_kv_heads
    by_head = replace(plan, groups=replace(groups, kind="head"))
    window = 0 if plan.admission is None else plan.admission.window
    keys = None
    if selection.kind == "quest":
        keys = np.stack([trace.keys(layer) for layer in layers]).reshape(len(group_of), trace.num_positions, -1)
    values = None
    if raw and trace.has("values"):
        values = np.stack([trace.values(layer) for layer in layers]).astype(np.float64)
    read, mass, errors = (np.full(trace.num_steps, np.nan) for _ in range(3))
    for t in range(1, trace.num_steps + 1):
        n = trace.prompt_length + t
        visible = visible_of(outcome, trace.prompt_length, t)[group_of]
        rows = trace.attention_rows(t, layers).astype(np.float64)
        if keys is None:
            means = rows.reshape(len(group_of), share, n).mean(axis=1)
            marks = topk_marks(means, visible, selection.tokens)
        else:
            queries = trace.queries(t)[layers].reshape(len(group_of), share, -1)
            marks = quest_marks(keys[:, :n], queries, visible, selection, window)
        read[t - 1] = marks.sum(axis=1).mean()
        of_heads = np.repeat(marks, share, axis=0).reshape(rows.shape)
        mass[t - 1] = np.where(of_heads, rows, 0).sum(axis=-1).mean()
        if values is not None:
            errors[t - 1] = output_error_of_step(rows, values[:, :, :n], marks, by_head)
    return replace(outcome, metrics={**outcome.metrics, "kept_mass": mass, "output_error": errors}, selected=read)


def visible_of(outcome: Outcome, prompt: int, t: int) -> BoolArray:
    """Mark V_t, [G, L0 + t]: what step t's queries could see, in either mode."""
    n = prompt + t
    if outcome.evicted_at is not None:
        gone = outcome.evicted_at[:, :n]
        return (gone < 0) | (gone >= t)
    assert outcome.retained is not None
    marks = np.ones((outcome.retained.shape[1], n), dtype=np.bool_)
    if t > 1:
        marks[:, :-1] = outcome.retained[t - 2, :, : n - 1]
    return marks


def topk_marks(means: FloatArray, visible: BoolArray, tokens: int) -> BoolArray:
    """Mark the `tokens` highest visible positions of each row of `means`, [heads, n], by float32 value.

    Among equal ones the highest positions are read; where fewer are visible, all of them.
    """
    ranked = np.where(visible, means, -1).astype(np.float32)
    order = np.argsort(ranked, axis=1, kind="stable")[:, -tokens:]
    marks = np.zeros(visible.shape, dtype=np.bool_)
    np.put_along_axis(marks, order, True, axis=1)
    return marks & visible


def quest_marks(keys: Floats, queries: Floats, visible: BoolArray, selection: Selection, window: int) -> BoolArray:
    """Mark what Quest reads.

    Parameters
    ----------
    keys : array
        [heads, n, d] post-RoPE keys of each KV head.
    queries : array
        [heads, query heads of a KV head, d].
    visible : array of bool
        [heads, n]; the last position is visible.
    selection : Selection
        Tokens and the size of a page.
    window : int
        Last positions that are read in any case and counted, 0 for the newest token's page.
    """
    n = visible.shape[1]
    paged = visible.copy()
    if window:
        paged[:, max(0, n - window) :] = False
    bounds, head, page = page_bounds(keys, queries, paged, selection.page)
    count = (selection.tokens - min(window, n)) // selection.page
    if not window:
        bounds[np.append(head[1:] != head[:-1], True)] = np.inf
    # Within a head from the highest bound down, the later page first among equal ones.
    order = np.lexsort((-np.arange(head.size), -bounds.astype(np.float32), head))
    first = np.searchsorted(head, head[order])
    chosen = np.zeros(head.size, dtype=np.bool_)
    chosen[order] = np.arange(head.size) - first < count
    marks = visible & ~paged
    marks[paged] = chosen[page]
    return marks


def page_bounds(
    keys: Floats, queries: Floats, paged: BoolArray, size: int
) -> tuple[FloatArray, npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Bound the logits of pages: ``max over query heads of sum over d of max(q_d min_d, q_d max_d)``.

    Parameters
    ----------
    keys, queries
        As for `quest_marks`.
    paged : array of bool
        [heads, n] the positions that pages are made of, `size` consecutive ones each; a head's last may be shorter.
    size : int
        Positions of a page.

    Returns
    -------
    bounds : array
        [pages] of all heads, in order of head and position; dot products are not scaled.
    head : array of int
        [pages] whose they are.
    page : array of int
        [positions] the page of each marked position, in order of head and position.
    """
    from kvsim.engines.cpu.pages import extremes

    counts = paged.sum(axis=1)
    pages = -(-counts // size)
    starts = np.cumsum(pages) - pages
    head = np.repeat(np.arange(len(counts)), pages)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    page = np.repeat(starts, counts) + within // size
    low, high = (np.empty((head.size, keys.shape[-1]), np.float32) for _ in range(2))
    extremes(keys, paged, starts, size, low, high)
    q = queries[head].astype(np.float64)
    bounds: FloatArray = np.maximum(q * low[:, None], q * high[:, None]).sum(axis=-1).max(axis=-1)
    return bounds, head, page
