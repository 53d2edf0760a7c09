"""Prompt mass: the kernel against the reference."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, normal
from kvsim_kernels.prompt_mass import prompt_mass as reference
from kvsim_kernels.prompt_mass.kernel import prompt_mass


def inputs(kv_heads, group, dim, length, dtype=torch.float32):
    # As a model has them: heads of a position lie together.
    queries = normal(length, kv_heads * group, dim, seed=1, dtype=dtype).transpose(0, 1) * 2
    return queries, normal(kv_heads, length, dim, seed=2, dtype=dtype)


def close(found, queries, keys, **options):
    exact = reference(queries, keys, **options).double()
    assert found.dtype == torch.float32
    assert error(found, exact) < 3e-6


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "length"), [(2, 1, 64, 77), (1, 3, 80, 130), (1, 2, 128, 300), (1, 1, 256, 140)]
)
def test_shapes(kv_heads, group, dim, length, dtype):
    queries, keys = inputs(kv_heads, group, dim, length, dtype)
    found = prompt_mass(queries, keys)
    close(found, queries, keys)
    torch.testing.assert_close(
        found.sum(-1), torch.full((kv_heads * group,), float(length), device=DEVICE), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 1},
        {"sliding_window": 2},
        {"sliding_window": 70},
        {"sliding_window": 1000},
        {"chunk_size": 50},
        {"chunk_size": 128},
        {"softcap": 2.0, "scaling": 0.3},
        {"sinks": True, "sliding_window": 90},
    ],
    ids=str,
)
def test_options(options):
    queries, keys = inputs(1, 2, 64, 290)
    chosen = {key: value for key, value in options.items() if key != "sinks"}
    if "sinks" in options:
        chosen["sink_logits"] = torch.tensor([-1.0, 4.0], device=DEVICE)
    close(prompt_mass(queries, keys, **chosen), queries, keys, **chosen)


def test_a_single_position():
    queries, keys = inputs(2, 2, 64, 1)
    assert (prompt_mass(queries, keys) == 1).all()


def test_what_does_not_fit():
    queries, keys = inputs(2, 2, 64, 10)
    with pytest.raises(ValueError, match="do not fit keys"):
        prompt_mass(queries[:3], keys)
    with pytest.raises(ValueError, match="share a type"):
        prompt_mass(queries.double(), keys.double())
    with pytest.raises(ValueError, match="contiguous"):
        prompt_mass(queries, keys.transpose(1, 2).contiguous().transpose(1, 2))
