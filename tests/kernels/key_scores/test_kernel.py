"""Scores of keys: the kernel against the reference in float64, and that against the definition in kvsim."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, ints, normal
from kvsim_kernels.key_scores import KINDS
from kvsim_kernels.key_scores import key_scores as reference
from kvsim_kernels.key_scores.kernel import key_scores

from kvsim.scoring import unit_vectors


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kv_heads", "dim", "slots", "splits"), [(2, 64, 77, 3), (1, 128, 331, 4), (3, 80, 49, 1), (1, 256, 67, 5)]
)
def test_shapes_and_unequal_lengths(kv_heads, dim, slots, splits, kind, dtype):
    keys = normal(2, kv_heads, slots, dim, seed=1, dtype=dtype)
    lengths = ints(slots, slots // 3)
    # What lies beyond the length is not read.
    keys[1, :, slots // 3 :] = torch.nan
    out = torch.full((2, kv_heads, slots), 7.0, device=DEVICE)
    found = key_scores(keys, lengths, kind, out=out, splits=splits)
    assert found is out
    exact = reference(keys, lengths, kind, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        assert error(found[row, :, :length], exact[row, :, :length]) < 1e-6
        assert (found[row, :, length:] == 7).all()
    assert float((key_scores(keys, lengths, kind) - exact).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_are_zero_tiny_or_huge(kind):
    keys = normal(1, 1, 40, 64, seed=1)
    keys[0, 0, 5] = 0
    keys[0, 0, 6] *= 1e-25
    keys[0, 0, 7] *= 1e25
    exact = reference(keys, ints(40), kind, dtype=torch.float64)
    found = key_scores(keys, ints(40), kind)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-30 if kind == "norm" else 1e-6)
    assert float(found[0, 0, 5]) == 0


def test_keys_that_cancel_out_score_zero():
    keys = torch.ones(1, 1, 2, 64, device=DEVICE)
    keys[0, 0, 1] *= -1
    assert (key_scores(keys, ints(2), "cosine") == 0).all()
    assert (reference(keys, ints(2), "cosine") == 0).all()


def test_a_view_of_a_larger_cache_is_scored_as_kvsim_defines_it():
    wide = normal(1, 2, 50, 2, 64, seed=3)
    keys = wide[:, :, :, 0]
    unit = unit_vectors(keys[0].double().cpu().numpy())
    anchor = unit.mean(axis=1, keepdims=True)
    wanted = -(unit * anchor).sum(-1) / np.linalg.norm(anchor, axis=-1)
    found = key_scores(keys, ints(50), "cosine")[0].double().cpu().numpy()
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_what_does_not_fit():
    keys = normal(1, 2, 10, 64)
    for score in (key_scores, reference):
        with pytest.raises(ValueError, match="must be one of norm, cosine, got 'size'"):
            score(keys, ints(10), "size")
        with pytest.raises(ValueError, match="a length for each"):
            score(keys, ints(10, 10), "norm")
    with pytest.raises(ValueError, match="contiguous"):
        key_scores(keys, ints(10), "norm", out=torch.empty(1, 2, 11, device=DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        key_scores(keys.transpose(2, 3).contiguous().transpose(2, 3), ints(10), "norm")
