"""What the recorder stores, against transformers' own eager attention at every step."""

import numpy as np
import pytest
import torch
from kvsim_traces import open_trace, record
from recording import MODELS, PROMPT, SHAPE, SUPPORTED, WINDOW, eager_run, tiny

STEPS = 6
L0 = len(PROMPT)
CAPTURES = ["heads", "scores", "qk", "qkv"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Recordings and their eager counterparts, made once for each model, capture and option."""
    made = {}

    def get(name, capture="heads", attention="sdpa", **options):
        key = (name, capture, attention, *sorted(options.items()))
        if key not in made:
            model = tiny(name, attention)
            out = tmp_path_factory.mktemp("traces") / "trace"
            if name == "mistral-sliding":
                options = {"eligible": "all"} | options
            trace = record(model, PROMPT, out=out, steps=STEPS, capture=capture, prompt_queries=5, **options)
            made[key] = (trace, *eager_run(model, trace.tokens.tolist(), L0))
        return made[key]

    return get


def deviation(trace, rows):
    return max(np.abs(trace.attention_rows(t) - rows[t - 1].numpy()).max() for t in range(1, trace.num_steps + 1))


@pytest.mark.parametrize("name", [*SUPPORTED, "mistral-sliding", "gpt-oss", "llama4"])
def test_rows_equal_eager_attention_at_every_step(recorded, name):
    attention = "eager" if name == "gpt-oss" else "sdpa"
    trace, _, rows, choices = recorded(name, "heads", attention)
    assert trace.num_steps == STEPS
    # float16 times 2^15 rounds to 2^-11 of a probability at most, 2.4e-4 near 1
    assert deviation(trace, rows) < 2.5e-4
    # before rounding the rows are exact: qk in float32 recomputes them
    exact, *_ = recorded(name, "qk", attention, qk_dtype="float32")
    assert exact.tokens.tolist() == trace.tokens.tolist()
    assert deviation(exact, rows) < 2e-6
    assert trace.tokens[:L0].tolist() == PROMPT
    assert trace.tokens[L0:].tolist() == choices[:-1]


@pytest.mark.parametrize("name", SUPPORTED)
def test_computed_rows_are_exact_before_they_are_rounded(name):
    """The step observer itself, at every step, to 1e-5."""
    from kvsim_traces.capture import PrefillCapture, StepCapture
    from kvsim_traces.decoding import Decoder
    from kvsim_traces.hooks import observed

    model = tiny(name)
    tokens = [*PROMPT, 4, 9, 2, 2, 60]
    _, rows, _ = eager_run(model, tokens, L0)
    decoder, prefill = Decoder(model), PrefillCapture(model.config, "heads", 0, False, "float16")
    with torch.inference_mode():
        with observed(model, prefill):
            decoder.prefill(PROMPT)
        step = StepCapture(prefill.layers, "heads", "float16")
        with observed(model, step):
            for index, token in enumerate(tokens[L0:]):
                step.begin(L0 + index, keep=True)
                decoder.step(token)
                found = torch.stack(step.exact)
                assert (found - rows[index]).abs().max() < 1e-5
                np.testing.assert_array_equal(step.arrays()["attention"], (found * 32768).half().numpy())


@pytest.mark.parametrize("name", [*SUPPORTED, "gpt-oss"])
def test_rows_recomputed_from_queries_and_keys(recorded, name):
    attention = "eager" if name == "gpt-oss" else "sdpa"
    _, _, rows, _ = recorded(name, "heads", attention)
    assert deviation(recorded(name, "qk", attention)[0], rows) < 3e-3
    assert deviation(recorded(name, "qkv", attention)[0], rows) < 3e-3
    assert deviation(recorded(name, "qk", attention, qk_dtype="float32")[0], rows) < 2e-6


@pytest.mark.parametrize("name", SUPPORTED)
def test_scores_are_the_head_mean(recorded, name):
    trace, _, rows, _ = recorded(name, "scores")
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(trace.score_rows(t), rows[t - 1].mean(1), rtol=0, atol=2.5e-4)


@pytest.mark.parametrize("capture", CAPTURES)
def test_captures_store_what_they_name(recorded, capture):
    trace, *_ = recorded("llama-gqa3", capture)
    stored = {name for name in ("attention", "scores", "queries", "keys", "values") if trace.has(name)}
    assert (
        stored
        == {
            "heads": {"attention"},
            "scores": {"scores"},
            "qk": {"queries", "keys"},
            "qkv": {"queries", "keys", "values"},
        }[capture]
    )
    for name in ("tokens", "row_sums", "prompt_queries", "prompt_mass"):
        assert trace.has(name)
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(trace.row_sums(t), 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*SUPPORTED, "mistral-sliding", "gpt-oss", "llama4"])
def test_prompt_mass_is_the_column_sum_of_the_eager_prefill(recorded, name):
    trace, prefill, *_ = recorded(name, "heads", "eager" if name == "gpt-oss" else "sdpa")
    mass = trace.prompt_mass()
    np.testing.assert_allclose(mass, prefill.sum(2), rtol=0, atol=2e-5)
    if name != "gpt-oss":
        np.testing.assert_allclose(mass.sum(-1), L0, rtol=1e-6)


def projections(model, tokens):
    """Post-RoPE queries, keys and values of every layer for a whole sequence, from transformers' eager function."""
    import sys

    modeling = sys.modules[type(model).__module__]
    original, seen = modeling.eager_attention_forward, []

    def spy(module, query, key, value, *args, **kwargs):
        seen.append((query[0], key[0], value[0]))
        return original(module, query, key, value, *args, **kwargs)

    modeling.eager_attention_forward = spy
    try:
        with torch.inference_mode():
            model(torch.tensor([tokens]), use_cache=False)
    finally:
        modeling.eager_attention_forward = original
    return [torch.stack(part).numpy() for part in zip(*seen, strict=True)]


@pytest.mark.parametrize("name", SUPPORTED)
def test_queries_keys_and_values_of_every_position(recorded, name):
    trace, *_ = recorded(name, "qkv", qk_dtype="float32")
    queries, keys, values = projections(tiny(name, "eager"), trace.tokens.tolist())
    close = {"rtol": 0, "atol": 2e-5}
    np.testing.assert_allclose(trace.prompt_queries(), queries[:, :, L0 - 5 : L0], **close)
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(trace.queries(t), queries[:, :, L0 + t - 1], **close)
    for layer in range(trace.num_layers):
        np.testing.assert_allclose(trace.keys(layer), keys[layer], **close)
        np.testing.assert_allclose(trace.values(layer), values[layer], **close)


@pytest.mark.parametrize(("asked", "kept"), [("all", L0), (3, 3), (500, L0), (0, None)])
def test_how_many_prompt_queries_are_kept(tmp_path, asked, kept):
    trace = record(tiny("llama-gqa3"), PROMPT, out=tmp_path / "t", steps=1, prompt_queries=asked, prompt_mass=False)
    assert trace.has("prompt_queries") == (kept is not None)
    assert not trace.has("prompt_mass")
    if kept is not None:
        assert trace.prompt_queries().shape == (3, 6, kept, 16)


def test_sliding_layers_are_recorded_marked_and_not_eligible(recorded):
    trace, *_ = recorded("gemma3")
    layers = trace.manifest.layers
    assert [layer.type for layer in layers] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert [layer.sliding_window for layer in layers] == [WINDOW, None, WINDOW]
    assert [layer.eligible for layer in layers] == [False, True, False]
    assert trace.eligible_layers == (1,)
    assert {layer.scaling for layer in layers} == {40**-0.5}
    row = trace.attention_rows(STEPS)
    outside = L0 + STEPS - WINDOW
    assert (row[[0, 2], :, :outside] == 0).all()
    assert (row[[0, 2], :, outside:] > 0).any()
    assert (row[1, :, :outside] > 0).any()


def test_windows_hold_where_the_cache_returns_more_keys_and_no_mask():
    """As under flash attention with a cache that keeps everything."""
    from kvsim_traces.capture import StepCapture
    from kvsim_traces.hooks import AttentionCall
    from kvsim_traces.manifest import LayerInfo

    layers = [
        LayerInfo("full_attention"),
        LayerInfo("sliding_attention", False, 4),
        LayerInfo("chunked_attention", False, 4),
    ]
    keys = torch.randn(1, 11, 8, generator=torch.Generator().manual_seed(0))
    step = StepCapture(layers, "heads", "float16")
    step.begin(10, keep=True)
    for _ in layers:
        step(AttentionCall(torch.nn.Identity(), keys[:, -1:], keys, keys, 0.5, None, None, None))
    # position 10: the last 4 positions are 7..10, its chunk of 4 is 8..10
    assert [int((rows > 0).sum()) for rows in step.exact] == [11, 4, 3]
    for rows, first in zip(step.exact, (0, 7, 8), strict=True):
        expected = torch.softmax(keys[0, first:] @ keys[0, -1] * 0.5, -1)
        torch.testing.assert_close(rows[0, first:], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [3, 12])
def test_keys_that_do_not_match_the_position_are_refused(count):
    from kvsim_traces import TraceError
    from kvsim_traces.capture import StepCapture
    from kvsim_traces.hooks import AttentionCall
    from kvsim_traces.manifest import LayerInfo

    keys = torch.ones(1, count, 8)
    step = StepCapture([LayerInfo("full_attention")], "heads", "float16")
    step.begin(10)
    with pytest.raises(TraceError, match=f"layer 0 sees {count} keys at position 10, not 11"):
        step(AttentionCall(torch.nn.Identity(), keys[:, -1:], keys, keys, 0.5, None, None, None))


def test_sinks_lower_the_row_sums(recorded):
    trace, _, rows, _ = recorded("gpt-oss", "heads", "eager")
    assert trace.manifest.sink_logits
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(trace.row_sums(t), rows[t - 1].sum(-1), rtol=0, atol=1e-5)
        assert (trace.row_sums(t) < 0.999).any()
    assert not recorded("llama-gqa3")[0].manifest.sink_logits


def test_softcap_and_scaling_come_from_the_model(tmp_path):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    MODELS["gemma2"] = (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"sliding_window": WINDOW, "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 30},
    )
    model = tiny("gemma2", "eager")
    trace = record(model, PROMPT, out=tmp_path / "t", steps=STEPS, capture="qk", qk_dtype="float32")
    assert {(layer.softcap, layer.scaling) for layer in trace.manifest.layers} == {(0.7, 30**-0.5)}
    prefill, rows, _ = eager_run(model, trace.tokens.tolist(), L0)
    assert deviation(trace, rows) < 2e-6
    np.testing.assert_allclose(trace.prompt_mass(), prefill.sum(2), rtol=0, atol=2e-5)


def test_sdpa_and_eager_give_the_same_recording(recorded):
    one, *_ = recorded("gemma3", "heads", "sdpa")
    two, *_ = recorded("gemma3", "heads", "eager")
    assert one.tokens.tolist() == two.tokens.tolist()
    assert one.manifest.environment["attention"] == "sdpa"
    assert two.manifest.environment["attention"] == "eager"
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(one.attention_rows(t), two.attention_rows(t), rtol=0, atol=2.5e-4)


def test_flash_attention_is_called_under_its_own_name(recorded, tmp_path, monkeypatch):
    """A stand-in with flash attention's contract: no mask, the window passed, the kernel chosen by the config."""
    from transformers import AttentionInterface

    names = set()

    def flash(module, query, key, value, attention_mask, scaling, sliding_window=None, **_):
        assert attention_mask is None
        names.add(module.config._attn_implementation)
        n, q = key.shape[2], query.shape[2]
        i, j = torch.arange(n - q, n)[:, None], torch.arange(n)[None]
        seen = (j <= i) & (i - j < (sliding_window or n))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model = tiny("gemma3")
    model.config._attn_implementation_internal = "flash_attention_2"
    trace = record(model, PROMPT, out=tmp_path / "t", steps=STEPS, prompt_queries=5)
    assert names == {"flash_attention_2"}
    assert model.config._attn_implementation == "flash_attention_2"
    assert trace.manifest.environment["attention"] == "flash_attention_2"
    reference, *_ = recorded("gemma3")
    assert trace.tokens.tolist() == reference.tokens.tolist()
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(trace.attention_rows(t), reference.attention_rows(t), rtol=0, atol=2.5e-4)
    np.testing.assert_allclose(trace.prompt_mass(), reference.prompt_mass(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models(tmp_path, dtype, capture):
    model = tiny("gemma3", dtype=dtype)
    trace = record(model, PROMPT, out=tmp_path / "t", steps=3, capture=capture)
    assert trace.manifest.environment["dtype"] == str(dtype).removeprefix("torch.")
    _, rows, _ = eager_run(model, trace.tokens.tolist(), L0)
    for t in range(1, 4):
        expected = rows[t - 1].mean(1).numpy()
        np.testing.assert_allclose(trace.score_rows(t), expected, rtol=0, atol=2e-2)
    assert 0 < trace.manifest.check["max_abs_error"] < 3e-2


def test_hybrid_model_records_its_attention_layers_only(tmp_path):
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    torch.manual_seed(0)
    options = (
        SHAPE | linear | experts | {"num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    )
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**options, shared_expert_intermediate_size=8)).eval()
    trace = record(model, PROMPT, out=tmp_path / "t", steps=2)
    assert trace.num_layers == 1
    assert trace.manifest.check["max_abs_error"] < 1e-5
    assert trace.manifest.notes == ["recorded layers are the model's layers 3; the others have no attention"]


def test_reopened_trace_is_the_one_returned(recorded):
    trace, *_ = recorded("llama-gqa3", "qk")
    again = open_trace(trace.path)
    assert again.hash == trace.hash
    np.testing.assert_array_equal(again.attention_rows(2), trace.attention_rows(2))
