"""Vertical-slash attention that writes over its queries, what it holds meanwhile, and the tiling it takes by itself."""

import pytest
import torch
from kernel_cases import DEVICE, error, normal
from kvsim_kernels.vertical_slash import kernel as module
from kvsim_kernels.vertical_slash import vertical_slash_reference
from kvsim_kernels.vertical_slash.kernel import Tiling, default_tiling, gather_admitted, vertical_slash

ONE = Tiling(rows=32, columns=16, warps=4, stages=2)
TWO = Tiling(rows=32, columns=16, warps=4, stages=2, split=True)
LENGTH, DIM, WINDOW = 110, 32, 10


def given(kv_heads, group, length=LENGTH, dim=DIM, dtype=torch.float16):
    sizes = (kv_heads * group, kv_heads, kv_heads)
    query, key, value = (normal(size, length, dim, seed=seed, dtype=dtype) for seed, size in enumerate(sizes))
    mask = torch.rand(kv_heads, length, generator=torch.Generator().manual_seed(4)) < 0.6
    return query, key, value, mask.to(DEVICE)


def bytes_of(kv_heads, group, length):
    """Give what some heads' halves of an answer take: an output in float16 and a log-sum-exp."""
    return kv_heads * group * length * (2 * DIM + 4)


@pytest.fixture
def made(monkeypatch):
    """List the shapes of what is made with room for numbers."""
    shapes, real = [], torch.empty

    def empty(*size, **more):
        found = real(*size, **more)
        if found.is_floating_point():
            shapes.append((tuple(found.shape), found.nbytes))
        return found

    monkeypatch.setattr(module.torch, "empty", empty)
    return shapes


# KV heads and group; the bytes between two launches; pieces in heads and rows.
CASES = [
    (1, 4, module._SCRATCH, (1, LENGTH)),
    (3, 1, bytes_of(2, 1, LENGTH), (2, LENGTH)),
    (2, 3, bytes_of(1, 3, LENGTH), (1, LENGTH)),
    (2, 4, bytes_of(1, 4, 64), (1, 64)),
    (1, 8, bytes_of(1, 8, 40), (1, 32)),
]


@pytest.mark.parametrize("options", [{}, {"chunk": 32}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "limit", "piece"), CASES)
def test_over_the_queries_it_is_the_same_bit_for_bit(kv_heads, group, limit, piece, options, made, monkeypatch):
    query, key, value, mask = given(kv_heads, group)
    admitted = gather_admitted(key, value, mask)
    exact = vertical_slash_reference(query, key, value, mask, window=WINDOW, dtype=torch.float64, **options)
    options = {"window": WINDOW, "tiling": TWO, "return_lse": True} | options
    apart = vertical_slash(query, key, value, admitted, **options)
    assert error(apart.output, exact.output) < 2e-3
    assert error(apart.lse, exact.lse) < 5e-6
    monkeypatch.setattr(module, "_SCRATCH", limit)
    over = query.clone()
    del made[:]
    both = vertical_slash(over, key, value, admitted, out=over, **options)
    held = piece[0] * group, piece[1]
    assert [shape for shape, _ in made] == [(*held, DIM), (kv_heads * group, LENGTH), held]
    assert made[0][1] + made[2][1] <= limit
    assert both.output is over
    assert torch.equal(over, apart.output)
    assert torch.equal(both.lse, apart.lse)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (1, 3), (1, 4), (1, 8)])
def test_one_launch_holds_nothing(kv_heads, group, made):
    query, key, value, mask = given(kv_heads, group)
    admitted = gather_admitted(key, value, mask)
    apart = vertical_slash(query, key, value, admitted, window=WINDOW, tiling=ONE)
    over = query.clone()
    del made[:]
    assert vertical_slash(over, key, value, admitted, window=WINDOW, tiling=ONE, out=over) is over
    assert made == []
    assert torch.equal(over, apart)


def test_two_launches_hold_a_log_sum_exp_alone_where_the_output_is_apart(made):
    query, key, value, mask = given(2, 3)
    admitted, out = gather_admitted(key, value, mask), torch.empty_like(query)
    del made[:]
    vertical_slash(query, key, value, admitted, window=WINDOW, tiling=TWO, out=out)
    assert [shape for shape, _ in made] == [(6, LENGTH)]


@pytest.mark.parametrize(
    ("length", "size", "most"), [(400_000, 1040, (1, 400_000)), (65_536, 1040, (4, 65_536)), (2_000, 1040, (8, 2_000))]
)
def test_pieces_of_a_large_model(length, size, most):
    assert module._piece(8, length, 128, size) == most


@pytest.mark.parametrize(("length", "size"), [(400_001, 8320), (2_000_000, 1040), (300, 10**9)])
def test_a_head_that_does_not_fit_is_cut(length, size):
    heads, rows = module._piece(8, length, 128, size)
    assert (heads, rows % 128) == (1, 0)
    assert heads * rows * size <= module._SCRATCH or rows == 128


def test_the_tiling_it_takes():
    query, key, value, mask = given(1, 4, dim=80, length=300)
    admitted = gather_admitted(key, value, mask)
    best, plain = Tiling(split=True, columns=128, stages=3), Tiling()
    can = module._shared_memory(query.device) >= 227 * 1024
    assert default_tiling(query, admitted) == (best if can else plain)
    # Descriptors read no rows that begin between multiples of 16 bytes, and not nothing.
    shifted = normal(4, 300, 88, dtype=torch.float16)[..., 4:84]
    strided = normal(4, 300, 84, dtype=torch.float16)[..., :80]
    nothing = gather_admitted(key, value, torch.zeros_like(mask))
    for own, kept in ((shifted, admitted), (strided, admitted), (query, nothing)):
        assert default_tiling(own, kept) == plain
        # A tiling that is asked for is run by one launch there.
        for tiling in (None, TWO):
            found = vertical_slash(own, key, value, kept, window=9, tiling=tiling)
            shown = mask if kept is admitted else torch.zeros_like(mask)
            exact = vertical_slash_reference(own, key, value, shown, window=9, dtype=torch.float64)
            assert error(found, exact.output) < 2e-3
    assert default_tiling(query.float(), admitted).split is False
    assert default_tiling(normal(4, 300, 256, dtype=torch.float16), admitted).split is False


@pytest.mark.parametrize(("length", "dim"), [(300, 128), (5, 96), (1, 64), (140, 80)])
def test_without_a_tiling(length, dim):
    query, key, value, mask = given(1, 4, length, dim)
    admitted = gather_admitted(key, value, mask)
    exact = vertical_slash_reference(query, key, value, mask, window=20, dtype=torch.float64)
    found = vertical_slash(query, key, value, admitted, window=20, out=query)
    assert error(found, exact.output) < 2e-3


def test_where_it_cannot_write():
    query, key, value, mask = given(1, 2)
    admitted = gather_admitted(key, value, mask)
    wide = normal(2, LENGTH + 3, DIM, dtype=torch.float16)
    for own, out in (
        (query, query[:1]),
        (query, torch.empty(2, DIM, LENGTH, dtype=torch.float16, device=DEVICE).transpose(1, 2)),
        (wide[:, :LENGTH], wide.flatten()[: query.numel()].view(2, LENGTH, DIM)),
    ):
        with pytest.raises(ValueError, match="out must be contiguous"):
            vertical_slash(own, key, value, admitted, window=WINDOW, out=out)
