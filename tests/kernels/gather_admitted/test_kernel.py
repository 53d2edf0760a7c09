"""Gathering admitted keys: the kernel against the reference, and no host loop in sight."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, normal
from kvsim_kernels.gather_admitted import gather_admitted as reference
from kvsim_kernels.gather_admitted.kernel import gather_admitted


def shares(kv_heads, length, *fractions):
    """Draw a mask in which each head admits its own share."""
    drawn = torch.rand(kv_heads, length, generator=torch.Generator().manual_seed(5))
    return (drawn < torch.tensor(fractions).view(-1, 1)).to(DEVICE)


def alike(mine, theirs):
    count = int(theirs.starts[-1])
    assert torch.equal(mine.starts, theirs.starts)
    for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values), (mine.positions, theirs.positions)):
        assert a.dtype == b.dtype
        assert torch.equal(a[:count], b[:count])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("length", "dim", "fractions"),
    [
        (1, 64, (1.0,)),
        (77, 64, (0.25, 0.5)),
        (130, 96, (0.0, 1.0, 0.3)),
        (331, 80, (0.9, 0.0, 0.0)),
        (64, 256, (0.5, 0.5)),
        (200, 128, (0.0, 0.0)),
    ],
)
def test_against_the_reference(length, dim, fractions, dtype):
    kv_heads = len(fractions)
    key, value = normal(kv_heads, length, dim, seed=1, dtype=dtype), normal(kv_heads, length, dim, seed=2, dtype=dtype)
    mask = shares(kv_heads, length, *fractions)
    # What is not admitted is not read.
    key, value = (x.masked_fill(~mask.unsqueeze(-1), torch.nan) for x in (key, value))
    found, exact = gather_admitted(key, value, mask), reference(key, value, mask)
    alike(found, exact)
    assert len(found.keys) == int(mask.sum())
    for head in range(kv_heads):
        part = found.positions[found.starts[head] : found.starts[head + 1]]
        assert part.tolist() == mask[head].nonzero().flatten().tolist()


def test_a_given_capacity():
    key, value = normal(2, 90, 64, seed=1), normal(2, 90, 64, seed=2)
    mask = shares(2, 90, 0.3, 0.4)
    count = int(mask.sum())
    for capacity in (count, count + 7):
        found, exact = (
            gather_admitted(key, value, mask, capacity=capacity),
            reference(key, value, mask, capacity=capacity),
        )
        alike(found, exact)
        assert found.keys.shape == exact.keys.shape == (capacity, 64)
    # Too small: nothing is written beyond it, and `starts` tells.
    found = gather_admitted(key, value, mask, capacity=10)
    assert len(found.keys) == 10
    assert int(found.starts[-1]) == count
    assert torch.equal(found.keys, reference(key, value, mask).keys[:10])
    with pytest.raises(ValueError, match="capacity=10"):
        reference(key, value, mask, capacity=10)


def test_views_of_a_larger_tensor():
    wide = normal(90, 2, 2, 64)
    key, value = wide[:, 0].transpose(0, 1), wide[:, 1].transpose(0, 1)
    mask = shares(2, 90, 0.3, 0.4)
    alike(gather_admitted(key, value, mask), reference(key, value, mask))


def test_what_does_not_fit():
    key = normal(2, 8, 64)
    mask = torch.ones(2, 8, dtype=torch.bool, device=DEVICE)
    for function in (gather_admitted, reference):
        with pytest.raises(ValueError, match="do not fit"):
            function(key, key, mask[:, :4])
        with pytest.raises(ValueError, match="do not fit"):
            function(key, key, mask.int())
    with pytest.raises(ValueError, match="contiguous"):
        gather_admitted(key.transpose(1, 2).contiguous().transpose(1, 2), key, mask)
