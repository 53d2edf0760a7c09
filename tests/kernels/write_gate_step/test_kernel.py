"""The write gate of a decode step: the kernel against the reference in float64, and the reference against the gate."""

import pytest
import torch
from kernel_cases import TYPES, error, normal
from kvsim_kernels.write_gate import write_gate
from kvsim_kernels.write_gate_step import unrotated
from kvsim_kernels.write_gate_step import write_gate_step as reference
from kvsim_kernels.write_gate_step.kernel import write_gate_step

FIRST = 5


def inputs(batch, kv_heads, dim, hidden, *, rotated=None, dtype=torch.float32, weight_dtype=torch.float32):
    rotated = dim if rotated is None else rotated
    angles = normal(7, rotated // 2, seed=8) * 3
    positions = torch.arange(FIRST, FIRST + batch, dtype=torch.int32, device=angles.device).flip(0)
    # Keys of different sizes, which the norms make equal.
    scale = torch.logspace(-1, 1, batch).view(-1, 1, 1).to(angles.device)
    return (
        (normal(batch, kv_heads, dim, seed=1) * scale).to(dtype), angles.cos(), angles.sin(), positions,
        (normal(kv_heads, hidden, 2 * dim, seed=3) * dim**-0.5).to(weight_dtype),
        normal(kv_heads, hidden, seed=4).to(weight_dtype),
        (normal(kv_heads, hidden, seed=5) * 2 * hidden**-0.5).to(weight_dtype),
        normal(kv_heads, seed=6).to(weight_dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("batch", "kv_heads", "dim", "hidden", "rotated"),
    [(1, 1, 64, 48, 64), (3, 2, 128, 100, 128), (2, 3, 80, 7, 32), (1, 8, 16, 33, 8), (2, 1, 96, 1, 96)],
)
def test_shapes(batch, kv_heads, dim, hidden, rotated, dtype, weight_dtype):
    given = inputs(batch, kv_heads, dim, hidden, rotated=rotated, dtype=dtype, weight_dtype=weight_dtype)
    found = write_gate_step(*given, first_position=FIRST)
    exact = reference(*given, first_position=FIRST, dtype=torch.float64)
    assert found.shape == (batch * kv_heads,)
    assert found.dtype == torch.float32
    assert error(found, exact) < 5e-6


def test_it_is_the_gate_of_keys_turned_back():
    keys, cos, sin, positions, *weights = (
        x.double() if x.is_floating_point() else x for x in inputs(3, 2, 32, 20)
    )  # fmt: skip
    found = reference(keys, cos, sin, positions, *weights, first_position=FIRST, dtype=torch.float64)
    for row, position in enumerate(positions.tolist()):
        at = position - FIRST
        before = unrotated(keys[row], cos[at], sin[at])
        turned = torch.cat(
            [before[:, :16] * cos[at] - before[:, 16:] * sin[at], before[:, 16:] * cos[at] + before[:, :16] * sin[at]],
            dim=-1,
        )
        assert error(turned, keys[row]) < 1e-6
        gates = write_gate(before.unsqueeze(1), keys[row].unsqueeze(1), *weights, dtype=torch.float64)
        assert error(found.view(3, 2)[row], gates[:, 0]) < 1e-12


def test_keys_may_be_strided_and_where_to_write_may_be_given():
    given = inputs(2, 3, 64, 48)
    wide = normal(2, 3, 4, 64, seed=9)
    wide[:, :, 1] = given[0]
    out = torch.full((6,), torch.nan, device=wide.device)
    found = write_gate_step(wide[:, :, 1], *given[1:], first_position=FIRST, out=out)
    assert found is out
    assert torch.equal(found, write_gate_step(*given, first_position=FIRST))


def test_what_it_refuses():
    keys, cos, sin, positions, *weights = inputs(2, 3, 64, 48)
    with pytest.raises(ValueError, match="positions of shape"):
        write_gate_step(keys, cos, sin, positions[:1], *weights)
    with pytest.raises(ValueError, match="at most d=32"):
        write_gate_step(keys[..., :32], cos, sin, positions, *weights)
    with pytest.raises(ValueError, match="do not fit"):
        write_gate_step(keys[:, :2], cos, sin, positions, *weights)
    with pytest.raises(ValueError, match="contiguous"):
        write_gate_step(keys.transpose(0, 2).contiguous().transpose(0, 2), cos, sin, positions, *weights)
