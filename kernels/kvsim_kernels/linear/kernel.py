"""A linear layer with its normalisation, gate and residual in one pass over the weights.

A single vector is multiplied element by element: a program has a few rows of the weight, every thread 16 bytes of each
at a time, and sums over threads once, at the end. Several vectors go through the tensor cores, and where the output is
small the programs share its rows' columns and a second launch adds up; with a normalisation PyTorch is faster.
"""

import math

import torch
import triton
import triton.language as tl

from kvsim_kernels.launch import early_launch, multiprocessors
from kvsim_kernels.linear.reference import check

__all__ = ["linear", "row_plan"]

_THREADS = 128
_LINE_BYTES = 128
_REGISTERS = 65536
# Rows of a program, and programs that a multiprocessor holds at a time. So many registers each of them can have without
# spilling more than a few bytes (Triton 3.6, sm_90); what comes first is as good as the next within 3%.
_PLAIN = ((4, 8), (4, 7), (2, 9), (2, 10))
_NORMED = ((4, 6), (2, 8), (2, 9))
_GATED = ((2, 5), (2, 6))
_PREFERENCE = 0.03
_TILE_ROWS = 64
_TILE_BYTES = 256
_MOST_VECTORS = 16


@triton.jit
def _finish(y, up, bias, up_bias, residual, out, at, row, mask):
    """Add biases, gate, add the residual, store."""
    if bias is not None:
        y += tl.load(bias + row, mask=mask, other=0.0).to(tl.float32)
    if up is not None:
        if up_bias is not None:
            up += tl.load(up_bias + row, mask=mask, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(y) * up
    if residual is not None:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _prefetch(row, LINES: tl.constexpr, LINE: tl.constexpr):
    """Have the second-level cache read the first lines of some rows."""
    at = row + (tl.arange(0, LINES) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _vector(
    x,
    weight,
    norm_weight,
    bias,
    up_weight,
    up_bias,
    residual,
    out,
    eps,
    height,
    stride_weight,
    stride_up,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LINES: tl.constexpr,
    LINE: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < height
    # Rows beyond the last read the last one.
    place = tl.minimum(row, height - 1).to(tl.int64)[:, None]
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        # Weights wait for nobody.
        if LINES > 0:
            _prefetch(weight + place * stride_weight, LINES, LINE)
            if up_weight is not None:
                _prefetch(up_weight + place * stride_up, LINES, LINE)
        tl.extra.cuda.gdc_wait()
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    up_sums = tl.zeros([ROWS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, WIDTH, BLOCK, loop_unroll_factor=2):
        column = first + lane
        inside = column < WIDTH
        # Weights are read once and pass by the first-level cache, where the vector stays.
        w = tl.load(
            weight + place * stride_weight + column[None, :],
            mask=inside[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if norm_weight is not None:
            squares += v * v
            v *= tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * v[None, :]
        if up_weight is not None:
            u = tl.load(
                up_weight + place * stride_up + column[None, :],
                mask=inside[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            up_sums += u.to(tl.float32) * v[None, :]
    y = tl.sum(sums, 1)
    up = None
    if up_weight is not None:
        up = tl.sum(up_sums, 1)
    if norm_weight is not None:
        scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
        y *= scale
        if up_weight is not None:
            up *= scale
    _finish(y, up, bias, up_bias, residual, out, row, row, is_row)


@triton.jit
def _matrix(
    x,
    weight,
    bias,
    up_weight,
    up_bias,
    residual,
    out,
    parts,
    batch,
    height,
    stride_x,
    stride_weight,
    stride_up,
    WIDTH: tl.constexpr,
    VECTORS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    vector, lane = tl.arange(0, VECTORS), tl.arange(0, BLOCK)
    is_row, is_vector = row < height, vector < batch
    place = tl.minimum(row, height - 1).to(tl.int64)[None, :]
    x += vector[:, None] * stride_x
    share = tl.cdiv(tl.cdiv(WIDTH, BLOCK), SPLITS) * BLOCK
    sums = tl.zeros([VECTORS, ROWS], tl.float32)
    up_sums = tl.zeros([VECTORS, ROWS], tl.float32)
    for first in tl.range(split * share, tl.minimum(split * share + share, WIDTH), BLOCK):
        column = first + lane
        inside = column < WIDTH
        v = tl.load(x + column[None, :], mask=is_vector[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight + place * stride_weight + column[:, None], mask=inside[:, None], other=0.0)
        sums = tl.dot(v, w, sums, input_precision="ieee")
        if up_weight is not None:
            u = tl.load(up_weight + place * stride_up + column[:, None], mask=inside[:, None], other=0.0)
            up_sums = tl.dot(v, u, up_sums, input_precision="ieee")
    mask = is_vector[:, None] & is_row[None, :]
    at = vector[:, None] * height + row[None, :]
    if parts is not None:
        parts += split * batch * height
        tl.store(parts + at, sums, mask=mask)
        if up_weight is not None:
            tl.store(parts + SPLITS * batch * height + at, up_sums, mask=mask)
    else:
        _finish(
            sums, up_sums if up_weight is not None else None, bias, up_bias, residual, out, at,
            tl.broadcast_to(row[None, :], [VECTORS, ROWS]), mask,
        )  # fmt: skip


@triton.jit
def _add_up(
    parts,
    bias,
    up_bias,
    residual,
    out,
    size,
    height,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS_2)
    mask = at < size
    part = parts + split[:, None] * size + at[None, :]
    known = (split < SPLITS)[:, None] & mask[None, :]
    y = tl.sum(tl.load(part, mask=known, other=0.0), 0)
    up = None
    if GATED:
        up = tl.sum(tl.load(part + SPLITS * size, mask=known, other=0.0), 0)
    _finish(y, up, bias, up_bias, residual, out, at, at % height, mask)


def split_count(programs: int, blocks: int, device: torch.device) -> int:
    """Choose how many programs share rows: two for each multiprocessor in all, four blocks of columns each at least."""
    return max(1, min(2 * multiprocessors(device) // programs, blocks // 4, 32))


def row_plan(height: int, kind: str, device: torch.device) -> tuple[int, int]:
    """Choose rows of a program and programs of a multiprocessor, so that the last wave of programs is a full one.

    Parameters
    ----------
    height : int
        Rows of the weight.
    kind : {"plain", "normed", "gated"}
    device : torch.device
    """
    plans = {"plain": _PLAIN, "normed": _NORMED, "gated": _GATED}[kind]

    def cost(index: int) -> float:
        rows, resident = plans[index]
        waves = triton.cdiv(height, rows) / (resident * multiprocessors(device))
        return float(math.ceil(waves) / waves) + _PREFERENCE * index

    return plans[min(range(len(plans)), key=cost)]


def _lines(rows: int, row_bytes: int) -> int:
    """Count the lines of each row that a program asks for early: one a thread, a power of 2, none beyond the row."""
    fit = min(_THREADS // rows, row_bytes // _LINE_BYTES)
    return 2 ** (fit.bit_length() - 1) if fit else 0


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    bias: torch.Tensor | None = None,
    up_weight: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    plan: tuple[int, int | None] | None = None,
) -> torch.Tensor:
    """Multiply by a weight; see `kvsim_kernels.linear.reference.linear`.

    Everything is summed in float32 and rounded once, at the end. More than one vector with a normalisation is left to
    PyTorch, which rounds after each of its operations: for 4 vectors, 8B models' shapes and an H200 it takes 63% to 87%
    of the time that a kernel with the normalisation in it took; without one the kernel takes 85% to 95% of PyTorch's.

    Parameters
    ----------
    x, weight, norm_weight, eps, bias, up_weight, up_bias, residual
        As in the reference, for up to 16 vectors; x and the weights share a type, and rows are contiguous.
    out : Tensor [batch, out], optional
        Where to write, in its own type; contiguous. It may be `residual`.
    splits : int, optional
        Programs that share rows of the weight, for more than one vector; chosen for the GPU by default.
    plan : (int, int or None), optional
        Rows of a program (a power of 2), and how many programs a multiprocessor shall hold (None: what the compiler
        makes possible), for a single vector; `row_plan` by default.

    Raises
    ------
    ValueError
        If shapes or types do not fit.
    """
    check(x, weight, norm_weight, bias, up_weight, up_bias, residual)
    batch, width = x.shape
    height = weight.shape[0]
    weights = [weight] if up_weight is None else [weight, up_weight]
    if any(w.dtype != x.dtype for w in weights) or batch > _MOST_VECTORS:
        raise ValueError(
            f"at most {_MOST_VECTORS} vectors of the weight's type fit, got {batch} of {x.dtype} and {weight.dtype}"
        )
    given = [x, *weights, *(tensor for tensor in (norm_weight, bias, up_bias) if tensor is not None)]
    if any(tensor.stride(-1) != 1 for tensor in given) or (residual is not None and not residual.is_contiguous()):
        raise ValueError("rows of x and of the weights, vectors, and the residual must be contiguous")
    if batch > 1 and norm_weight is not None:
        return _by_torch(x, weight, norm_weight, eps, bias, up_weight, up_bias, residual, out)
    if out is None:
        out = torch.empty(batch, height, dtype=x.dtype, device=x.device)
    stride_up = weights[-1].stride(0)
    if batch == 1:
        if plan is None:
            kind = "gated" if up_weight is not None else "plain" if norm_weight is None else "normed"
            plan = row_plan(height, kind, x.device)
        rows, resident = plan
        options = early_launch(x.device)
        if resident is not None:
            # Registers come in eights.
            options["maxnreg"] = _REGISTERS // (_THREADS * resident) // 8 * 8
        _vector[(triton.cdiv(height, rows),)](
            x, weight, norm_weight, bias, up_weight, up_bias, residual, out, eps, height, weight.stride(0), stride_up,
            WIDTH=width, ROWS=rows, BLOCK=min(triton.next_power_of_2(width), _THREADS * 16 // x.element_size()),
            LINES=_lines(rows, width * x.element_size()), LINE=_LINE_BYTES // x.element_size(),
            num_warps=_THREADS // 32, **options,
        )  # fmt: skip
        return out
    rows = _TILE_ROWS // len(weights)
    block = max(16, min(triton.next_power_of_2(width), _TILE_BYTES // x.element_size()))
    tiles = triton.cdiv(height, rows)
    splits = split_count(tiles, triton.cdiv(width, block), x.device) if splits is None else splits
    parts = None
    if splits > 1:
        parts = torch.empty(len(weights), splits, batch, height, dtype=torch.float32, device=x.device)
    _matrix[(tiles, splits)](
        x, weight, bias, up_weight, up_bias, residual, out, parts, batch, height, x.stride(0),
        weight.stride(0), stride_up, WIDTH=width, VECTORS=_MOST_VECTORS, ROWS=rows, BLOCK=block, SPLITS=splits,
        num_warps=4, num_stages=4,
    )  # fmt: skip
    if parts is not None:
        _add_up[(triton.cdiv(batch * height, 128),)](
            parts, bias, up_bias, residual, out, batch * height, height,
            GATED=up_weight is not None, SPLITS=splits, SPLITS_2=triton.next_power_of_2(splits), BLOCK=128, num_warps=4,
        )  # fmt: skip
    return out


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    up_weight: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    n = torch.nn.functional.rms_norm(x, (x.shape[1],), norm_weight, eps)
    y = torch.nn.functional.linear(n, weight, bias)
    if up_weight is not None:
        y = torch.nn.functional.silu(y) * torch.nn.functional.linear(n, up_weight, up_bias)
    if residual is not None:
        y = y + residual
    return y if out is None else out.copy_(y)
