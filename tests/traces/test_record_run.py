"""How a recording runs: which tokens, what the manifest says, what is refused, what a failure leaves behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import kvsim_traces.recorder
import numpy as np
import pytest
import torch
from kvsim_traces import TraceError, open_trace, record, repair_trace, verify_trace
from recording import PROMPT, VOCAB, tiny
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

L0 = len(PROMPT)


@pytest.fixture(scope="module")
def llama():
    return tiny("llama-gqa3")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "trace"


def generated(trace):
    return trace.tokens[L0:].tolist()


# Tokens


def test_forcing_the_generated_tokens_gives_the_same_recording(llama, tmp_path):
    free = record(llama, PROMPT, out=tmp_path / "free", steps=7)
    forced = record(llama, PROMPT, out=tmp_path / "forced", steps=7, force=generated(free))
    assert generated(forced) == generated(free)
    assert forced.manifest.generation["mode"] == "forced"
    assert free.manifest.generation["mode"] == "generated"
    for t in range(1, 8):
        np.testing.assert_array_equal(forced.attention_rows(t), free.attention_rows(t))


def test_forced_tokens_are_fed_as_they_are_and_limited_to_steps(llama, tmp_path):
    tokens = [5, 5, 60, 0, 17]
    assert generated(record(llama, PROMPT, out=tmp_path / "a", steps=3, force=tokens)) == tokens[:3]
    trace = record(llama, PROMPT, out=tmp_path / "b", steps=9, force=torch.tensor(tokens))
    assert generated(trace) == tokens
    assert trace.manifest.complete
    assert trace.manifest.planned_steps == 5


def test_input_ids_may_be_a_list_an_array_or_a_batch_of_one(llama, tmp_path):
    forms = [PROMPT, np.array(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT])]
    traces = [record(llama, form, out=tmp_path / str(i), steps=2) for i, form in enumerate(forms)]
    assert len({trace.hash for trace in traces}) == 1


def test_prompt_of_one_token(llama, out):
    trace = record(llama, [3], out=out, steps=3)
    assert trace.prompt_length == 1
    np.testing.assert_array_equal(trace.prompt_mass(), 1)


def test_run_ends_with_the_step_that_feeds_end_of_sequence(tmp_path):
    model = tiny("llama-gqa3")
    free = generated(record(model, PROMPT, out=tmp_path / "free", steps=12))
    stop = next(i for i in range(2, 12) if free[i] not in free[:i])
    model.generation_config.eos_token_id = [free[stop], VOCAB + 5]
    trace = record(model, PROMPT, out=tmp_path / "eos", steps=12)
    assert generated(trace) == free[: stop + 1]
    assert trace.manifest.complete
    assert trace.manifest.planned_steps == trace.num_steps == stop + 1
    assert trace.manifest.generation["eos_token_ids"] == [free[stop]]
    assert verify_trace(trace.path).ok
    forced = record(model, PROMPT, out=tmp_path / "forced", steps=12, force=free)
    assert generated(forced) == free


def test_suppressed_end_of_sequence_is_never_generated(tmp_path):
    model = tiny("llama-gqa3")
    free = generated(record(model, PROMPT, out=tmp_path / "free", steps=8))
    model.generation_config.eos_token_id = free[3]
    trace = record(model, PROMPT, out=tmp_path / "t", steps=8, suppress_eos=True)
    assert trace.num_steps == 8
    assert free[3] not in generated(trace)
    assert generated(trace)[:3] == free[:3]
    assert trace.manifest.generation["suppress_eos"] is True


def test_sampling_follows_the_seed(llama, tmp_path):
    def sampled(name, **options):
        return generated(record(llama, PROMPT, out=tmp_path / name, steps=12, **options))

    greedy = sampled("greedy")
    one, same, other = (sampled(str(i), temperature=5.0, seed=seed) for i, seed in enumerate([1, 1, 2]))
    assert one == same
    assert one != other
    assert greedy not in (one, other)
    assert sampled("cold", temperature=1e-4, seed=3) == greedy


def test_random_state_of_torch_is_left_alone(llama, out):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    record(llama, PROMPT, out=out, steps=2, temperature=1.0)
    assert torch.equal(torch.rand(3), expected)


# The manifest


def test_manifest_says_where_a_recording_came_from(out):
    model = tiny("qwen3")
    trace = record(model, PROMPT, out=out, steps=2, temperature=0.5, seed=9, chat_template=True, kvsim_version="9.9")
    manifest = trace.manifest
    assert manifest.model["name"] == "Qwen3ForCausalLM"
    assert manifest.model["config"]["model_type"] == "qwen3"
    assert manifest.kvsim_version == "9.9"
    assert manifest.vocab_size == VOCAB
    assert manifest.environment == {
        "torch": torch.__version__,
        "transformers": __import__("transformers").__version__,
        "python": sys.version.split()[0],
        "device": "cpu",
        "dtype": "float32",
        "attention": "sdpa",
    }
    assert manifest.generation == {
        "mode": "generated",
        "seed": 9,
        "temperature": 0.5,
        "suppress_eos": False,
        "eos_token_ids": [],
        "chat_template": True,
    }
    assert manifest.source == "recorder"
    assert manifest.complete


def test_hashes_follow_weights_and_config(tmp_path):
    def facts(model):
        found = record(model, PROMPT, out=tmp_path / str(len(list(tmp_path.iterdir()))), steps=1).manifest.model
        return found["config_hash"], found["weights_hash"]

    model = tiny("llama-gqa3")
    before = facts(model)
    assert facts(tiny("llama-gqa3")) == before
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1e-3
    assert facts(model)[0] == before[0]
    assert facts(model)[1] != before[1]
    assert facts(tiny("llama-gqa3", rms_norm_eps=1e-3))[0] != before[0]


def test_local_directories_do_not_enter_the_manifest(tmp_path):
    folder = tmp_path / "somewhere" / "my-model"
    tiny("llama-gqa3").save_pretrained(folder)
    from transformers import AutoModelForCausalLM

    trace = record(AutoModelForCausalLM.from_pretrained(folder), PROMPT, out=tmp_path / "t", steps=1)
    assert trace.manifest.model["name"] == "my-model"
    assert "somewhere" not in json.dumps(trace.manifest.to_json())


@pytest.mark.parametrize("capture", ["heads", "scores", "qk", "qkv"])
def test_check_compares_with_the_eager_pass(llama, tmp_path, capture):
    check = record(llama, PROMPT, out=tmp_path / "t", steps=2, capture=capture).manifest.check
    assert check["step"] == 1
    assert check["against"] == "eager output_attentions"
    assert check["max_abs_error"] < 1e-5
    assert 0 < check["max_abs_error_stored"] < (3e-3 if capture in ("qk", "qkv") else 2.5e-4)
    assert record(llama, PROMPT, out=tmp_path / "u", steps=2, check=False).manifest.check is None


@pytest.mark.parametrize("capture", ["heads", "scores", "qk"])
def test_stored_error_is_the_one_a_reader_sees(llama, tmp_path, capture):
    from recording import eager_run

    trace = record(llama, PROMPT, out=tmp_path / "t", steps=1, capture=capture)
    _, rows, _ = eager_run(llama, trace.tokens.tolist(), L0)
    if capture == "scores":
        error = np.abs(trace.score_rows(1) - rows[0].mean(1).numpy()).max()
    else:
        error = np.abs(trace.attention_rows(1) - rows[0].numpy()).max()
    assert trace.manifest.check["max_abs_error_stored"] == pytest.approx(error, rel=1e-3, abs=2e-6)


def test_wrong_rows_are_caught_by_the_check(llama, out, monkeypatch):
    import kvsim_traces.capture as capture

    right = capture.attention_row
    monkeypatch.setattr(capture, "attention_row", lambda *args, **options: right(*args, **options) * 1.01)
    with pytest.raises(TraceError, match=r"check: rows of step 1 differ by .* from the model's own"):
        record(llama, PROMPT, out=out, steps=2)
    assert not out.exists()
    monkeypatch.setattr(capture, "attention_row", lambda *args, **options: right(*args, **options) * np.nan)
    with pytest.raises(TraceError, match="check: rows of step 1 differ by nan"):
        record(llama, PROMPT, out=out, steps=2)
    assert not out.exists()


# The model afterwards


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_model_is_left_as_it_was(out, attention):
    model = tiny("gemma3", attention)
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.inference_mode():
        before = model(torch.tensor([PROMPT])).logits
    record(model, PROMPT, out=out, steps=2)
    assert model.config._attn_implementation == attention
    assert all(
        module.config._attn_implementation == attention for module in model.modules() if hasattr(module, "config")
    )
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(model(torch.tensor([PROMPT])).logits, before)


def test_dropout_is_off_while_recording(tmp_path):
    model = tiny("llama-gqa3", attention_dropout=0.5)
    quiet = record(model, PROMPT, out=tmp_path / "a", steps=3)
    model.train()
    assert record(model, PROMPT, out=tmp_path / "b", steps=3).hash == quiet.hash


def test_model_is_restored_after_an_error(out, monkeypatch):
    model = tiny("llama-gqa3")

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvsim_traces.recorder, "check_rows", broken)
    with pytest.raises(KeyboardInterrupt):
        record(model, PROMPT, out=out, steps=2)
    assert model.config._attn_implementation == "sdpa"
    assert not out.exists()


def test_prefill_runs_the_model_s_own_attention_and_is_causal(llama, out):
    with torch.inference_mode():
        expected = int(llama(torch.tensor([PROMPT])).logits[0, -1].argmax())
    assert generated(record(llama, PROMPT, out=out, steps=1)) == [expected]


def test_two_models_of_different_implementations_in_turn(tmp_path):
    one, two = tiny("llama-gqa3", "sdpa"), tiny("llama-gqa3", "eager")
    a, b, c = (record(m, PROMPT, out=tmp_path / str(i), steps=3) for i, m in enumerate([one, two, one]))
    assert a.hash == c.hash
    np.testing.assert_allclose(a.attention_rows(3), b.attention_rows(3), rtol=0, atol=2.5e-4)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": []}, "input_ids: is empty"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids: is empty"),
        ({"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "input_ids: holds a batch of 2"),
        ({"input_ids": [0, VOCAB]}, f"input_ids: token {VOCAB} is outside the vocabulary of {VOCAB}"),
        ({"input_ids": [0, -1]}, "input_ids: token -1 is outside the vocabulary"),
        ({"input_ids": [0.5]}, "input_ids: must hold integers"),
        ({"input_ids": torch.zeros(1, 1, 3, dtype=torch.long)}, r"input_ids: must have shape \[L\] or \[1, L\]"),
        ({"steps": 0}, "steps: must be an integer of at least 1, got 0"),
        ({"steps": -3}, "steps: must be an integer of at least 1, got -3"),
        ({"steps": True}, "steps: must be an integer"),
        ({"steps": 2.0}, "steps: must be an integer"),
        ({"force": []}, "force: is empty"),
        ({"force": [1, VOCAB]}, f"force: token {VOCAB} is outside the vocabulary"),
        ({"capture": "rows"}, "capture: 'rows' is not one of heads, scores, qk, qkv"),
        ({"qk_dtype": "bfloat16"}, "qk_dtype: 'bfloat16' is not one of float16, float32"),
        ({"prompt_queries": -1}, "prompt_queries: must be an integer of at least 0"),
        ({"prompt_queries": "some"}, "prompt_queries: 'some' is not one of all"),
        ({"temperature": -0.1}, "temperature: must be finite and at least 0"),
        ({"temperature": float("nan")}, "temperature: must be finite"),
        ({"seed": -1}, "seed: must be an integer of at least 0"),
        ({"eligible": "some"}, "eligible: 'some' is not one of full, all"),
        ({"eligible": []}, "eligible: is an empty list"),
        ({"eligible": [3]}, r"eligible: layer 3 does not exist; the model has 0\.\.2"),
        ({"model": "gpt2"}, "model: str is not a transformers model"),
        ({"model": torch.nn.Linear(2, 2)}, "model: Linear is not a transformers model"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_name_the_field_and_write_nothing(llama, out, changes, message):
    with pytest.raises(TraceError, match=message):
        record(**({"model": llama, "input_ids": PROMPT, "out": out, "steps": 2} | changes))
    assert not out.exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)),
        lambda: BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)),
    ],
    ids=["mamba", "bloom"],
)
def test_model_without_attention_hooks(out, make):
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(TraceError, match=f"model: {type(model).__name__} has no attention hooks"):
        record(model, PROMPT, out=out, steps=2)
    assert not out.exists()
    assert model.config._attn_implementation == before


def test_model_whose_layers_all_slide_needs_a_word(tmp_path):
    model = tiny("mistral-sliding")
    with pytest.raises(TraceError, match=r"eligible: the model has no full-attention layer .*eligible='all'"):
        record(model, PROMPT, out=tmp_path / "a", steps=2)
    assert not (tmp_path / "a").exists()
    assert record(model, PROMPT, out=tmp_path / "b", steps=2, eligible="all").eligible_layers == (0, 1, 2)
    assert record(model, PROMPT, out=tmp_path / "c", steps=2, eligible=[2, 0]).eligible_layers == (0, 2)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y", "a\0b", "\ud800"])
def test_unusable_directories(llama, tmp_path, monkeypatch, name):
    monkeypatch.setattr(llama, "forward", None)
    with pytest.raises(TraceError, match=r"File name too long|null characters|is not a path") as caught:
        record(llama, PROMPT, out=tmp_path / name, steps=2)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_directory_in_use(llama, out):
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(TraceError, match="exists and is not an empty directory"):
        record(llama, PROMPT, out=out, steps=2)
    assert [path.name for path in out.iterdir()] == ["mine"]


def test_keys_beyond_float16(tmp_path):
    model = tiny("llama-gqa3")
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1e5)
    with pytest.raises(TraceError, match=r"keys: layer 1: .* does not fit float16; record with qk_dtype='float32'"):
        record(model, PROMPT, out=tmp_path / "half", steps=2, capture="qk", check=False)
    assert not (tmp_path / "half").exists()
    assert record(model, PROMPT, out=tmp_path / "full", steps=2, capture="qk", qk_dtype="float32", check=False)


def test_attention_that_is_not_standard(out):
    model = tiny("llama-gqa3")
    attention = model.model.layers[2].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, position_bias=torch.zeros(1), **kwargs)
    with pytest.raises(TraceError, match="model: LlamaAttention passes 'position_bias'"):
        record(model, PROMPT, out=out, steps=2)
    assert not out.exists()


# Streaming


class Watched(kvsim_traces.recorder.TraceWriter):
    """A writer that counts the forwards run before each step reaches it."""

    log: ClassVar[list] = []

    def append(self, **arrays):
        self.log.append({name: np.shape(value) for name, value in arrays.items()})
        super().append(**arrays)


def test_each_step_is_written_before_the_next_is_computed(llama, out, monkeypatch):
    events = []
    monkeypatch.setattr(Watched, "log", [])
    monkeypatch.setattr(kvsim_traces.recorder, "TraceWriter", Watched)
    handle = llama.model.register_forward_hook(lambda *_: events.append(("forward", len(Watched.log))))
    try:
        record(
            llama,
            PROMPT,
            out=out,
            steps=5,
            check=False,
            progress=lambda done, total: events.append(("progress", done, total)),
        )
    finally:
        handle.remove()
    # prefill, then forward t while t - 1 steps are already with the writer
    assert events[0] == ("forward", 0)
    assert events[1:] == [event for t in range(1, 6) for event in (("forward", t - 1), ("progress", t, 5))]
    assert [entry["attention"] for entry in Watched.log] == [(3, 6, L0 + t) for t in range(1, 6)]


def test_nothing_of_a_step_is_kept(llama, out, monkeypatch):
    sizes = []
    step_capture = kvsim_traces.recorder.StepCapture

    class Counting(step_capture):
        def begin(self, position, keep=False):
            super().begin(position, keep)
            held = [value for value in vars(self).values() if isinstance(value, list)]
            sizes.append(sum(isinstance(item, torch.Tensor) for value in held for item in value))

    monkeypatch.setattr(kvsim_traces.recorder, "StepCapture", Counting)
    record(llama, PROMPT, out=out, steps=4, capture="qkv")
    assert sizes == [0, 0, 0, 0]


def test_interrupted_recording_keeps_its_steps(llama, out):
    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(llama, PROMPT, out=out, steps=9, progress=stop)
    assert not verify_trace(out).ok
    assert repair_trace(out).ok
    trace = open_trace(out)
    assert trace.num_steps == 4
    assert trace.manifest.complete
    assert llama.config._attn_implementation == "sdpa"


SCRIPT = """
import sys, time
from kvsim_traces import record
from recording import PROMPT, tiny

def progress(done, total):
    print(done, flush=True)
    time.sleep(0.002)

record(tiny("llama-gqa3"), PROMPT, out=sys.argv[1], steps=100_000, suppress_eos=True, progress=progress)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_killed_recording_is_repaired_to_its_committed_steps(llama, out, tmp_path):
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([*(str(root / part) for part in ("", "traces", "kernels")), *filter(None, sys.path)])
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(out)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    try:
        reached = next((int(line) for line in child.stdout if int(line) >= 37), 0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert reached == 37, "the recording stopped by itself"
    assert not verify_trace(out).ok
    assert repair_trace(out).ok
    assert verify_trace(out).ok
    trace = open_trace(out)
    assert 16 <= trace.num_steps <= 60
    whole = record(llama, PROMPT, out=tmp_path / "whole", steps=trace.num_steps, suppress_eos=True)
    assert trace.tokens.tolist() == whole.tokens.tolist()
    for t in range(1, trace.num_steps + 1):
        np.testing.assert_array_equal(trace.attention_rows(t), whole.attention_rows(t))
