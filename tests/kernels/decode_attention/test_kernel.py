"""Decode attention: the kernel against the reference in float64."""

import pytest
import torch
from kernel_cases import DEVICE, TYPES, error, ints, normal
from kvsim_kernels.decode_attention import decode_attention as reference
from kvsim_kernels.decode_attention.kernel import decode_attention, decode_logits

# kv_heads, group, dim, slots, splits
SHAPES = [
    (2, 1, 64, 77, 3),
    (2, 3, 64, 130, 2),
    (1, 4, 128, 331, 4),
    (1, 7, 128, 65, 1),
    (1, 8, 96, 200, 3),
    (2, 4, 80, 49, 5),
    (1, 4, 256, 67, 2),
    (1, 20, 64, 33, 1),
]


def inputs(kv_heads, group, dim, slots, dtype=torch.float32, batch=1):
    return (
        normal(batch, kv_heads * group, dim, seed=1, dtype=dtype),
        normal(batch, kv_heads, slots, dim, seed=2, dtype=dtype),
        normal(batch, kv_heads, slots, dim, seed=3, dtype=dtype),
    )


def logits_agree(found, exact, lengths, limit):
    for row, length in enumerate(lengths.tolist()):
        mine, theirs = found.logits[row, :, :length], exact.logits[row, :, :length]
        seen = theirs > -torch.inf
        assert torch.equal(mine > -torch.inf, seen)
        assert error(mine[seen], theirs[seen]) < limit
    seen = exact.lse > -torch.inf
    assert torch.equal(found.lse > -torch.inf, seen)
    assert float((found.lse[seen].double() - exact.lse[seen]).abs().max()) < 20 * limit


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "group", "dim", "slots", "splits"), SHAPES)
def test_shapes(kv_heads, group, dim, slots, splits, dtype):
    query, keys, values = inputs(kv_heads, group, dim, slots, dtype)
    lengths = ints(slots - 1)
    # What lies beyond the length is not read.
    keys[:, :, -1] = values[:, :, -1] = torch.nan
    found = decode_attention(query, keys, values, lengths, with_logits=True, splits=splits)
    exact = reference(query, keys, values, lengths, with_logits=True, dtype=torch.float64)
    single = reference(query, keys, values, lengths)
    limit = 2e-6 if dtype == torch.float32 else 2 * error(single.output, exact.output)
    assert error(found.output, exact.output) < limit
    assert found.output.dtype == dtype
    logits_agree(found, exact, lengths, 1e-6)
    # Probabilities that sum to 1 are what the scores are made of.
    mass = torch.exp(found.logits[0, :, : slots - 1] - found.lse[0, :, None]).sum(-1)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"sinks": True},
        {"scaling": 0.3, "softcap": 50.0, "sinks": True},
        {"scaling": 0.3, "softcap": 5.0},
        {"positions": "shared"},
        {"positions": "head"},
        {"positions": "shared", "window": 20},
        {"positions": "head", "window": 9, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
def test_options_and_a_batch_of_unequal_lengths(options, dtype):
    batch, kv_heads, slots = 3, 2, 70
    query, keys, values = inputs(kv_heads, 3, 64, slots, dtype, batch)
    lengths = ints(70, 1, 41)
    chosen = {key: options[key] for key in ("softcap", "scaling", "window") if key in options}
    if "sinks" in options:
        chosen["sink_logits"] = normal(kv_heads * 3, seed=4, dtype=dtype) * 2
    if "positions" in options:
        heads = kv_heads if options["positions"] == "head" else 1
        order = [torch.randperm(slots, generator=torch.Generator().manual_seed(s)) for s in range(batch * heads)]
        positions = torch.stack(order).view(batch, heads, slots).to(DEVICE, torch.int32)
        # Each head has empty slots, whose contents are garbage.
        positions[positions % 5 == 3] = -1
        empty = (positions < 0).expand(batch, kv_heads, slots).unsqueeze(-1)
        keys, values = keys.masked_fill(empty, torch.nan), values.masked_fill(empty, torch.inf)
        chosen |= {"positions": positions, "query_positions": ints(70, 70, 72)}
    found = decode_attention(query, keys, values, lengths, with_logits=True, splits=3, **chosen)
    exact = reference(query, keys, values, lengths, with_logits=True, dtype=torch.float64, **chosen)
    single = reference(query, keys, values, lengths, **chosen)
    assert torch.isfinite(found.output).all()
    limit = 2e-6 if dtype == torch.float32 else 2 * error(single.output, exact.output)
    assert error(found.output, exact.output) < limit
    logits_agree(found, exact, lengths, 2e-6)


def test_nothing_visible_gives_zero():
    query, keys, values = inputs(1, 2, 64, 8, batch=2)
    positions = torch.full((2, 1, 8), -1, device=DEVICE, dtype=torch.int32)
    for lengths, options in ((ints(0, 0), {}), (ints(8, 3), {"positions": positions})):
        for sinks in (None, normal(2)):
            for attend in (decode_attention, reference):
                found = attend(query, keys, values, lengths, with_logits=True, sink_logits=sinks, **options)
                assert (found.output == 0).all()
                assert (found.lse == -torch.inf).all()


def test_views_of_a_larger_cache_and_given_outputs():
    query, keys, values = inputs(2, 2, 64, 60)
    wide = torch.stack([keys, values], dim=3)
    keys, values = wide[:, :, 5:55, 0], wide[:, :, 5:55, 1]
    lengths = ints(50)
    outputs = {
        "out": torch.empty(1, 4, 64, device=DEVICE),
        "logits": torch.empty(1, 4, 50, device=DEVICE),
        "lse": torch.empty(1, 4, device=DEVICE),
    }
    found = decode_attention(query, keys, values, lengths, with_logits=True, **outputs)
    exact = reference(query, keys, values, lengths, with_logits=True, dtype=torch.float64)
    assert found.output is outputs["out"]
    assert found.logits is outputs["logits"]
    assert found.lse is outputs["lse"]
    assert error(found.output, exact.output) < 1e-6
    logits_agree(found, exact, lengths, 1e-6)
    alone = decode_attention(query, keys, values, lengths)
    assert alone.logits is None
    assert torch.equal(alone.output, found.output)


def test_a_great_logit_does_not_overflow():
    query, keys, values = inputs(1, 1, 64, 40)
    keys[0, 0, 11] = query[0, 0] * 100
    exact = reference(query, keys, values, ints(40), dtype=torch.float64)
    assert error(decode_attention(query, keys, values, ints(40), splits=2).output, exact.output) < 1e-6
    assert error(values[:, :, 11], exact.output) < 1e-6


def test_shapes_that_do_not_fit():
    query, keys, values = inputs(2, 2, 64, 10)
    for attend in (decode_attention, reference):
        with pytest.raises(ValueError, match="does not fit"):
            attend(query[:, :3], keys, values, ints(10))
        with pytest.raises(ValueError, match="window=4"):
            attend(query, keys, values, ints(10), window=4)
        with pytest.raises(ValueError, match="positions of shape"):
            attend(query, keys, values, ints(10), positions=torch.zeros(1, 3, 10, device=DEVICE))
    with pytest.raises(ValueError, match="share a type"):
        decode_attention(query.half(), keys, values, ints(10))
    with pytest.raises(ValueError, match="contiguous"):
        decode_attention(query, keys.transpose(2, 3).contiguous().transpose(2, 3), values, ints(10))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"scaling": 0.3, "softcap": 5.0}, {"positions": True}], ids=str)
def test_logits_alone_are_those_beside_the_output(options, dtype):
    """Values are not read: none are given."""
    query, keys, values = inputs(2, 3, 64, 70, dtype, batch=2)
    options = dict(options)
    if options.pop("positions", False):
        options["positions"] = torch.where(torch.arange(70, device=DEVICE) % 5 == 3, -1, 1).int().view(1, 1, 70)
    lengths = ints(70, 33)
    beside = decode_attention(query, keys, values, lengths, with_logits=True, splits=3, **options)
    given = torch.full((2, 6, 70), torch.nan, device=DEVICE), torch.full((2, 6), torch.nan, device=DEVICE)
    logits, lse = decode_logits(query, keys, lengths, splits=3, logits=given[0], lse=given[1], **options)
    assert logits is given[0]
    assert lse is given[1]
    for row, length in enumerate((70, 33)):
        assert torch.equal(logits[row, :, :length], beside.logits[row, :, :length])
    assert torch.equal(lse, beside.lse)
    assert torch.equal(decode_logits(query, keys, lengths, splits=3, **options)[1], lse)
    with pytest.raises(ValueError, match="share a type"):
        decode_logits(query.double(), keys, lengths)
