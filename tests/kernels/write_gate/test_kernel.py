"""The write gate: the kernel against the reference in float64, and the reference against its formula."""

import math

import pytest
import torch
from kernel_cases import TYPES, error, normal
from kvsim_kernels.write_gate import write_gate as reference
from kvsim_kernels.write_gate.kernel import write_gate


def inputs(kv_heads, count, dim, hidden, dtype=torch.float32, weight_dtype=None):
    weight_dtype = dtype if weight_dtype is None else weight_dtype
    # Keys of different sizes, which the norms make equal.
    scale = torch.logspace(-1, 1, count).view(1, -1, 1).to(normal(1).device)
    return (
        (normal(kv_heads, count, dim, seed=1) * scale).to(dtype),
        (normal(kv_heads, count, dim, seed=2) * scale).to(dtype),
        (normal(kv_heads, hidden, 2 * dim, seed=3) * dim**-0.5).to(weight_dtype),
        normal(kv_heads, hidden, seed=4).to(weight_dtype),
        (normal(kv_heads, hidden, seed=5) * 2 * hidden**-0.5).to(weight_dtype),
        normal(kv_heads, seed=6).to(weight_dtype),
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "count", "dim", "hidden"),
    [
        (1, 1, 64, 48),
        (3, 150, 64, 48),
        (2, 16, 128, 100),
        (8, 3, 128, 32),
        (2, 37, 80, 7),
        (1, 130, 96, 64),
        (1, 17, 256, 65),
    ],
)
def test_shapes(kv_heads, count, dim, hidden, dtype):
    given = inputs(kv_heads, count, dim, hidden, dtype)
    found, exact = write_gate(*given), reference(*given, dtype=torch.float64)
    assert found.dtype == torch.float32
    # Keys and weights are multiplied as they are, so that only sums are rounded.
    assert error(found, exact) < 5e-6
    assert exact.numel() < 30 or float(exact.std()) > 0.05


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
def test_weights_in_single_precision(dtype):
    given = inputs(2, 40, 64, 48, dtype, torch.float32)
    assert error(write_gate(*given), reference(*given, dtype=torch.float64)) < 2e-6


def unit(weights, bias, x):
    a = sum(w * v for w, v in zip(weights, x, strict=True)) + bias
    return a * 0.5 * (1 + math.erf(a / math.sqrt(2)))


def test_it_is_the_formula():
    pre, post, w1, b1, w2, b2 = (x.double() for x in inputs(2, 3, 16, 5))
    found = reference(pre, post, w1, b1, w2, b2, dtype=torch.float64)
    for head in range(2):
        for n in range(3):
            keys = pre[head, n].tolist(), post[head, n].tolist()
            x = [v / math.sqrt(sum(u * u for u in key) / 16 + 1e-6) for key in keys for v in key]
            units = [unit(row, b, x) for row, b in zip(w1[head].tolist(), b1[head].tolist(), strict=True)]
            z = sum(w * a for w, a in zip(w2[head].tolist(), units, strict=True)) + float(b2[head])
            assert float(found[head, n]) == pytest.approx(1 / (1 + math.exp(-z)), abs=1e-12)


def test_views_and_a_given_output():
    given = inputs(2, 20, 64, 48)
    wide = torch.stack([given[0].transpose(0, 1), given[1].transpose(0, 1)], 1)
    out = torch.empty(2, 20, device=wide.device)
    found = write_gate(wide[:, 0].transpose(0, 1), wide[:, 1].transpose(0, 1), *given[2:], out=out)
    assert found is out
    assert error(found, reference(*given, dtype=torch.float64)) < 2e-6


def test_a_zero_key():
    given = inputs(1, 4, 64, 48)
    given[0][0, 1] = given[1][0, 1] = 0
    found, exact = write_gate(*given), reference(*given, dtype=torch.float64)
    assert torch.isfinite(found).all()
    assert error(found, exact) < 2e-6


def test_what_does_not_fit():
    given = inputs(2, 4, 64, 48)
    for function in (write_gate, reference):
        with pytest.raises(ValueError, match="must both be"):
            function(given[0], given[1][:, :2], *given[2:])
        with pytest.raises(ValueError, match="do not fit 2 KV heads"):
            function(*given[:2], given[2][:, :, :64], *given[3:])
    with pytest.raises(ValueError, match="contiguous"):
        write_gate(*given[:2], given[2].transpose(1, 2).contiguous().transpose(1, 2), *given[3:])
