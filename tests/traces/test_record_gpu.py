"""The recorder on a GPU, against the same recording on the CPU."""

import numpy as np
import pytest
import torch
from kvsim_traces import TraceError, record, verify_trace
from kvsim_traces.device_capture import DeviceCapture
from kvsim_traces.overlapped import Overlapped
from recording import PROMPT, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

L0 = len(PROMPT)
STEPS = 12


@pytest.fixture
def unsynchronised(monkeypatch):
    """Fail where the recorder's part of a step makes PyTorch wait for the GPU."""

    def watched(method):
        def run(self, *args, **options):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return method(self, *args, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    for owner, name in ((DeviceCapture, "__call__"), (DeviceCapture, "finish"), (Overlapped, "_next")):
        monkeypatch.setattr(owner, name, watched(getattr(owner, name)))


def both(name, tmp_path, **options):
    """Record on the CPU, and the same tokens on the GPU."""
    model = tiny(name, "eager" if name == "gpt-oss" else "sdpa")
    options = {"steps": STEPS, "prompt_queries": 5} | options
    plain = record(model, PROMPT, out=tmp_path / "cpu", **options)
    forced = plain.tokens[L0:].tolist()
    found = record(model.to("cuda"), PROMPT, out=tmp_path / "gpu", **options | {"force": forced})
    assert verify_trace(found.path).ok
    assert found.manifest.notes == plain.manifest.notes
    assert found.manifest.check["max_abs_error"] < 1e-4
    return found, plain


@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3", "gpt-oss", "llama4"])
@pytest.mark.parametrize("capture", ["heads", "qkv"])
def test_as_on_the_cpu(name, capture, tmp_path, unsynchronised):
    found, plain = both(name, tmp_path, capture=capture)
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(found.attention_rows(t), plain.attention_rows(t), rtol=0, atol=1e-3)
        np.testing.assert_allclose(found.row_sums(t), plain.row_sums(t), rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.prompt_mass(), plain.prompt_mass(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.prompt_queries(), plain.prompt_queries(), rtol=0, atol=1e-2)


def test_scores(tmp_path, unsynchronised):
    found, plain = both("gemma3", tmp_path, capture="scores")
    for t in range(1, STEPS + 1):
        np.testing.assert_allclose(found.score_rows(t), plain.score_rows(t), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_generated_tokens(dtype, tmp_path, unsynchronised):
    model = tiny("gemma3", dtype=dtype).to("cuda")
    model.generation_config.eos_token_id = [3, 5]
    found = record(model, PROMPT * 20, out=tmp_path / "heads", steps=40, suppress_eos=True)
    assert found.manifest.check["max_abs_error"] < 3e-2
    assert found.num_steps == 40
    again = record(model, PROMPT * 20, out=tmp_path / "scores", steps=40, suppress_eos=True, capture="scores")
    assert again.tokens.tolist() == found.tokens.tolist()
    for t in range(1, 41):
        # The one is rounded to float16 after the mean over heads, the others before it.
        np.testing.assert_allclose(again.score_rows(t), found.score_rows(t), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.prompt_mass().sum(-1), 20 * L0, rtol=1e-4)


def test_end_of_sequence(tmp_path):
    model = tiny("llama-gqa3").to("cuda")
    free = record(model, PROMPT, out=tmp_path / "free", steps=12, capture="qk").tokens[L0:].tolist()
    stop = next(i for i in range(2, 12) if free[i] not in free[:i])
    model.generation_config.eos_token_id = [free[stop]]
    found = record(model, PROMPT, out=tmp_path / "eos", steps=12, capture="qk")
    assert found.tokens[L0:].tolist() == free[: stop + 1]
    assert found.manifest.complete


def test_a_gpu_without_memory(tmp_path):
    model = tiny("llama-gqa3").to("cuda")
    # What libraries allocate once is there afterwards.
    record(model, PROMPT, out=tmp_path / "small", steps=2)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((before + 2**23) / total)
    try:
        with pytest.raises(TraceError, match=r"^model: CUDA out of memory; record a shorter prompt"):
            record(model, PROMPT * 400, out=tmp_path / "t", steps=2)
        assert torch.cuda.memory_allocated() <= before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not (tmp_path / "t").exists()
    assert record(model, PROMPT, out=tmp_path / "t", steps=2)
