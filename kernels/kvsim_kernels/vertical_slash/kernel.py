"""Vertical-slash attention: a dense pass over the gathered admitted keys, then the local band, in one online softmax.

Admission is a property of a key, the same for all queries, so a tile of queries sees a prefix of its head's admitted
keys: up to `whole` all of its rows see them and nothing is masked, up to `end` some do. Of the band only the blocks at
its two edges are masked. Logits stay unscaled: the factor, times log2(e), is part of the exponent.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kvsim_kernels.decode_attention.kernel import capped
from kvsim_kernels.gather_admitted import Admitted
from kvsim_kernels.gather_admitted.kernel import gather_admitted
from kvsim_kernels.merge_partials.kernel import merge_partials
from kvsim_kernels.vertical_slash.reference import Attended, check

__all__ = ["Tiling", "default_tiling", "gather_admitted", "merge_partials", "seen_by_chunk", "vertical_slash"]

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_LANES = 256
_EDGE = 64
_REST = 128
_WIDE = 227 * 1024
_SCRATCH = 450_000_000


@dataclass(frozen=True)
class Tiling:
    """How the work is cut.

    Attributes
    ----------
    rows, columns : int
        Queries and keys of a tile.
    warps, stages : int
        Warps of a program, and blocks of keys and values in flight.
    pack : bool
        Whether query heads of a KV head share a tile, as many as the largest power of two that divides the group.
    descriptors : bool
        Whether the gathered keys and values are read through tensor descriptors (TMA).
    split : bool
        Whether the whole blocks of admitted keys have a launch of their own, which reads all through descriptors; the
        output is rounded in between. Where descriptors cannot read something, there is one launch.
    registers : int, optional
        Most registers of a thread.
    """

    rows: int = 128
    columns: int = 64
    warps: int = 8
    stages: int = 3
    pack: bool = True
    descriptors: bool = False
    split: bool = False
    registers: int | None = None


def default_tiling(query: torch.Tensor, admitted: Admitted) -> Tiling:
    """Choose a tiling for queries [H, L, d] and what is admitted.

    Two launches are the fastest where descriptors read everything and a multiprocessor has the shared memory for three
    blocks of 128 keys and values, as from Hopper on; Triton's interpreter has both.
    """
    if query.element_size() == 4:
        # 32-bit numbers are not multiplied by the matrix units: what a thread holds of a tile are its registers.
        return Tiling(rows=32, columns=32, warps=8, stages=1)
    if query.shape[-1] > 128:
        return Tiling(columns=32, stages=2)
    if _shared_memory(query.device) >= _WIDE and _can_describe(query, admitted.keys, admitted.values):
        return Tiling(split=True, columns=128, stages=3)
    return Tiling()


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Count the bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return _WIDE
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


def _can_describe(*tensors: torch.Tensor) -> bool:
    """Say whether tensor descriptors can read these: something is there, and addresses are multiples of 16 bytes."""
    return all(
        x.numel() > 0 and not any(at % 16 for at in (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1])))
        for x in tensors
    )


@triton.jit
def _count_up_to(positions, start, stop, limit, LANES: tl.constexpr):
    """Count the ascending positions of [start, stop) that are at most `limit`, a limit a lane."""
    low = tl.zeros([LANES], tl.int32) + start
    high = tl.zeros([LANES], tl.int32) + stop
    left = stop - start
    while left > 0:
        searching = low < high
        middle = (low + high) // 2
        below = tl.load(positions + middle, mask=searching, other=0) <= limit
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (low <= middle), middle, high)
        left = left // 2
    return low


@triton.jit(do_not_specialize=["window", "chunk", "length", "rows", "tiles"])
def _bounds(
    positions,
    starts,
    bounds,
    window,
    chunk,
    length,
    rows,
    tiles,
    SPAN: tl.constexpr,
    COARSE: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    head = tl.program_id(1)
    tile = tl.program_id(0) * LANES + tl.arange(0, LANES)
    start = tl.minimum(tl.load(starts + head), rows)
    stop = tl.minimum(tl.load(starts + head + 1), rows)
    first = tile * SPAN
    last = tl.minimum(first + SPAN, length) - 1
    begin = tl.zeros([LANES], tl.int32) + start
    if chunk is not None:
        begin = _count_up_to(positions, start, stop, first // chunk * chunk - window, LANES)
    whole = _count_up_to(positions, start, stop, first // COARSE * COARSE - window, LANES)
    whole = begin + tl.maximum(whole - begin, 0) // COLUMNS * COLUMNS
    end = _count_up_to(positions, start, stop, last - window, LANES)
    bounds += (head.to(tl.int64) * tiles + tile) * 3
    tl.store(bounds, begin, mask=tile < tiles)
    tl.store(bounds + 1, whole, mask=tile < tiles)
    tl.store(bounds + 2, end, mask=tile < tiles)


@triton.jit
def _absorb(q, k, v, seen, top, total, output, scale, softcap):
    """Take a block of keys [d, columns] and values [columns, d] into the softmax; `seen` is None if all is seen."""
    a = tl.dot(q, k, input_precision="ieee")
    factor = scale
    if softcap is not None:
        a = capped(a * scale, softcap)
        factor = 1.0
    factor = factor * _LOG2E
    if seen is not None:
        a = tl.where(seen, a, float("-inf"))
    higher = tl.maximum(top, tl.max(a, 1) * factor)
    base = higher
    if seen is not None:
        # Minus infinity less itself is no number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(a * factor - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(p, 1)
    output = tl.dot(p.to(v.dtype), v, output * fade[:, None], input_precision="ieee")
    return higher, total, output


@triton.jit
def _whole_blocks(
    q, keys, values, key_rows, value_rows, begin, whole, state, scale, softcap, dim, is_dim,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take in the admitted keys of the blocks that all rows see."""
    top, total, found = state
    if key_rows is not None:
        for at in tl.range(begin, whole, COLUMNS, num_stages=STAGES):
            k = key_rows.load([at, 0]).T
            v = value_rows.load([at, 0])
            top, total, found = _absorb(q, k, v, None, top, total, found, scale, softcap)
    else:
        column = tl.arange(0, COLUMNS)
        across, along = column[None, :] * DIM + dim[:, None], column[:, None] * DIM + dim[None, :]
        for at in tl.range(begin, whole, COLUMNS, num_stages=STAGES):
            skip = tl.cast(at, tl.int64) * DIM
            k = tl.load(keys + skip + across, mask=is_dim[:, None], other=0.0)
            v = tl.load(values + skip + along, mask=is_dim[None, :], other=0.0)
            top, total, found = _absorb(q, k, v, None, top, total, found, scale, softcap)
    return top, total, found


@triton.jit
def _last_admitted(
    q, keys, values, positions, row, whole, end, state, scale, softcap, window, dim, is_dim,
    DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Take in the admitted keys that only some rows see."""
    top, total, found = state
    column = tl.arange(0, COLUMNS)
    for at in tl.range(whole, end, COLUMNS, num_stages=1):
        place = at + column
        inside = place < end
        position = tl.load(positions + place, mask=inside, other=0)
        seen = inside[None, :] & (position[None, :] <= row[:, None] - window)
        far = place.to(tl.int64) * DIM
        k = tl.load(keys + far[None, :] + dim[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(values + far[:, None] + dim[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        top, total, found = _absorb(q, k, v, seen, top, total, found, scale, softcap)
    return top, total, found


@triton.jit
def _band(
    q, key, value, stride_key, stride_value, row, first, stop, state, scale, softcap, window, dim, is_dim,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take in the local band of the rows [first, stop)."""
    top, total, found = state
    column = tl.arange(0, COLUMNS)
    across = column[None, :] * stride_key + dim[:, None]
    along = column[:, None] * stride_value + dim[None, :]
    # Blocks of [low, full) and of [rest, stop) are seen in part, those between in whole.
    low = tl.maximum(first - window + 1, 0) // COLUMNS * COLUMNS
    full = tl.cdiv(tl.maximum(stop - window, 0), COLUMNS) * COLUMNS
    rest = tl.maximum((first + 1) // COLUMNS * COLUMNS, full)
    before = (full - low) // COLUMNS
    for block in tl.range(0, before + tl.cdiv(tl.maximum(stop - rest, 0), COLUMNS), num_stages=1):
        at = tl.where(block < before, low + block * COLUMNS, rest + (block - before) * COLUMNS)
        inside = at + column < stop
        behind = row[:, None] - (at + column)[None, :]
        seen = inside[None, :] & (behind >= 0) & (behind < window)
        far = at.to(tl.int64)
        k = tl.load(key + far * stride_key + across, mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(value + far * stride_value + along, mask=inside[:, None] & is_dim[None, :], other=0.0)
        top, total, found = _absorb(q, k, v, seen, top, total, found, scale, softcap)
    for at in tl.range(full, rest, COLUMNS, num_stages=STAGES):
        far = tl.cast(at, tl.int64)
        k = tl.load(key + far * stride_key + across, mask=is_dim[:, None], other=0.0)
        v = tl.load(value + far * stride_value + along, mask=is_dim[None, :], other=0.0)
        top, total, found = _absorb(q, k, v, None, top, total, found, scale, softcap)
    return top, total, found


@triton.jit(do_not_specialize=["tiles", "first_head", "first_row", "stop_row", "held"])
def _attend_whole(
    query_rows,
    key_rows,
    value_rows,
    bounds,
    output,
    lse,
    scale,
    softcap,
    tiles,
    first_head,
    first_row,
    stop_row,
    held,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Let a piece's queries attend to the whole blocks of admitted keys alone, in an output that holds the piece."""
    # The tiles with most keys come first, those of the heads that read the same keys side by side.
    tile, lane = tl.cdiv(stop_row, ROWS) - 1 - tl.program_id(0) // GROUP, tl.program_id(0) % GROUP
    kv_head = first_head + tl.program_id(1)
    q = query_rows.load([kv_head * GROUP + lane, tile * ROWS, 0]).reshape([ROWS, WIDTH])
    bounds += (kv_head.to(tl.int64) * tiles + tile) * 3
    begin, whole = tl.load(bounds), tl.load(bounds + 1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in tl.range(begin, whole, COLUMNS, num_stages=STAGES):
        k = key_rows.load([at, 0])
        v = value_rows.load([at, 0])
        top, total, found = _absorb(q, k.T, v, None, top, total, found, scale, softcap)
    total = tl.where(total > 0, total, 1.0)
    found = found / total[:, None]
    row, dim = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    place = (tl.program_id(1) * GROUP + lane).to(tl.int64) * held + (row - first_row)
    known = (row < stop_row)[:, None] & (dim < DIM)[None, :]
    tl.store(output + place[:, None] * DIM + dim[None, :], found.to(output.dtype.element_ty), mask=known)
    tl.store(lse + place, (top + tl.log2(total)) * _LN2, mask=row < stop_row)


@triton.jit(do_not_specialize=["window", "length", "tiles", "first_head", "first_row", "stop_row", "held"])
def _attend(
    query,
    key,
    value,
    key_rows,
    value_rows,
    admitted_keys,
    admitted_values,
    positions,
    bounds,
    part,
    part_lse,
    output,
    lse,
    scale,
    softcap,
    window,
    length,
    tiles,
    first_head,
    first_row,
    stop_row,
    held,
    stride_query_head,
    stride_query,
    stride_key_head,
    stride_key,
    stride_value_head,
    stride_value,
    RESUME: tl.constexpr,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EDGE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend with a tile of a piece's queries; `RESUME` takes up what `_attend_whole` left in `part` and `part_lse`.

    A program alone reads the queries, and what it takes up, whose place it writes: `output` may be either.
    """
    SPAN: tl.constexpr = ROWS // PACK
    BUNDLES: tl.constexpr = GROUP // PACK
    # The tiles with most keys come first, those of the heads that read the same keys side by side.
    tile = tl.cdiv(stop_row, SPAN) - 1 - tl.program_id(0) // BUNDLES
    kv_head = (first_head + tl.program_id(1)).to(tl.int64)
    lane, dim = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    row = tile * SPAN + lane // PACK
    head = kv_head * GROUP + tl.program_id(0) % BUNDLES * PACK + lane % PACK
    # Where the width is the dimension the compiler drops the mask.
    is_row, is_dim = row < stop_row, dim < DIM
    known = is_row[:, None] & is_dim[None, :]
    q = tl.load(
        query + (head * stride_query_head + row.to(tl.int64) * stride_query)[:, None] + dim[None, :],
        mask=known,
        other=0.0,
    )
    place = head * length + row
    bounds += (kv_head * tiles + tile) * 3
    begin, whole, end = tl.load(bounds), tl.load(bounds + 1), tl.load(bounds + 2)
    if RESUME:
        left = (head - first_head * GROUP) * held + (row - first_row)
        top = tl.load(part_lse + left, mask=is_row, other=float("-inf")) * _LOG2E
        total = tl.where(top > float("-inf"), 1.0, 0.0)
        found = tl.load(part + left[:, None] * DIM + dim[None, :], mask=known, other=0.0).to(tl.float32)
    else:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, WIDTH], tl.float32)
        top, total, found = _whole_blocks(
            q, admitted_keys, admitted_values, key_rows, value_rows, begin, whole, (top, total, found), scale, softcap,
            dim, is_dim, DIM, COLUMNS, STAGES,
        )  # fmt: skip
    top, total, found = _last_admitted(
        q, admitted_keys, admitted_values, positions, row, whole, end, (top, total, found), scale, softcap, window,
        dim, is_dim, DIM, EDGE,
    )  # fmt: skip
    top, total, found = _band(
        q, key + kv_head * stride_key_head, value + kv_head * stride_value_head, stride_key, stride_value, row,
        tile * SPAN, tl.minimum(tile * SPAN + SPAN, stop_row), (top, total, found), scale, softcap, window,
        dim, is_dim, EDGE, STAGES,
    )  # fmt: skip
    # Every query sees itself; rows beyond the last may see nothing.
    total = tl.where(total > 0, total, 1.0)
    found = found / total[:, None]
    tl.store(output + place[:, None] * DIM + dim[None, :], found.to(output.dtype.element_ty), mask=known)
    if lse is not None:
        tl.store(lse + place, (top + tl.log2(total)) * _LN2, mask=is_row)


def _find_bounds(
    admitted: Admitted, length: int, window: int, chunk: int | None, span: int, coarse: int, columns: int
) -> torch.Tensor:
    """Find for each tile of `span` queries which rows of the admitted keys it sees, int32 [Hk, tiles, 3].

    From the first row to the second there are whole blocks of `columns` rows, seen by all of the `coarse` queries the
    tile lies among, and from there to the third rows that some of its queries see.
    """
    kv_heads, tiles = len(admitted.starts) - 1, triton.cdiv(length, span)
    bounds = torch.empty(kv_heads, tiles, 3, dtype=torch.int32, device=admitted.starts.device)
    _bounds[(triton.cdiv(tiles, _LANES), kv_heads)](
        admitted.positions, admitted.starts, bounds, window, chunk, length, len(admitted.positions), tiles,
        SPAN=span, COARSE=coarse, COLUMNS=columns, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    return bounds


def seen_by_chunk(admitted: Admitted, length: int, *, window: int, chunk: int) -> torch.Tensor:
    """Count the admitted keys that all queries of a chunk see and `vertical_slash` with this `chunk` leaves out.

    Returns
    -------
    Tensor [Hk, ceil(length / chunk)] int32
        They are each head's first ones, at or before position ``chunk * c - window``.
    """
    return _find_bounds(admitted, length, window, None, chunk, chunk, 1)[..., 1] - admitted.starts[:-1, None]


def _piece(kv_heads: int, length: int, rows: int, size: int) -> tuple[int, int]:
    """Choose how many KV heads, and how many queries of each, two launches take before the next two do.

    They are as many heads as fit `_SCRATCH` bytes, or of a head that alone does not fit as many tiles of `rows`
    queries; pieces are equal. Of a KV head, a query holds `size` bytes.
    """

    def equal(count: int, most: int) -> int:
        return int(triton.cdiv(count, triton.cdiv(count, max(1, most))))

    if length * size <= _SCRATCH:
        return equal(kv_heads, _SCRATCH // (length * size)), length
    return 1, min(length, equal(triton.cdiv(length, rows), _SCRATCH // (rows * size)) * rows)


def vertical_slash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    admitted: Admitted,
    *,
    window: int,
    scaling: float | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor | Attended:
    """Attend to a local window and the admitted keys before it.

    See `kvsim_kernels.vertical_slash.reference.vertical_slash_reference`. Products are taken in the type of the keys
    and summed in float32, and the weights are rounded to the type of the values before the second product. What is
    admitted is read by the GPU only.

    Parameters
    ----------
    query, key, value, window, scaling, softcap
        As in the reference; the three share a type, and their last dimension is contiguous.
    admitted : Admitted
        From `gather_admitted` of the same key and value.
    chunk : int, optional
        Leave out the admitted keys at or before ``(i // chunk) * chunk - window``, the first `seen_by_chunk` ones of
        each head, so that another kernel can take them without any mask; a multiple of the queries of a tile.
    return_lse : bool
        Give the log-sum-exp as well, for `merge_partials`.
    out : Tensor [H, L, d], optional
        Where to write; contiguous. It may be the query: two launches then go over KV heads, or parts of the queries
        of one, in turn, with at most 450 MB for what is between them.
    tiling : Tiling, optional
        How the work is cut; `default_tiling` chooses by default.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    group = check(query, key, value, window, scaling)
    if any(x.dtype != query.dtype for x in (key, value, admitted.keys, admitted.values)):
        raise ValueError(f"queries, keys and values must share a type, got {query.dtype}, {key.dtype}, {value.dtype}")
    if any(x.stride(-1) != 1 for x in (query, key, value)) or not admitted.keys.is_contiguous():
        raise ValueError("what is admitted and the last dimension of query, key and value must be contiguous")
    heads, length, dim = query.shape
    if len(admitted.starts) != key.shape[0] + 1 or admitted.keys.shape[-1] != dim:
        raise ValueError(f"what {len(admitted.starts) - 1} KV heads admit does not fit {key.shape[0]} of d={dim}")
    tiling = default_tiling(query, admitted) if tiling is None else tiling
    tile = min(tiling.rows, _REST) if tiling.split else tiling.rows
    pack = min(group & -group, max(1, tile // 8)) if tiling.pack else 1
    span = tile // pack
    step = tiling.rows if tiling.split else span
    if chunk is not None and (chunk < 1 or chunk % step):
        raise ValueError(f"chunk={chunk} must be a multiple of {step}, the queries of a tile")
    place = {"dtype": query.dtype, "device": query.device}
    out = torch.empty(heads, length, dim, **place) if out is None else out
    is_over = out.data_ptr() == query.data_ptr()
    if out.shape != query.shape or not out.is_contiguous() or (is_over and not query.is_contiguous()):
        raise ValueError(f"out must be contiguous, of shape {tuple(query.shape)}; so must a query that it overwrites")
    described = (tiling.descriptors or tiling.split) and _can_describe(admitted.keys, admitted.values)
    split = tiling.split and described and _can_describe(query)
    many_heads, many_rows, part = heads // group, length, out
    if split and is_over:
        many_heads, many_rows = _piece(heads // group, length, tiling.rows, group * (dim * query.element_size() + 4))
        part = torch.empty(many_heads * group, many_rows, dim, **place)
    lse = torch.empty(heads, length, dtype=torch.float32, device=query.device) if return_lse else None
    part_lse = lse
    if split and (lse is None or is_over):
        part_lse = torch.empty(part.shape[:2], dtype=torch.float32, device=query.device)
    width = max(16, triton.next_power_of_2(dim))
    rows = [
        TensorDescriptor.from_tensor(x, [tiling.columns, width]) if described else None
        for x in (admitted.keys, admitted.values)
    ]
    factor = float(dim**-0.5 if scaling is None else scaling)
    options = {"GROUP": group, "DIM": dim, "WIDTH": width, "COLUMNS": tiling.columns, "num_stages": tiling.stages}
    more = {} if tiling.registers is None else {"maxnreg": tiling.registers}
    bounds = _find_bounds(admitted, length, window, chunk, span, tiling.rows if split else span, tiling.columns)
    whole = query_rows = None
    if split:
        whole = _find_bounds(admitted, length, window, chunk, tiling.rows, tiling.rows, tiling.columns)
        query_rows = TensorDescriptor.from_tensor(query, [1, tiling.rows, width])
    for first_head, first_row in itertools.product(range(0, heads // group, many_heads), range(0, length, many_rows)):
        stop_row, own_heads = min(length, first_row + many_rows), min(many_heads, heads // group - first_head)
        piece = first_head, first_row, stop_row, part.shape[1]
        if whole is not None:
            _attend_whole[(triton.cdiv(stop_row - first_row, tiling.rows) * group, own_heads)](
                query_rows, *rows, whole, part, part_lse, factor, softcap, whole.shape[1], *piece, ROWS=tiling.rows,
                STAGES=tiling.stages, num_warps=tiling.warps, **options, **more,
            )  # fmt: skip
        _attend[(triton.cdiv(stop_row - first_row, span) * (group // pack), own_heads)](
            query, key, value, *rows, admitted.keys, admitted.values, admitted.positions, bounds, part, part_lse, out,
            lse, factor, softcap, window, length, bounds.shape[1], *piece, *query.stride()[:2], *key.stride()[:2],
            *value.stride()[:2], RESUME=split, PACK=pack, ROWS=tile, EDGE=min(tiling.columns, _EDGE),
            STAGES=tiling.stages, num_warps=tile // 16 if split else tiling.warps, **options, **({} if split else more),
        )  # fmt: skip
    return Attended(out, lse) if lse is not None else out
