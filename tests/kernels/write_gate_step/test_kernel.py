"""The write gates of a decode step: the kernel against the reference in float64, and the reference against the gate."""

import pytest
import torch
from kernel_cases import TYPES, error, normal
from kvsim_kernels.write_gate import write_gate
from kvsim_kernels.write_gate_step import unrotated
from kvsim_kernels.write_gate_step import write_gate_step as reference
from kvsim_kernels.write_gate_step.kernel import write_gate_step

FIRST = 5
SLOTS = 5


def inputs(layers, batch, kv_heads, dim, hidden, *, rotated=None, dtype=torch.float32, weight_dtype=torch.float32):
    rotated = dim if rotated is None else rotated
    angles = normal(layers, 7, rotated // 2, seed=8) * 3
    positions = torch.arange(FIRST, FIRST + batch, dtype=torch.int32, device=angles.device).flip(0)
    # Keys of different sizes, which the norms make equal.
    scale = torch.logspace(-1, 1, batch).view(-1, 1, 1, 1).to(angles.device)
    slots = torch.arange(layers * batch * kv_heads, dtype=torch.int32, device=angles.device) * 2 % SLOTS
    return (
        (normal(layers, batch, kv_heads, SLOTS, dim, seed=1) * scale).to(dtype),
        slots.view(layers, batch, kv_heads), angles.cos(), angles.sin(), positions,
        (normal(layers, kv_heads, hidden, 2 * dim, seed=3) * dim**-0.5).to(weight_dtype),
        normal(layers, kv_heads, hidden, seed=4).to(weight_dtype),
        (normal(layers, kv_heads, hidden, seed=5) * 2 * hidden**-0.5).to(weight_dtype),
        normal(layers, kv_heads, seed=6).to(weight_dtype),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("layers", "batch", "kv_heads", "dim", "hidden", "rotated"),
    [(1, 1, 1, 64, 48, 64), (2, 3, 2, 128, 100, 128), (3, 2, 3, 80, 7, 32), (2, 1, 8, 16, 33, 8), (1, 2, 1, 96, 1, 96)],
)
def test_shapes(layers, batch, kv_heads, dim, hidden, rotated, dtype, weight_dtype):
    given = inputs(layers, batch, kv_heads, dim, hidden, rotated=rotated, dtype=dtype, weight_dtype=weight_dtype)
    found = write_gate_step(*given, first_position=FIRST)
    exact = reference(*given, first_position=FIRST, dtype=torch.float64)
    assert found.shape == (layers, batch, kv_heads)
    assert found.dtype == torch.float32
    assert error(found, exact) < 5e-6


def test_it_is_the_gate_of_keys_turned_back():
    given = inputs(2, 3, 2, 32, 20)
    keys, slots, cos, sin, positions, *weights = (x.double() if x.is_floating_point() else x for x in given)
    found = reference(keys, slots, cos, sin, positions, *weights, first_position=FIRST, dtype=torch.float64)
    for layer in range(2):
        own = [part[layer] for part in weights]
        for row, position in enumerate(positions.tolist()):
            c, s = cos[layer, position - FIRST], sin[layer, position - FIRST]
            after = torch.stack([keys[layer, row, head, slots[layer, row, head]] for head in range(2)])
            before = unrotated(after, c, s)
            turned = torch.cat(
                [before[:, :16] * c - before[:, 16:] * s, before[:, 16:] * c + before[:, :16] * s], dim=-1
            )
            assert error(turned, after) < 1e-6
            gates = write_gate(before.unsqueeze(1), after.unsqueeze(1), *own, dtype=torch.float64)
            assert error(found[layer, row], gates[:, 0]) < 1e-12


@pytest.mark.parametrize("function", [write_gate_step, reference])
def test_where_there_is_no_new_key_the_gate_is_0(function):
    given = inputs(2, 2, 3, 64, 48)
    whole = function(*given, first_position=FIRST)
    slots = given[1].clone()
    slots[0, 1, 2] = slots[1, 0, 0] = -1
    found = function(given[0], slots, *given[2:], first_position=FIRST)
    assert found[0, 1, 2] == found[1, 0, 0] == 0
    assert torch.equal(found[slots >= 0], whole[slots >= 0])
    assert (whole > 0).all()


def test_keys_may_be_strided_and_where_to_write_may_be_given():
    given = inputs(2, 2, 3, 64, 48)
    wide = normal(2, 2, 3, SLOTS + 2, 70, seed=9)[..., 1 : SLOTS + 1, :64]
    wide.copy_(given[0])
    out = torch.full((2, 2, 3), torch.nan, device=wide.device)
    found = write_gate_step(wide, *given[1:], first_position=FIRST, out=out)
    assert found is out
    assert torch.equal(found, write_gate_step(*given, first_position=FIRST))


def test_what_it_refuses():
    keys, slots, cos, sin, positions, *weights = inputs(2, 2, 3, 64, 48)
    with pytest.raises(ValueError, match="positions of shape"):
        write_gate_step(keys, slots, cos, sin, positions[:1], *weights)
    with pytest.raises(ValueError, match="slots of shape"):
        write_gate_step(keys, slots[:1], cos, sin, positions, *weights)
    with pytest.raises(ValueError, match="at most d=32"):
        write_gate_step(keys[..., :32], slots, cos, sin, positions, *weights)
    with pytest.raises(ValueError, match="of K=2 layers"):
        write_gate_step(keys, slots, cos, sin, positions, weights[0][:1], *weights[1:])
    with pytest.raises(ValueError, match="do not fit"):
        write_gate_step(keys[:, :, :2], slots[:, :, :2], cos, sin, positions, *weights)
    with pytest.raises(ValueError, match="contiguous"):
        write_gate_step(keys.transpose(3, 4).contiguous().transpose(3, 4), slots, cos, sin, positions, *weights)
