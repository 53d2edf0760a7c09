"""The reconstruction pass, against transformers' own eager attention over the same tokens."""

import numpy as np
import pytest
import torch
from kvsim_traces import TraceError, record, verify_trace
from kvsim_traces import kvzip as module
from kvsim_traces.capture import PrefillCapture
from kvsim_traces.decoding import Decoder
from kvsim_traces.hooks import observed
from kvsim_traces.kvzip import REQUEST, REQUEST_PART, Reconstruction
from recording import PROMPT, SUPPORTED, eager_run, tiny
from token_texts import byte_level
from typer.testing import CliRunner

from kvsim.cli import app

L0 = len(PROMPT)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/{{ m.role }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def model_of(name):
    return tiny(name, "eager" if name == "gpt-oss" else "sdpa", vocab_size=300, max_position_embeddings=256)


def scores_of(model, chunk_size):
    decoder, prefill = Decoder(model), PrefillCapture(model.config, "heads", 0, False, "float16")
    reconstruction = Reconstruction(byte_level(), PROMPT, chat=False, vocab_size=300, chunk_size=chunk_size)
    with torch.inference_mode():
        with observed(model, prefill):
            decoder.prefill(PROMPT)
        return reconstruction.scores(decoder, prefill.layers, prefill.shapes[0][1]), reconstruction.passes(), prefill


@pytest.mark.parametrize("chunk_size", [1, 8, 100])
@pytest.mark.parametrize("name", [*SUPPORTED, "gpt-oss", "llama4"])
def test_scores_are_the_highest_eager_attention(name, chunk_size, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 3000)
    model = model_of(name)
    scores, passes, prefill = scores_of(model, chunk_size)
    assert scores.dtype == np.float32
    assert [(start, stop) for start, stop, _ in passes] == [
        (start, min(start + chunk_size, L0)) for start in range(0, L0, chunk_size)
    ]
    for start, stop, fed in passes:
        attention = eager_run(model, [*PROMPT, *fed], L0 + len(fed))[0].double()[:, :, L0:]
        for layer, info in enumerate(prefill.layers):
            if info.type != "full_attention":
                assert not scores[layer].any()
                continue
            # The softmax runs over the first four positions, the chunk and the pass's own tokens (and a sink logit).
            sink = min(4, start)
            members = [*range(sink), *range(start, stop), *range(L0, L0 + len(fed))]
            rows = attention[layer]
            left = 1 - rows.sum(-1, keepdim=True) if name == "gpt-oss" else 0
            rows = rows[..., start:stop] / (rows[..., members].sum(-1, keepdim=True) + left)
            want = rows.view(scores.shape[1], -1, stop - start).amax(1).numpy()
            # What a sink takes is known only to float32 and divided by a small mass.
            np.testing.assert_allclose(scores[layer, :, start:stop], want, atol=2e-5 if name == "gpt-oss" else 2e-6)
    assert all(scores[layer].max() > 0.01 for layer, info in enumerate(prefill.layers) if info.type[0] == "f")


def test_passes_ask_for_the_context_and_feed_it_again():
    tokenizer = byte_level()
    prompt = tokenizer("the quick brown fox jumps").input_ids
    reconstruction = Reconstruction(tokenizer, prompt, chat=False, vocab_size=300, chunk_size=10)
    texts = [tokenizer.decode(tokens) for _, _, tokens in reconstruction.passes()]
    text = tokenizer.decode(prompt)
    chunks = [tokenizer.decode(prompt[start : start + 10]) for start in range(0, len(prompt), 10)]
    assert texts[0] == REQUEST + "\n" + chunks[0]
    assert texts[1] == REQUEST_PART + tokenizer.decode(prompt[2:10]) + "\n" + chunks[1]
    assert "".join(chunks) == text
    assert "3 reconstruction passes of up to 10 positions" in reconstruction.note
    assert repr(REQUEST_PART) in reconstruction.note


def test_a_chat_prompt_ends_the_request_as_its_template_does():
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    reconstruction = Reconstruction(tokenizer, [5, 6], chat=True, vocab_size=300)
    ((_, _, tokens),) = reconstruction.passes()
    assert tokenizer.decode(tokens[:-2]) == REQUEST + "[/user][assistant]"
    assert tokens[-2:] == [5, 6]


@pytest.mark.parametrize("capture", ["heads", "qkv"])
@pytest.mark.parametrize("name", ["llama-gqa3", "gemma3", "mistral-sliding"])
def test_the_recording_is_the_same_with_and_without(name, capture, tmp_path):
    options = {"steps": 5, "capture": capture, "tokenizer": byte_level(), "temperature": 1.0, "eligible": "all"}
    plain = record(model_of(name), PROMPT, out=tmp_path / "plain", **options)
    scored = record(model_of(name), PROMPT, out=tmp_path / "scored", kvzip=True, **options)
    assert set(scored.manifest.arrays) - set(plain.manifest.arrays) == {"kvzip_scores"}
    for array in plain.manifest.arrays:
        checksums = [list(trace.stored(array).checksums()) for trace in (plain, scored)]
        assert checksums[0] == checksums[1], array
    assert scored.manifest.check == plain.manifest.check
    assert scored.manifest.generation == plain.manifest.generation
    assert verify_trace(scored.path).ok
    want, _, _ = scores_of(model_of(name), module.CHUNK_SIZE)
    assert np.array_equal(scored.kvzip_scores(), want)
    (note,) = scored.manifest.notes
    assert note.startswith("kvzip_scores: highest attention in 1 reconstruction pass of up to 2048 positions after")
    assert note.endswith(repr(REQUEST + "\n"))
    assert not plain.has("kvzip_scores")


def test_what_the_pass_needs(tmp_path):
    model = model_of("llama-gqa3")
    with pytest.raises(TraceError, match="kvzip: needs a tokenizer"):
        record(model, PROMPT, out=tmp_path / "t", steps=1, kvzip=True)
    with pytest.raises(TraceError, match=r"kvzip: the request: token .* is outside the vocabulary of 61"):
        record(tiny("llama-gqa3"), PROMPT, out=tmp_path / "t", steps=1, kvzip=True, tokenizer=byte_level())
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path):
    model_of("llama-gqa3").save_pretrained(tmp_path / "model")
    byte_level().save_pretrained(tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("the cat sat on the mat")
    words = ["record", "--model", tmp_path / "model", "--prompt", tmp_path / "prompt.txt", "--out", tmp_path / "t"]
    result = CliRunner().invoke(app, [str(w) for w in [*words, "--steps", 3, "--kvzip", "--device", "cpu", "-q"]])
    assert result.exit_code == 0, result.output
    from kvsim_traces import open_trace

    trace = open_trace(tmp_path / "t")
    assert trace.kvzip_scores().shape == (3, 2, trace.prompt_length)
