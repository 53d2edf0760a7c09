"""Paged decode attention: the kernel against the reference in float64, and the reference against plain attention."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, ints, normal
from kvsim_kernels.decode_attention import decode_attention
from kvsim_kernels.paged_decode import PAGE, page_slots
from kvsim_kernels.paged_decode import paged_decode as reference
from kvsim_kernels.paged_decode.kernel import paged_decode


def inputs(group, dim, lengths, dtype=torch.float32, ring=None, room=1):
    """Scatter rows over the pages of a pool; slots that belong to no token hold garbage."""
    rows, pages = len(lengths), [-(-(n + PAGE) // PAGE) + room for n in lengths]
    total = sum(pages) + 3
    pools = [torch.full((total, PAGE, dim), torch.nan, device=DEVICE, dtype=dtype) for _ in range(2)]
    order = torch.randperm(total, generator=torch.Generator().manual_seed(7)).int().to(DEVICE)
    table = torch.full((rows, max(pages)), 2**30, dtype=torch.int32, device=DEVICE)
    used = 0
    for row, length in enumerate(lengths):
        table[row, : pages[row]] = order[used : used + pages[row]]
        used += pages[row]
        slot = page_slots(torch.arange(length, device=DEVICE), ring)
        for seed, pool in enumerate(pools):
            pool[table[row, slot // PAGE].long(), slot % PAGE] = normal(length, dim, seed=10 * row + seed, dtype=dtype)
    return normal(rows, group, dim, seed=1, dtype=dtype), *pools, table, ints(*lengths)


def agree(given, splits, **options):
    found = paged_decode(*given, splits=splits, **options)
    exact, single = reference(*given, dtype=torch.float64, **options), reference(*given, **options)
    limit = 2e-6 if given[0].dtype == torch.float32 else 2 * error(single, exact)
    assert torch.isfinite(found).all()
    assert error(found, exact) < limit
    assert found.dtype == given[0].dtype
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("group", "dim", "lengths", "splits"),
    [
        (1, 64, (77,), 3),
        (3, 64, (130, 1, 16), 4),
        (4, 128, (1, 200, 33, 5), 7),
        (7, 128, (65, 17), 1),
        (8, 96, (3, 140), 5),
        (4, 80, (49, 48, 47), 40),
        (4, 256, (67, 20), 2),
        (20, 64, (33,), None),
    ],
)
def test_shapes(group, dim, lengths, splits, dtype):
    agree(inputs(group, dim, lengths, dtype), splits)


@pytest.mark.parametrize("splits", [1, 2, 3, 6, 30])
def test_rows_of_very_different_lengths(splits):
    # At 64 tokens a tile: rows of no tile, of one and of several, at the ends and in between.
    given = inputs(2, 64, (0, 0, 200, 1, 0, 64, 65, 40, 0))
    found = agree(given, splits)
    assert (found[given[4] == 0] == 0).all()
    assert (agree(inputs(2, 64, (0, 0)), splits) == 0).all()


def test_many_parts_of_a_row():
    # More than are combined at once: 16 tokens a tile, and a tile a program.
    given = inputs(1, 256, (650, 20))
    agree(given, 45)
    # One late token that outweighs all.
    query, keys, _, table, _ = given
    keys[table[0, 40], 3] = query[0, 0]
    agree(given, 45)


@pytest.mark.parametrize("ring", [1, 5, 16, 23, 32])
def test_what_is_left_of_a_rings_last_page_is_not_read(ring):
    agree(inputs(2, 64, (60, ring, 3, ring + 1), ring=ring), 3, ring=ring)
    given = inputs(2, 64, (60, ring, 3, ring + 1), ring=ring)
    if ring % PAGE:
        assert reference(*given).isnan().any()


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"scaling": 0.3}, {"scaling": 0.3, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_options(options, dtype):
    agree(inputs(3, 64, (70, 20), dtype), 3, **options)


def test_pages_in_any_order_are_a_cache_of_slots():
    query, keys, values, table, lengths = inputs(2, 64, (90, 45))
    for row, length in enumerate(lengths.tolist()):
        slot = torch.arange(length, device=DEVICE)
        own = [pool[table[row, slot // PAGE].long(), slot % PAGE][None, None] for pool in (keys, values)]
        whole = decode_attention(query[row : row + 1], *own, lengths[row : row + 1], dtype=torch.float64).output[0]
        assert error(reference(query, keys, values, table, lengths)[row], whole) < 1e-6


def test_lengths_change_under_one_graph():
    query, keys, values, table, lengths = inputs(2, 64, (150, 40, 20))
    out = torch.empty(3, 2, 64, device=DEVICE)

    def call():
        paged_decode(query, keys, values, table, lengths, splits=4, out=out)

    replay = call
    if DEVICE == "cuda":
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay = graph.replay
    for now in ((150, 40, 20), (1, 40, 0), (10, 0, 17)):
        lengths.copy_(ints(*now))
        out.fill_(torch.nan)
        replay()
        assert error(out, reference(query, keys, values, table, lengths, dtype=torch.float64)) < 2e-6


def test_views_of_a_larger_pool():
    query, keys, values, table, lengths = inputs(2, 64, (90, 45))
    pool = torch.stack([keys, values], 1)
    wide = torch.stack([query, query], 1)
    found = paged_decode(wide[:, 0], pool[:, 0], pool[:, 1], table[:, :7], lengths)
    assert error(found, reference(query, keys, values, table, lengths, dtype=torch.float64)) < 2e-6


def test_what_does_not_fit():
    query, keys, values, table, lengths = inputs(2, 64, (9, 4))
    for attend in (paged_decode, reference):
        with pytest.raises(ValueError, match="do not fit queries"):
            attend(query, keys[:, :8], values[:, :8], table, lengths)
        with pytest.raises(ValueError, match="do not fit 2 rows"):
            attend(query, keys, values, table[:1], lengths)
        with pytest.raises(ValueError, match="ring=0"):
            attend(query, keys, values, table, lengths, ring=0)
    with pytest.raises(ValueError, match="share a type"):
        paged_decode(query.half(), keys, values, table, lengths)
    with pytest.raises(ValueError, match="int32"):
        paged_decode(query, keys, values, table.long(), lengths)
    with pytest.raises(ValueError, match="contiguous"):
        paged_decode(query, keys.transpose(1, 2).contiguous().transpose(1, 2), values, table, lengths)
