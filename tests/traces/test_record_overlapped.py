"""The recorder as it runs on a GPU: the kernel's rows, steps handed to a thread; here in Triton's interpreter."""

import gc
import itertools
import threading
import weakref

import kvsim_traces.recorder
import numpy as np
import pytest
import torch
from kvsim_kernels.attention_rows import kernel
from kvsim_traces import TraceError, open_trace, record, repair_trace, verify_trace
from recording import MODELS, PROMPT, VOCAB, WINDOW, tiny
from token_texts import byte_level

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernel is not interpreted here; test_record_gpu.py runs it on the GPU"
)

L0 = len(PROMPT)
STEPS = 3
HALF = 2.0**-26
"""Half the distance of the halves of a trace below 2^-15; they lie further apart, relatively as far, above it."""


@pytest.fixture
def overlapped(monkeypatch):
    """Record as on a GPU."""
    monkeypatch.setattr(kvsim_traces.recorder, "overlapped_device", lambda model: torch.device("cpu"))
    with np.errstate(all="ignore"):
        yield


def both(model, tmp_path, monkeypatch, **options):
    """Record in turn and overlapped."""
    options = {"steps": STEPS, "prompt_queries": 5} | options
    plain = record(model, PROMPT, out=tmp_path / "plain", **options)
    monkeypatch.setattr(kvsim_traces.recorder, "overlapped_device", lambda model: torch.device("cpu"))
    with np.errstate(all="ignore"):
        found = record(model, PROMPT, out=tmp_path / "overlapped", **options)
    assert verify_trace(found.path).ok
    assert found.tokens.tolist() == plain.tokens.tolist()
    ours, theirs = (trace.manifest.to_json() for trace in (found, plain))
    for manifest in (ours, theirs):
        del manifest["created"], manifest["check"]
    assert ours == theirs
    return found, plain


def apart(found, plain, rows="attention_rows"):
    """Compare stored rows: at most one unit in the last place of a half apart."""
    for t in range(1, plain.num_steps + 1):
        ours, theirs = getattr(found, rows)(t), getattr(plain, rows)(t)
        np.testing.assert_allclose(ours, theirs, rtol=2**-10, atol=2 * HALF)
        np.testing.assert_array_equal(ours == 0, theirs == 0)
        np.testing.assert_allclose(found.row_sums(t), plain.row_sums(t), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3", "gpt-oss", "llama4"])
def test_heads_are_those_of_the_reference(name, tmp_path, monkeypatch):
    found, plain = both(tiny(name, "eager" if name == "gpt-oss" else "sdpa"), tmp_path, monkeypatch)
    assert found.manifest.check["max_abs_error"] < 1e-5
    assert found.manifest.check["max_abs_error_stored"] < 2.5e-4
    apart(found, plain)
    np.testing.assert_array_equal(found.prompt_queries(), plain.prompt_queries())
    np.testing.assert_allclose(found.prompt_mass(), plain.prompt_mass(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3", "gpt-oss"])
def test_scores_are_those_of_the_reference(name, tmp_path, monkeypatch):
    model = tiny(name, "eager" if name == "gpt-oss" else "sdpa")
    found, plain = both(model, tmp_path, monkeypatch, capture="scores")
    assert found.manifest.check["max_abs_error"] < 1e-5
    apart(found, plain, "score_rows")


@pytest.mark.parametrize(
    ("name", "capture", "number"),
    [("llama-gqa3", "qkv", "float16"), ("llama-gqa3", "qk", "float32"), ("gpt-oss", "qkv", "float32")],
)
def test_queries_keys_and_values_are_the_same(name, capture, number, tmp_path, monkeypatch):
    model = tiny(name, "eager" if name == "gpt-oss" else "sdpa")
    found, plain = both(model, tmp_path, monkeypatch, capture=capture, qk_dtype=number)
    for t in range(1, STEPS + 1):
        np.testing.assert_array_equal(found.queries(t), plain.queries(t))
        np.testing.assert_allclose(found.row_sums(t), plain.row_sums(t), rtol=0, atol=1e-6)
    for layer in range(found.num_layers):
        np.testing.assert_array_equal(found.keys(layer), plain.keys(layer))
        if capture == "qkv":
            np.testing.assert_array_equal(found.values(layer), plain.values(layer))
    assert found.manifest.check["max_abs_error_stored"] == pytest.approx(
        plain.manifest.check["max_abs_error_stored"], rel=1e-3, abs=2e-6
    )
    if name == "llama-gqa3":
        assert all((found.row_sums(t) == 1).all() for t in range(1, STEPS + 1))


def test_softcap(tmp_path, monkeypatch):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    options = {"sliding_window": WINDOW, "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 30}
    monkeypatch.setitem(MODELS, "gemma2", (Gemma2ForCausalLM, Gemma2Config, options))
    found, plain = both(tiny("gemma2", "eager"), tmp_path, monkeypatch)
    assert found.manifest.check["max_abs_error"] < 1e-5
    apart(found, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_types(dtype, tmp_path, monkeypatch):
    model = tiny("llama-gqa3", dtype=dtype)
    if dtype == torch.float16:
        found, plain = both(model, tmp_path, monkeypatch)
        apart(found, plain)
        np.testing.assert_allclose(found.prompt_mass(), plain.prompt_mass(), rtol=1e-5, atol=1e-6)
        return
    # What the kernel lacks, PyTorch computes, and the manifest says so.
    with pytest.raises(AssertionError, match="computed by PyTorch"):
        both(model, tmp_path, monkeypatch)
    found, plain = open_trace(tmp_path / "overlapped"), open_trace(tmp_path / "plain")
    assert found.manifest.notes == ["attention rows of layers 0, 1, 2 were computed by PyTorch, not by the kernel"]
    apart(found, plain)


def test_without_triton(tmp_path, monkeypatch):
    import kvsim_traces.device_capture as device_capture

    monkeypatch.setattr(device_capture, "_kernels", lambda: None)
    with pytest.raises(AssertionError, match="computed by PyTorch"):
        both(tiny("gemma3"), tmp_path, monkeypatch, capture="scores")
    found, plain = open_trace(tmp_path / "overlapped"), open_trace(tmp_path / "plain")
    for t in range(1, STEPS + 1):
        np.testing.assert_array_equal(found.score_rows(t), plain.score_rows(t))


@pytest.mark.parametrize("capture", ["heads", "scores"])
def test_a_kernel_that_is_wrong_is_refused(capture, tmp_path, monkeypatch, overlapped):
    real = kernel.layer_rows

    def wrong(*given, out, **more):
        real(*given, out=out, **more)
        out.mul_(1.5)

    monkeypatch.setattr(kernel, "layer_rows", wrong)
    with pytest.raises(TraceError, match="check: rows of step 1 differ by"):
        record(tiny("llama-gqa3"), PROMPT, out=tmp_path / "new", steps=STEPS, capture=capture)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [1, 3])
def test_a_step_that_fails_leaves_nothing_on_the_device(step, tmp_path, monkeypatch, overlapped):
    held, real = [], kernel.layer_rows

    def fails(queries, keys, **more):
        held.extend(weakref.ref(own) for own in keys)
        if len(keys) and next(count) == step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        real(queries, keys, **more)

    count = itertools.count(1)
    monkeypatch.setattr(kernel, "layer_rows", fails)
    with pytest.raises(TraceError, match="model: CUDA out of memory; record a shorter prompt") as caught:
        record(tiny("llama-gqa3"), PROMPT, out=tmp_path / "new", steps=STEPS, capture="heads", check=False)
    gc.collect()
    # The error is still there, and its traceback with what the recorder's frame holds.
    assert caught.tb is not None
    assert held
    assert [own for own in held if own() is not None] == []


# Tokens


def test_text_and_forced_tokens(tmp_path, monkeypatch):
    model, tokenizer = tiny("llama-gqa3", vocab_size=400), byte_level()
    found, plain = both(
        model, tmp_path, monkeypatch, tokenizer=tokenizer, steps=5, force=[5, 5, 60, 0, 17], capture="qk"
    )
    assert found.texts() == plain.texts()
    assert found.tokens[L0:].tolist() == [5, 5, 60, 0, 17]


def test_end_of_sequence(tmp_path, monkeypatch):
    model = tiny("llama-gqa3")
    free = record(model, PROMPT, out=tmp_path / "free", steps=12, capture="qk").tokens[L0:].tolist()
    stop = next(i for i in range(2, 12) if free[i] not in free[:i])
    model.generation_config.eos_token_id = [free[stop], VOCAB + 5]
    found, _ = both(model, tmp_path, monkeypatch, steps=12, capture="qk")
    assert found.tokens[L0:].tolist() == free[: stop + 1]
    assert found.manifest.complete
    assert found.num_steps == stop + 1
    both(model, tmp_path / "suppressed", monkeypatch, steps=12, capture="qk", suppress_eos=True)
    both(model, tmp_path / "forced", monkeypatch, steps=12, capture="qk", force=free)


def test_sampling_follows_the_seed(tmp_path, monkeypatch):
    both(tiny("llama-gqa3"), tmp_path, monkeypatch, capture="qk", steps=12, temperature=5.0, seed=3)


def test_a_single_step(tmp_path, monkeypatch):
    apart(*both(tiny("llama-gqa3"), tmp_path, monkeypatch, steps=1))


# Failures


def test_progress_comes_in_order(overlapped, tmp_path):
    told = []
    record(
        tiny("llama-gqa3"),
        PROMPT,
        out=tmp_path / "t",
        steps=30,
        capture="qk",
        progress=lambda *now: told.append((*now, threading.current_thread() is threading.main_thread())),
    )
    assert told == [(t, 30, True) for t in range(1, 31)]


def test_interrupted_recording_keeps_its_steps(overlapped, tmp_path):
    model, seen = tiny("llama-gqa3"), []

    def stop(done, total):
        seen.append(done)
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(model, PROMPT, out=tmp_path / "t", steps=50, capture="qk", progress=stop)
    assert not verify_trace(tmp_path / "t").ok
    assert repair_trace(tmp_path / "t").ok
    trace = open_trace(tmp_path / "t")
    # The steps under way are written too.
    assert 4 <= trace.num_steps <= 4 + 9
    assert model.config._attn_implementation == "sdpa"
    assert "kvsim-writer" not in [thread.name for thread in threading.enumerate()]


class Failing(kvsim_traces.recorder.TraceWriter):
    """A writer whose third step fails."""

    error: Exception = OSError()

    def append(self, **arrays):
        if self.num_steps == 2:
            raise self.error
        super().append(**arrays)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (TraceError("keys: is wrong"), "^keys: is wrong"),
        (MemoryError("no more"), "t: writing step 3 failed: MemoryError: no more"),
    ],
)
def test_what_the_writer_raises_is_raised(overlapped, tmp_path, monkeypatch, error, message):
    monkeypatch.setattr(Failing, "error", error)
    monkeypatch.setattr(kvsim_traces.recorder, "TraceWriter", Failing)
    with pytest.raises(TraceError, match=message):
        record(tiny("llama-gqa3"), PROMPT, out=tmp_path / "t", steps=2000, capture="qk", suppress_eos=True)
    assert repair_trace(tmp_path / "t").ok
    assert open_trace(tmp_path / "t").num_steps == 2


def test_numbers_beyond_float16(overlapped, tmp_path):
    model = tiny("llama-gqa3")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(1e5)
    with pytest.raises(TraceError, match=r"queries of step 1: .*float16; record with qk_dtype='float32'"):
        record(model, PROMPT, out=tmp_path / "half", steps=2, capture="qk", check=False, prompt_queries=0)
    assert not (tmp_path / "half").exists()
    assert record(model, PROMPT, out=tmp_path / "full", steps=2, capture="qk", qk_dtype="float32", check=False)


def short_of_memory(model, call):
    """Have the model run out of memory at its forward number `call`, from 0."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) > call:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1 MiB "
                "is free."
            )

    return model.model.register_forward_hook(hook)


@pytest.mark.parametrize("call", [0, 1])
def test_out_of_memory_before_the_first_step(overlapped, tmp_path, call):
    model = tiny("llama-gqa3")
    handle = short_of_memory(model, call)
    with pytest.raises(TraceError, match=r"^model: CUDA out of memory; record a shorter prompt") as caught:
        record(model, PROMPT, out=tmp_path / "t", steps=9, capture="qk", check=False)
    handle.remove()
    assert not (tmp_path / "t").exists()
    assert caught.value.__context__ is None
    assert record(model, PROMPT, out=tmp_path / "t", steps=3, capture="qk")


def test_out_of_memory_in_a_later_step(overlapped, tmp_path):
    model = tiny("llama-gqa3")
    short_of_memory(model, 6)
    with pytest.raises(TraceError, match=r"^model: CUDA out of memory"):
        record(model, PROMPT, out=tmp_path / "t", steps=50, capture="qk", check=False, suppress_eos=True)
    assert repair_trace(tmp_path / "t").ok
    assert open_trace(tmp_path / "t").num_steps == 5
