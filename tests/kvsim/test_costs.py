"""Floors by hand: bytes of weights and cache, operations, pairs of a mask, and the ratios of the paper's setting."""

import numpy as np
import pytest
from cases import SAMPLES

import kvsim
from kvsim.costs import HARDWARE, SHAPES, Cost, Hardware, Shape, causal_pairs, decode_cost, prefill_cost
from kvsim.errors import KvsimError

LLAMA, H200 = SHAPES["llama-3.1-8b"], HARDWARE["h200"]


@pytest.mark.parametrize(("name", "billions"), [("llama-3.1-8b", 8.03), ("qwen3-4b", 4.022), ("smollm2-135m", 0.1345)])
def test_presets_have_the_weights_of_their_names(name, billions):
    assert SHAPES[name].weight_bytes / 2e9 == pytest.approx(billions, rel=1e-3)


def test_decoding_at_400k_with_75_percent_removed():
    # 32 x (2 x 4096 x 4096 + 2 x 4096 x 1024 + 3 x 4096 x 14336) + 4096 x 128256 weights of 2 bytes.
    weights = 15_009_316_864
    # 400,000 tokens x 32 layers x 8 KV heads x 128 x 2 (key and value) x 2 bytes.
    cache = 52_428_800_000
    full, quarter = (decode_cost(LLAMA, H200, LLAMA.cached(n)) for n in (400_000, 100_000))
    assert full.bytes == weights + cache
    assert quarter.bytes == weights + cache / 4
    assert full.bound == quarter.bound == "bandwidth"
    assert full.seconds == (weights + cache) / 4.23e12
    assert full.seconds / quarter.seconds == pytest.approx(2.3985, abs=1e-4)
    half, eighth = (decode_cost(LLAMA, H200, LLAMA.cached(n)) for n in (200_000, 50_000))
    assert half.seconds / eighth.seconds == pytest.approx(1.9118, abs=1e-4)


def test_operations_count_a_multiply_add_as_two():
    tiny = Shape("tiny", layers=2, heads=4, kv_heads=2, head_dim=3, hidden=5, intermediate=7, vocab=11)
    layer = 5 * 12 + 2 * 5 * 6 + 12 * 5 + 3 * 5 * 7
    assert tiny.layer_weights == 2 * layer
    assert tiny.weight_bytes == 2 * (2 * layer + 2 * 5 * 11)
    one = decode_cost(tiny, Hardware("slow", 10.0, 1.0), tiny.cached(6), dtype_bytes=1, extra_bytes=9)
    # Each of the 2 x 4 query heads meets 6 keys and 6 values of 3 elements.
    assert one.operations == 2 * (2 * layer + 55) + 2 * 4 * 6 * 2 * 2 * 3
    assert one.bytes == 2 * (2 * layer + 55) + 2 * 2 * 6 * 2 * 3 + 9
    assert (one.bound, one.seconds) == ("compute", one.operations)
    many = decode_cost(tiny, Hardware("slow", 10.0, 1.0), tiny.cached(6), dtype_bytes=1, batch=3, extra_bytes=9)
    assert many.operations == 3 * one.operations
    assert many.bytes == one.bytes + 2 * (2 * 2 * 6 * 2 * 3 + 9)
    prefill = prefill_cost(tiny, Hardware("slow", 1e9, 1.0), 4)
    assert prefill.operations == 2 * (2 * layer * 4 + 55) + 2 * 4 * 10 * 4 * 3


def test_prefill_at_400k_costs_less_with_a_vertical_slash_mask():
    pairs = causal_pairs(400_000, 256, 0.25)
    dense, sparse = prefill_cost(LLAMA, H200, 400_000), prefill_cost(LLAMA, H200, 400_000, pairs)
    assert dense.bound == sparse.bound == "compute"
    # 2 x 6.979e9 x 4e5 of products and 4 x 128 x 32 x 32 x 8e10 of attention, at 7.9e14 a second.
    assert dense.seconds == pytest.approx((5.583e15 + 4.194e16) / 7.9e14, rel=1e-3)
    assert dense.seconds / sparse.seconds == pytest.approx((5.583 + 41.94) / (5.583 + 10.54), rel=1e-3)


@pytest.mark.parametrize(("length", "window"), [(1, 1), (9, 1), (9, 4), (9, 9), (9, 20)])
def test_pairs_are_those_of_the_mask(length, window):
    rng = np.random.default_rng(length)
    admitted = rng.random((3, length)) < 0.5
    i, j = np.arange(length)[:, np.newaxis], np.arange(length)
    masks = (j <= i) & ((i - j < window) | admitted[:, np.newaxis])
    assert causal_pairs(length, window, admitted) == masks.sum() / 3
    assert causal_pairs(length, window) == ((j <= i) & (i - j < window)).sum()
    assert causal_pairs(length, window, 1.0) == causal_pairs(length) == length * (length + 1) / 2


def test_a_recordings_configuration_is_a_shape():
    config = kvsim.open_trace(SAMPLES / "smollm2-needle-512").manifest.model["config"]
    shape, preset = Shape.of_config(config, "x"), SHAPES["smollm2-135m"]
    assert {**vars(shape), "name": ""} == {**vars(preset), "name": ""}
    assert Shape.of_config({"text_config": config}).layers == 30
    with pytest.raises(KvsimError, match="x: is a mixture of experts"):
        Shape.of_config({**config, "num_experts": 8}, "x")
    for wrong in (None, 0, "576", True, 2**80):
        with pytest.raises(KvsimError, match="x: its configuration has no usable hidden_size"):
            Shape.of_config({**config, "hidden_size": wrong}, "x")


def test_hardware_is_a_name_or_two_numbers():
    assert Hardware.read("h200") is H200
    assert Hardware.read("3e12,7e14").flops == 7e14
    for text in ("tpu", "1,x", "0,1", "nan,1", "1,inf", "5e-324,1", "1,1e31", "1,2,3"):
        with pytest.raises(KvsimError, match="hardware"):
            Hardware.read(text)
    assert Cost.on(H200, 4.23e12, 0).seconds == 1
    with pytest.raises(KvsimError, match="unknown shape 'gpt'"):
        Shape.read("gpt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "length must be at least 0"),
        ((3, 0), "window at least 1"),
        ((3, 1, 1.5), r"must be in \[0, 1\], got 1.5"),
        ((3, 1, np.ones(2, dtype=bool)), "a mask of 2 keys does not fit 3 tokens"),
    ],
)
def test_pairs_of_nothing_sensible_are_refused(arguments, message):
    with pytest.raises(KvsimError, match=message):
        causal_pairs(*arguments)
