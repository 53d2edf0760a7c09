"""Merging of partial attentions: the kernel against the reference in float64, and both against one attention."""

import pytest
import torch
from kernel_cases import TYPES, error, normal
from kvsim_kernels.merge_partials import merge_partials as reference
from kvsim_kernels.merge_partials.kernel import merge_partials


def attention(query, keys, values):
    logits = query @ keys.transpose(-1, -2)
    return logits.softmax(-1) @ values, logits.logsumexp(-1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("heads", "length", "dim"), [(1, 1, 64), (3, 37, 80), (2, 65, 96), (2, 9, 256), (4, 20, 128)])
def test_two_parts_make_the_whole(heads, length, dim, dtype):
    query = normal(heads, length, dim, seed=1).double() * dim**-0.5
    keys, values = normal(heads, 50, dim, seed=2).double(), normal(heads, 50, dim, seed=3).double()
    exact, exact_lse = attention(query, keys, values)
    parts = []
    for part in (slice(0, 33), slice(33, 50)):
        o, lse = attention(query, keys[:, part], values[:, part])
        parts += [o.to(dtype), lse.float()]
    single, _ = reference(*parts)
    found, lse = merge_partials(*parts)
    limit = 2e-6 if dtype == torch.float32 else 2 * error(single, exact)
    assert error(found, exact) < limit
    assert error(lse, exact_lse) < 1e-6
    assert found.dtype == dtype


def test_a_part_without_keys_is_not_read():
    o1, o2 = normal(2, 5, 64, seed=1), normal(2, 5, 64, seed=2)
    lse1, lse2 = normal(2, 5, seed=3), normal(2, 5, seed=4)
    none = -torch.inf
    lse1[0, 1] = lse2[0, 2] = lse1[1, 3] = lse2[1, 3] = none
    o1[0, 1], o2[0, 2], o1[1, 3], o2[1, 3] = torch.nan, torch.inf, torch.nan, torch.nan
    exact, exact_lse = reference(o1, lse1, o2, lse2, dtype=torch.float64)
    found, lse = merge_partials(o1, lse1, o2, lse2, out=o1)
    assert found is o1
    assert error(found, exact) < 1e-6
    assert torch.equal(found[0, 1], o2[0, 1])
    assert (found[1, 3] == 0).all()
    assert lse[1, 3] == exact_lse[1, 3] == none
    assert error(lse[0], exact_lse[0]) < 1e-6


def test_what_does_not_fit():
    o, lse = normal(2, 5, 64), normal(2, 5)
    for function in (merge_partials, reference):
        with pytest.raises(ValueError, match="do not fit"):
            function(o, lse, o, lse[:, :4])
    with pytest.raises(ValueError, match="contiguous"):
        merge_partials(o.transpose(0, 1), lse.T, o.transpose(0, 1), lse.T)
