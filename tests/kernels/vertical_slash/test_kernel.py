"""Vertical-slash attention: the kernel against the reference in float64, and the reference against its definition."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, normal
from kvsim_kernels.decode_attention import decode_attention
from kvsim_kernels.merge_partials import merge_partials
from kvsim_kernels.vertical_slash import vertical_slash_mask, vertical_slash_reference
from kvsim_kernels.vertical_slash.kernel import Tiling, gather_admitted, seen_by_chunk, vertical_slash

SMALL = Tiling(rows=32, columns=16, warps=4, stages=2)

# kv_heads, group, dim, length, window
SHAPES = [
    (2, 1, 64, 77, 20),
    (2, 3, 64, 70, 16),
    (1, 4, 128, 131, 33),
    (1, 7, 128, 65, 8),
    (1, 8, 96, 85, 31),
    (2, 4, 80, 49, 5),
    (1, 4, 256, 67, 17),
    (1, 2, 64, 193, 64),
]


def inputs(kv_heads, group, dim, length, dtype=torch.float32):
    return (
        normal(kv_heads * group, length, dim, seed=1, dtype=dtype),
        normal(kv_heads, length, dim, seed=2, dtype=dtype),
        normal(kv_heads, length, dim, seed=3, dtype=dtype),
    )


def drawn(kv_heads, length, share=0.25):
    """Draw a mask; heads are ragged: the first admits `share`, the next half of that, and so on."""
    numbers = torch.rand(kv_heads, length, generator=torch.Generator().manual_seed(4))
    return (numbers < share / 2.0 ** torch.arange(kv_heads).view(-1, 1)).to(DEVICE)


def agree(given, mask, window, tiling=SMALL, **options):
    """Compare kernel and reference; give the kernel's output."""
    admitted = gather_admitted(*given[1:], mask)
    found = vertical_slash(*given, admitted, window=window, return_lse=True, tiling=tiling, **options)
    exact = vertical_slash_reference(*given, mask, window=window, dtype=torch.float64, **options)
    single = vertical_slash_reference(*given, mask, window=window, **options)
    limit = 2e-6 if given[0].dtype == torch.float32 else 2 * error(single.output, exact.output)
    assert error(found.output, exact.output) < limit
    assert error(found.lse, exact.lse) < 5e-6
    assert found.output.dtype == given[0].dtype
    return found.output


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "length", "window"), SHAPES)
def test_shapes(kv_heads, group, dim, length, window, dtype):
    agree(inputs(kv_heads, group, dim, length, dtype), drawn(kv_heads, length), window)


@pytest.mark.parametrize(
    "tiling",
    [
        None,
        Tiling(rows=64, columns=32, pack=False),
        Tiling(rows=16, columns=64),
        Tiling(rows=32, columns=16, descriptors=True),
        Tiling(rows=32, columns=16, descriptors=True, pack=False, warps=4),
        Tiling(rows=32, columns=16, split=True, warps=4),
        Tiling(rows=256, columns=64, split=True, warps=4),
        Tiling(rows=128, columns=128, stages=2),
    ],
    ids=str,
)
def test_tilings(tiling):
    agree(inputs(1, 4, 80, 120, torch.float16), drawn(1, 120, 0.7), 30, tiling)


@pytest.mark.parametrize(
    ("window", "share"), [(1, 0.0), (1, 0.3), (1, 2.0), (2, 0.3), (32, 0.0), (32, 2.0), (60, 0.3), (500, 0.3)]
)
def test_windows_and_shares(window, share):
    given, mask = inputs(2, 1, 64, 60), drawn(2, 60, share)
    found = agree(given, mask, window)
    if window >= 60 or share == 2.0:
        full = agree(given, torch.ones_like(mask), window)
        # A head that admits all sees all; with a window beyond the length every head does.
        heads = slice(None) if window >= 60 else slice(0, 1)
        assert error(found[heads], full[heads].double()) < 2e-6


def test_a_head_that_admits_nothing_beside_one_that_admits_all():
    mask = torch.zeros(3, 70, dtype=torch.bool, device=DEVICE)
    mask[1] = True
    for tiling in (SMALL, Tiling(rows=32, columns=16, descriptors=True)):
        agree(inputs(3, 2, 64, 70), mask, 9, tiling)


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"scaling": 0.3}, {"scaling": 0.3, "softcap": 5.0}, {"softcap": 50.0}], ids=str
)
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_options(options, dtype):
    agree(inputs(2, 3, 64, 70, dtype), drawn(2, 70, 0.5), 12, **options)


def test_a_capacity_with_room_and_views():
    wide = normal(6, 2, 80, 64)
    query, key, value = wide[:4, 0], wide[4:, 0], wide[4:, 1]
    mask = drawn(2, 80, 0.5)
    admitted = gather_admitted(key, value, mask, capacity=120)
    out = torch.empty(4, 80, 64, device=DEVICE)
    exact = vertical_slash_reference(query, key, value, mask, window=7, dtype=torch.float64)
    for tiling in (SMALL, Tiling(rows=32, columns=16, descriptors=True)):
        found = vertical_slash(query, key, value, admitted, window=7, out=out, tiling=tiling)
        assert found is out
        assert error(found, exact.output) < 2e-6
        out.fill_(torch.nan)


@pytest.mark.parametrize("chunk", [32, 64])
def test_another_kernel_can_take_what_whole_chunks_see(chunk):
    given, mask, window = inputs(2, 1, 64, 110), drawn(2, 110, 0.6), 10
    query, key, value = given
    agree(given, mask, window, chunk=chunk)
    agree(given, mask, window, Tiling(rows=32, columns=16, warps=4, split=True), chunk=chunk)
    admitted = gather_admitted(key, value, mask)
    rest = vertical_slash(*given, admitted, window=window, chunk=chunk, return_lse=True, tiling=SMALL)
    counts = seen_by_chunk(admitted, 110, window=window, chunk=chunk)
    dense, lse = torch.zeros(2, 110, 64, device=DEVICE), torch.full((2, 110), -torch.inf, device=DEVICE)
    for head in range(2):
        for c in range(counts.shape[1]):
            start, count = int(admitted.starts[head]), int(counts[head, c])
            at = slice(c * chunk, (c + 1) * chunk)
            logits = query[head, at] @ admitted.keys[start : start + count].T / 8
            if count:
                dense[head, at] = logits.softmax(-1) @ admitted.values[start : start + count]
                lse[head, at] = logits.logsumexp(-1)
    assert int(counts.max()) > 20
    exact = vertical_slash_reference(*given, mask, window=window, dtype=torch.float64)
    found, total = merge_partials(rest.output, rest.lse, dense, lse)
    assert error(found, exact.output) < 2e-6
    assert error(total, exact.lse) < 2e-6


def test_the_window_ends_where_it_should():
    mask = torch.zeros(1, 8, dtype=torch.bool, device=DEVICE)
    mask[0, 1] = True
    seen = vertical_slash_mask(mask, 3)[0]
    assert seen[6].nonzero().flatten().tolist() == [1, 4, 5, 6]
    assert seen[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert torch.equal(vertical_slash_mask(mask, 1)[0, 5].nonzero().flatten().cpu(), torch.tensor([1, 5]))
    # The value at a position names it: only what is seen comes through.
    query = torch.zeros(1, 8, 16, device=DEVICE)
    value = torch.eye(8, 16, device=DEVICE).view(1, 8, 16)
    for window in range(1, 9):
        found = vertical_slash(
            query, query, value, gather_admitted(query, value, mask), window=window, tiling=Tiling(16, 16, 4, 1)
        )
        assert torch.equal(found[0, :, :8] > 0, vertical_slash_mask(mask, window)[0])


def test_decode_after_prefill_equals_one_masked_pass():
    kv_heads, group, length, steps, window = 2, 2, 60, 12, 7
    query, key, value = inputs(kv_heads, group, 64, length + steps)
    mask = drawn(kv_heads, length + steps, 0.5)
    whole = vertical_slash_reference(query, key, value, mask, window=window, dtype=torch.float64).output
    admitted = gather_admitted(key[:, :length], value[:, :length], mask[:, :length])
    prompt = vertical_slash(
        query[:, :length], key[:, :length], value[:, :length], admitted, window=window, tiling=SMALL
    )
    assert error(prompt, whole[:, :length]) < 2e-6
    at = torch.arange(length + steps, device=DEVICE)
    for t in range(length, length + steps):
        kept = torch.where((at > t - window) | mask, at, -1)[None].int()
        lengths = torch.tensor([t + 1], dtype=torch.int32, device=DEVICE)
        found = decode_attention(query[None, :, t], key[None], value[None], lengths, positions=kept).output[0]
        assert error(found, whole[:, t]) < 2e-6


def test_a_great_logit_does_not_overflow():
    query, key, value = inputs(1, 2, 64, 60)
    mask = drawn(1, 60, 0.5)
    mask[0, 3] = True
    key[0, 3] = query[0, 50] * 100
    agree((query, key, value), mask, 5)


def test_what_does_not_fit():
    query, key, value = inputs(2, 2, 64, 20)
    mask = drawn(2, 20)
    admitted = gather_admitted(key, value, mask)
    for attend, last in ((vertical_slash, admitted), (vertical_slash_reference, mask)):
        with pytest.raises(ValueError, match="does not fit a key"):
            attend(query[:3], key, value, last, window=4)
        with pytest.raises(ValueError, match="window=0"):
            attend(query, key, value, last, window=0)
        with pytest.raises(ValueError, match="scaling=-1"):
            attend(query, key, value, last, window=4, scaling=-1)
    with pytest.raises(ValueError, match="share a type"):
        vertical_slash(query.half(), key, value, admitted, window=4)
    with pytest.raises(ValueError, match="contiguous"):
        vertical_slash(query.transpose(1, 2).contiguous().transpose(1, 2), key, value, admitted, window=4)
    with pytest.raises(ValueError, match="1 KV heads"):
        vertical_slash(query, key, value, gather_admitted(key[:1], value[:1], mask[:1]), window=4)
    with pytest.raises(ValueError, match="chunk=33"):
        vertical_slash(query, key, value, admitted, window=4, chunk=33)
