"""Attention rows: the kernel against the reference in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, normal
from kvsim_kernels.attention_rows import attention_row as reference
from kvsim_kernels.attention_rows import kernel as module
from kvsim_kernels.attention_rows import layer_rows as reference_rows
from kvsim_kernels.attention_rows.kernel import attention_row, layer_rows


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


def layers(count, kv_heads, group, dim, length, dtype, *, room=0):
    """Queries and keys of layers, whose keys lie apart with room before them."""
    queries = normal(count, kv_heads * group, dim, seed=10, dtype=dtype)
    keys = [normal(kv_heads, room + length, dim, seed=50 + layer, dtype=dtype)[:, room:] for layer in range(count)]
    return queries, keys


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(
    ("count", "kv_heads", "group", "dim", "length", "splits"),
    [(3, 2, 3, 64, 77, 3), (1, 1, 4, 128, 300, None), (4, 2, 1, 80, 33, 2), (2, 1, 7, 96, 1, 1)],
)
def test_layers(count, kv_heads, group, dim, length, splits, mean, dtype):
    queries, keys = layers(count, kv_heads, group, dim, length, dtype, room=3)
    heads, wide = kv_heads * group, length + 5
    places = [count + 1, 0, 3, 1, 2][:count]
    shape = (count + 2, wide) if mean else (count + 2, heads, wide)
    out, sums = torch.full(shape, 7.0, device=DEVICE), torch.full((count + 2, heads), 7.0, device=DEVICE)
    exact, exact_sums = out.double(), sums.double()
    options = {"places": places, "scaling": 0.3, "softcap": 5.0, "scale": 3.0}
    layer_rows(queries, keys, out=out, sums=sums, splits=splits, **options)
    reference_rows(queries, keys, out=exact, sums=exact_sums, dtype=torch.float64, **options)
    assert error(out, exact) < 2e-6
    assert error(sums, exact_sums) < 2e-6
    assert (out[..., :5] == 7).all()
    others = [place for place in range(count + 2) if place not in places]
    assert (out[others] == 7).all()
    assert (sums[others] == 7).all()


@pytest.mark.parametrize("mean", [False, True])
def test_layers_with_sinks(mean):
    queries, keys = layers(3, 2, 2, 64, 40, torch.float32)
    sinks = [torch.linspace(layer - 2, 3, 4, device=DEVICE) for layer in range(3)]
    out, sums = torch.empty((3, 40) if mean else (3, 4, 40), device=DEVICE), torch.empty(3, 4, device=DEVICE)
    exact, exact_sums = out.double(), sums.double()
    layer_rows(queries, keys, places=[2, 0, 1], sink_logits=sinks, out=out, sums=sums)
    reference_rows(queries, keys, places=[2, 0, 1], sink_logits=sinks, out=exact, sums=exact_sums, dtype=torch.float64)
    assert error(out, exact) < 2e-6
    assert error(sums, exact_sums) < 2e-6


def test_layers_are_taken_together_as_far_as_their_logits_fit(monkeypatch):
    queries, keys = layers(5, 1, 2, 64, 20, torch.float16)
    out, sums = torch.empty(5, 2, 20, device=DEVICE), torch.empty(5, 2, device=DEVICE)
    monkeypatch.setattr(module, "_LOGITS_BYTES", 2 * 4 * 2 * 20)
    counts, launch = [], module._launch
    monkeypatch.setattr(module, "_launch", lambda *given: (counts.append(given[3]), launch(*given)))
    layer_rows(queries, keys, places=range(5), out=out, sums=sums)
    assert counts == [2, 2, 1]
    exact = torch.stack([reference(query, own, dtype=torch.float64) for query, own in zip(queries, keys, strict=True)])
    assert error(out, exact) < 2e-6


def test_keys_at_any_address():
    """Two numbers on from where an allocation begins, no load of 16 bytes is possible."""
    queries, _ = layers(2, 1, 2, 64, 30, torch.float16)
    keys = [normal(30 * 64 + 2, seed=layer, dtype=torch.float16)[2:].view(1, 30, 64) for layer in range(2)]
    assert keys[0].data_ptr() % 16
    out, sums = torch.empty(2, 2, 30, device=DEVICE), torch.empty(2, 2, device=DEVICE)
    layer_rows(queries, keys, places=[0, 1], out=out, sums=sums)
    exact = torch.stack([reference(query, own, dtype=torch.float64) for query, own in zip(queries, keys, strict=True)])
    assert error(out, exact) < 2e-6


def test_layers_that_do_not_fit():
    queries, keys = layers(2, 1, 2, 64, 20, torch.float16)
    good = {"places": [0, 1], "out": torch.empty(2, 2, 20, device=DEVICE), "sums": torch.empty(2, 2, device=DEVICE)}
    with pytest.raises(ValueError, match="one shape and one layout"):
        layer_rows(queries, [keys[0], keys[1][:, :9]], **good)
    with pytest.raises(ValueError, match="the queries' type and device"):
        layer_rows(queries.float(), keys, **good)
    with pytest.raises(ValueError, match="must be contiguous"):
        layer_rows(queries.transpose(1, 2).contiguous().transpose(1, 2), keys, **good)
    with pytest.raises(ValueError, match=r"places must be in 0\.\.1, got \[0, 2\]"):
        layer_rows(queries, keys, **good | {"places": [0, 2]})
    with pytest.raises(ValueError, match="do not fit"):
        layer_rows(queries, keys, **good | {"out": torch.empty(2, 2, 19, device=DEVICE)})
    for wrong in ({"places": [0]}, {"places": [1, 1]}, {"sink_logits": [torch.zeros(2, device=DEVICE)]}):
        with pytest.raises(ValueError, match="place of its own and sinks for each layer"):
            layer_rows(queries, keys, **good | wrong)
    with pytest.raises(ValueError, match="outputs must be contiguous"):
        layer_rows(queries, keys, **good | {"out": torch.empty(2, 2, 40, device=DEVICE)[..., ::2]})
