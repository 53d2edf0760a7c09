"""Attention rows: the kernel against the reference in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, normal
from kvsim_kernels.attention_rows import attention_row as reference
from kvsim_kernels.attention_rows.kernel import attention_row


def inputs(kv_heads, group, dim, length, dtype=torch.float32):
    return (
        normal(kv_heads * group, dim, seed=1, dtype=dtype),
        normal(kv_heads, length, dim, seed=2, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "length", "splits"),
    [
        (2, 1, 64, 77, 3),
        (3, 3, 64, 130, 2),
        (1, 4, 128, 1331, 4),
        (2, 7, 80, 65, 1),
        (1, 8, 96, 200, 30),
        (1, 4, 256, 1, 1),
    ],
)
def test_shapes(kv_heads, group, dim, length, splits, dtype):
    query, keys = inputs(kv_heads, group, dim, length, dtype)
    exact = reference(query, keys, dtype=torch.float64)
    for found in (attention_row(query, keys, splits=splits), attention_row(query, keys)):
        assert found.dtype == torch.float32
        assert error(found, exact) < 2e-6
        torch.testing.assert_close(found.sum(-1), torch.ones(kv_heads * group, device=DEVICE), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": True},
        {"scaling": 0.7, "softcap": 30.0, "sinks": True},
        {"sinks": True, "mask": "bool"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_options(options, dtype):
    query, keys = inputs(2, 3, 64, 90, dtype)
    chosen = {key: options[key] for key in ("softcap", "scaling") if key in options}
    if "sinks" in options:
        chosen["sink_logits"] = torch.linspace(-1, 5, 6, device=DEVICE)
    if "mask" in options:
        chosen["mask"] = torch.arange(90, device=DEVICE) % 3 > 0
    found = attention_row(query, keys, splits=3, **chosen)
    exact = reference(query, keys, dtype=torch.float64, **chosen)
    assert error(found, exact) < 2e-6
    assert torch.equal(found == 0, exact == 0)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16], ids=str)
def test_masks(kind, rows):
    query, keys = inputs(2, 2, 64, 50)
    seen = torch.arange(50, device=DEVICE) >= 30
    if rows:
        seen = seen.expand(4, 50) & (torch.arange(50, device=DEVICE) % 7 != torch.arange(4, device=DEVICE)[:, None])
    mask = seen if kind == torch.bool else torch.zeros(seen.shape, device=DEVICE, dtype=kind).masked_fill(~seen, -1e38)
    found = attention_row(query, keys, mask=mask, splits=2)
    assert error(found, reference(query, keys, mask=mask, dtype=torch.float64)) < 1e-6
    assert (found[~seen.expand(4, 50)] == 0).all()


def test_the_type_of_a_trace():
    query, keys = inputs(2, 2, 64, 300)
    query[0] *= 20
    found = attention_row(query, keys, dtype=torch.float16, scale=2**15)
    exact = reference(query, keys, dtype=torch.float64) * 2**15
    assert found.dtype == torch.float16
    assert error(found, exact) < 2 * error(exact.half(), exact)
    out = torch.empty(4, 300, device=DEVICE, dtype=torch.float16)
    assert attention_row(query, keys, scale=2**15, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("kind", ["plain", "sinks"])
@pytest.mark.parametrize(
    ("kv_heads", "group", "length", "splits"), [(3, 3, 130, 2), (1, 4, 700, 5), (2, 1, 1, 1), (8, 4, 70, None)]
)
def test_head_means_and_sums(kv_heads, group, length, splits, kind):
    query, keys = inputs(kv_heads, group, 64, length)
    heads = kv_heads * group
    sinks = torch.linspace(-1, 5, heads, device=DEVICE) if kind == "sinks" else None
    exact = reference(query, keys, sink_logits=sinks, dtype=torch.float64)
    rows, means = (torch.full((heads,), torch.nan, device=DEVICE) for _ in range(2))
    attention_row(query, keys, sink_logits=sinks, sums=rows, splits=splits)
    found = attention_row(query, keys, sink_logits=sinks, mean=True, sums=means, splits=splits)
    assert found.shape == (length,)
    assert error(found, exact.mean(0)) < 2e-6
    assert error(rows, exact.sum(-1)) < 1e-6
    # Compiled, the two kernels sum in orders of their own.
    torch.testing.assert_close(means, rows, rtol=2e-6, atol=0)
    assert kind == "sinks" or ((rows - 1).abs() < 2e-6).all()
    half = torch.empty(length + 3, device=DEVICE, dtype=torch.float16)
    attention_row(query, keys, sink_logits=sinks, mean=True, scale=2**15, out=half[1:-2], splits=splits)
    scaled = exact.mean(0) * 2**15
    assert error(half[1:-2], scaled) < 2 * error(scaled.half(), scaled) + 1e-6
    assert half[0].isnan()
    assert half[-2:].isnan().all()


def test_rows_into_the_end_of_longer_ones():
    query, keys = inputs(2, 2, 64, 75)
    wide = torch.empty(4, 81, device=DEVICE)
    attention_row(query, keys, out=wide[:, 6:], splits=2)
    assert error(wide[:, 6:], reference(query, keys, dtype=torch.float64)) < 1e-6
    assert wide[:, :6].isnan().all()
    for out in (wide, wide[:, 6:].T, wide[0, 6:]):
        with pytest.raises(ValueError, match=r"out must be \[4, 75\] with a contiguous last dimension"):
            attention_row(query, keys, out=out)


def test_nothing_visible_gives_zero():
    query, keys = inputs(1, 2, 64, 20)
    hidden = torch.zeros(20, device=DEVICE, dtype=torch.bool)
    sums = torch.ones(2, device=DEVICE)
    assert (attention_row(query, keys, mask=hidden, sums=sums) == 0).all()
    assert (sums == 0).all()
    assert (attention_row(query, keys, mask=hidden, mean=True) == 0).all()


def test_a_cache_seen_through_a_view():
    query, keys = inputs(2, 2, 64, 40)
    wide = torch.cat([keys, torch.full_like(keys, torch.nan)], 1)[:, :40]
    assert error(attention_row(query, wide), reference(query, keys, dtype=torch.float64)) < 1e-6


def test_what_does_not_fit():
    query, keys = inputs(2, 2, 64, 10)
    with pytest.raises(ValueError, match="do not fit keys"):
        attention_row(query[:3], keys)
    with pytest.raises(ValueError, match="share a type"):
        attention_row(query.half(), keys)
    with pytest.raises(ValueError, match="share a type"):
        attention_row(query.double(), keys.double())
    with pytest.raises(ValueError, match="contiguous"):
        attention_row(query, keys.transpose(1, 2).contiguous().transpose(1, 2))
