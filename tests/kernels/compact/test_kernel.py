"""Compaction: the kernel against the reference, bit for bit."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, normal
from kvsim_kernels.compact import compact as reference
from kvsim_kernels.compact.kernel import compact


def inputs(batch, kv_heads, slots, dim, value_dim, count, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    chosen = torch.stack([torch.randperm(slots, generator=generator)[:count] for _ in range(batch * rows)])
    chosen[:, -count // 4 :][chosen[:, -count // 4 :] % 3 == 0] = -1
    keys = normal(batch, kv_heads, slots, dim, seed=1, dtype=dtype)
    values = normal(batch, kv_heads, slots, value_dim, seed=2, dtype=dtype)
    return keys, values, chosen.view(batch, rows, count).int().to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "slots", "dim", "value_dim", "count", "rows"),
    [(1, 2, 50, 64, 64, 13, 1), (2, 3, 131, 80, 80, 77, 3), (2, 2, 300, 128, 96, 290, 1), (1, 1, 40, 256, 256, 40, 1)],
)
def test_shapes(batch, kv_heads, slots, dim, value_dim, count, rows, dtype):
    given = inputs(batch, kv_heads, slots, dim, value_dim, count, rows, dtype)
    for width in (None, count + 1, count + 70):
        for mine, theirs in zip(compact(*given, width=width), reference(*given, width=width), strict=True):
            assert mine.dtype == dtype
            assert torch.equal(mine, theirs)
    moved, _ = reference(*given)
    for place in range(0, count, 5):
        for head in range(kv_heads):
            slot = int(given[2][0, head % rows, place])
            expected = given[0][0, head, slot] if slot >= 0 else torch.zeros(dim, device=DEVICE, dtype=dtype)
            assert torch.equal(moved[0, head, place], expected)


def test_views_of_a_larger_cache_and_given_outputs():
    keys, values, slots = inputs(2, 2, 60, 64, 64, 20, 2)
    wide = torch.stack([keys, values], dim=3)
    out = torch.empty(2, 2, 21, 64, device=DEVICE), torch.empty(2, 2, 21, 64, device=DEVICE)
    found = compact(wide[:, :, :, 0], wide[:, :, :, 1], slots, width=21, out=out)
    for mine, given, theirs in zip(found, out, reference(keys, values, slots, width=21), strict=True):
        assert mine is given
        assert torch.equal(mine, theirs)


def test_what_does_not_fit():
    keys, values, slots = inputs(1, 3, 20, 64, 64, 5, 1)
    for move in (compact, reference):
        with pytest.raises(ValueError, match="do not fit"):
            move(keys, values[:, :2], slots)
        with pytest.raises(ValueError, match="do not fit"):
            move(keys, values, slots.expand(1, 2, 5))
        with pytest.raises(ValueError, match="width=4"):
            move(keys, values, slots, width=4)
    with pytest.raises(ValueError, match="contiguous"):
        compact(keys.transpose(2, 3).contiguous().transpose(2, 3), values, slots)
