"""Lazy promotion: the kernel against the reference, and both against lists of positions."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, ints, normal
from kvsim_kernels.paged_decode import PAGE, page_slots
from kvsim_kernels.paged_decode.kernel import paged_decode
from kvsim_kernels.promote import EXHAUSTED, TABLE_FULL
from kvsim_kernels.promote import promote as reference
from kvsim_kernels.promote.kernel import promote
from kvsim_kernels.vertical_slash import vertical_slash_reference

DIM = 64


class Cache:
    """A dual cache without tokens: rings have their pages, the others are free."""

    def __init__(self, rows, window, pages, width=12, *, each=False, dtype=torch.float32, dim=DIM):
        self.window, ring = window, -(-window // PAGE)
        self.keys, self.values = (torch.full((pages, PAGE, dim), torch.nan, device=DEVICE, dtype=dtype) for _ in "kv")
        self.table = torch.full((rows, width), 2**30, device=DEVICE, dtype=torch.int32)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(3)).int().to(DEVICE)
        self.table[:, :ring] = order[: rows * ring].view(rows, ring)
        self.free, self.top = order[rows * ring :].contiguous(), ints(pages - rows * ring)
        self.gates = torch.full((rows, window), -torch.inf, device=DEVICE)
        self.pointer, self.status = ints(*[0] * (rows if each else 1)), ints(0)
        self.counts, self.lengths = ints(*[0] * rows), ints(*[0] * rows)
        self.new_slots = ints(*[2**30] * rows)

    def make_room(self, function, tau):
        function(
            self.keys, self.values, self.gates, self.table, self.pointer, self.counts, self.free, self.top,
            self.status, self.new_slots, window=self.window, tau=tau, lengths=self.lengths,
        )  # fmt: skip

    def step(self, function, keys, values, gates, tau):
        self.make_room(function, tau)
        for row, slot in enumerate(self.new_slots.tolist()):
            if slot >= 0:
                page = int(self.table[row, slot // PAGE])
                self.keys[page, slot % PAGE], self.values[page, slot % PAGE] = keys[row], values[row]
                self.gates[row, slot] = gates[row]

    def state(self):
        parts = (self.table, self.gates, self.pointer, self.counts, self.lengths, self.top, self.new_slots, self.status)
        return [x.clone() for x in (self.keys, self.values, *parts)]

    def tokens(self, row):
        """Read a row's keys in the order in which paged attention sees them."""
        slot = page_slots(torch.arange(int(self.lengths[row]), device=DEVICE), self.window)
        return self.keys[self.table[row, slot // PAGE].long(), slot % PAGE]


def same(mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(torch.nan_to_num(a, 123.0), torch.nan_to_num(b, 123.0))


def drawn(rows, steps, seed=0):
    return torch.rand(steps, rows, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("window", "rows", "each", "tau"),
    [(1, 2, False, 0.0), (5, 3, True, 0.6), (16, 1, False, 0.1), (18, 2, False, 0.0), (4, 2, False, 1.5)],
)
def test_positions_end_where_they_should(window, rows, each, tau):
    steps = window + 23
    gates, mine = drawn(rows, steps), Cache(rows, window, 40, each=each)
    theirs = Cache(rows, window, 40, each=each)
    for t in range(steps):
        key = torch.full((rows, DIM), float(t), device=DEVICE)
        key[:, 1] = torch.arange(rows)
        mine.step(promote, key, -key, gates[t], tau)
        theirs.step(reference, key, -key, gates[t], tau)
        if t % 5 == 0 or t == steps - 1:
            same(mine.state(), theirs.state())
        assert mine.pointer.tolist() == [(t + 1) % window] * len(mine.pointer)
    assert int(mine.status) == 0
    for row in range(rows):
        admitted = [p for p in range(steps - window) if gates[p, row] >= tau]
        local = [max(p for p in range(steps) if p % window == slot) for slot in range(window)]
        found = mine.tokens(row)
        # Global tokens lie in order of position.
        assert found[:, 0].tolist() == local + admitted
        assert (found[:, 1] == row).all()
        assert int(mine.counts[row]) == len(admitted)
    opened = sum(-(-int(n) // PAGE) for n in mine.counts)
    assert int(mine.top) == 40 - rows * -(-window // PAGE) - opened


@pytest.mark.parametrize("function", [promote, reference])
def test_an_exhausted_pool_loses_nothing(function):
    # Two free pages, three rows that all promote: a step is taken for all rows or for none.
    cache = Cache(3, 4, 5)
    # A gate of exactly tau, in float32, is enough.
    gates = torch.full((3,), 0.7, device=DEVICE)

    def step(t):
        key = torch.full((3, DIM), float(t), device=DEVICE)
        cache.step(function, key, key, gates, 0.7)

    for t in range(4):
        step(t)
    before = cache.state()
    step(4)
    assert int(cache.status) == EXHAUSTED
    assert cache.new_slots.tolist() == [-1] * 3
    same(cache.state()[:-2], before[:-2])
    # Nothing is written until someone has dealt with it.
    cache.new_slots.fill_(7)
    step(5)
    assert cache.new_slots.tolist() == [-1] * 3
    same(cache.state()[:-2], before[:-2])
    for row in range(3):
        assert cache.tokens(row)[:, 0].tolist() == [0, 1, 2, 3]
    # With one more page the same step can be taken.
    more = torch.full((1, PAGE, DIM), torch.nan, device=DEVICE)
    cache.keys, cache.values = torch.cat([cache.keys, more]), torch.cat([cache.values, more])
    cache.free, cache.top = torch.cat([cache.free, ints(5)]), ints(3)
    step(4)
    assert int(cache.status) == EXHAUSTED
    assert int(cache.top) == 3
    cache.status.zero_()
    step(4)
    assert int(cache.status) == int(cache.top) == 0
    for row in range(3):
        assert cache.tokens(row)[:, 0].tolist() == [4, 1, 2, 3, 0]


@pytest.mark.parametrize("function", [promote, reference])
def test_a_full_table_loses_nothing(function):
    cache = Cache(1, 2, 30, width=2)
    for t in range(2 + PAGE):
        cache.step(function, normal(1, DIM, seed=t), normal(1, DIM, seed=t), torch.ones(1, device=DEVICE), 0.5)
    assert int(cache.counts) == PAGE
    before = cache.state()
    cache.step(function, normal(1, DIM, seed=99), normal(1, DIM), torch.ones(1, device=DEVICE), 0.5)
    assert int(cache.status) == TABLE_FULL
    assert cache.new_slots.tolist() == [-1]
    same(cache.state()[:-2], before[:-2])


@pytest.mark.parametrize(("window", "tau"), [(1, 0.5), (6, 0.3), (6, 0.0), (6, 2.0), (40, 0.5)])
def test_steps_equal_one_masked_pass(window, tau):
    kv_heads, group, length = 2, 3, 27
    query = normal(kv_heads * group, length, DIM, seed=1)
    key, value = normal(kv_heads, length, DIM, seed=2), normal(kv_heads, length, DIM, seed=3)
    gates = drawn(kv_heads, length)
    mask = (gates >= tau).T
    whole = vertical_slash_reference(query, key, value, mask, window=window, dtype=torch.float64).output
    cache = Cache(kv_heads, window, 40)
    for t in range(length):
        cache.step(promote, key[:, t], value[:, t], gates[t], tau)
        found = paged_decode(
            query[:, t].view(kv_heads, group, DIM), cache.keys, cache.values, cache.table, cache.lengths, ring=window,
            splits=3,
        )  # fmt: skip
        assert error(found.view(-1, DIM), whole[:, t]) < 2e-6
    assert int(cache.status) == 0


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_types_and_views(dtype, dim):
    mine, theirs = (Cache(2, 3, 20, dtype=dtype, dim=dim) for _ in range(2))
    for t in range(9):
        wide = normal(2, 2, dim, seed=t, dtype=dtype)
        gates = drawn(2, 1, seed=t)[0].to(dtype)
        for cache, function in ((mine, promote), (theirs, reference)):
            cache.step(function, wide[:, 0], wide[:, 1], gates, 0.3)
    same(mine.state(), theirs.state())
    assert int(mine.counts.sum()) > 3


def test_what_does_not_fit():
    for function in (promote, reference):
        for change, match in (
            ({"window": 5}, "window=5"),
            ({"table": Cache(2, 4, 10).table[:, :0]}, "rings of 1 pages"),
            ({"values": normal(10, PAGE, 8)}, r"must both be \[P, 16, d\]"),
            ({"new_slots": ints(0)}, r"must be \[2\]"),
        ):
            other = Cache(2, 4, 10)
            vars(other).update(change)
            with pytest.raises(ValueError, match=match):
                other.make_room(function, 0.5)
    for name in ("counts", "new_slots"):
        other = Cache(2, 4, 10)
        vars(other)[name] = vars(other)[name].long()
        with pytest.raises(ValueError, match="int32"):
            other.make_room(promote, 0.5)
