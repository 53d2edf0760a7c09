"""Loading models from local files, and only from there."""

import socket

import pytest
import torch
from kvsim_traces import TraceError, record
from kvsim_traces.loading import load_model
from recording import PROMPT, tiny
from token_texts import byte_level


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("loading a local model must not open a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny("llama-gqa3", vocab_size=300).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


def test_folder(folder, tmp_path):
    model, tokenizer = load_model(folder, device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    trace = record(model, tokenizer("the").input_ids, out=tmp_path / "t", steps=2, tokenizer=tokenizer)
    assert trace.manifest.model["name"] == trace.manifest.tokenizer["name"] == "tiny-llama"
    assert trace.texts()[:2] == ["th", "e"]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_type_and_attention_are_chosen(folder, dtype):
    model, _ = load_model(str(folder), dtype=dtype, device="cpu", attention="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such model directory or .gguf file"),
        ([], r"not a model directory \(no config.json and no .gguf file\)"),
        (["a.gguf", "b.gguf"], r"not a model directory \(no config.json and 2 .gguf files\)"),
        (["config.json"], "transformers cannot load this model"),
        (["broken.gguf"], "transformers cannot load this model"),
    ],
)
def test_what_is_no_model(tmp_path, files, message):
    path = tmp_path / "some-model"
    if files is not None:
        path.mkdir()
    for name in files or []:
        (path / name).write_text("{}")
    with pytest.raises(TraceError, match=message) as error:
        load_model(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\ud800", "loop/m"])
def test_unusable_paths(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TraceError) as caught:
        load_model(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_hub_names_and_other_files_are_not_models(tmp_path):
    with pytest.raises(TraceError, match=r"^HuggingFaceTB/SmolLM2-135M: no such model directory"):
        load_model("HuggingFaceTB/SmolLM2-135M")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(TraceError, match=r"not a model \(expected a transformers folder or a .gguf file\)"):
        load_model(file)


def test_unknown_type(folder):
    with pytest.raises(TraceError, match="dtype: 'nonsense' is not a torch number type"):
        load_model(folder, dtype="nonsense")


def test_a_device_that_is_not_there(folder):
    for device in ["nonsense", "xpu:99"] + ["cuda"] * (not torch.cuda.is_available()):
        with pytest.raises(TraceError, match=f"device '{device}' cannot be used: ") as caught:
            load_model(folder, device=device)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["file", "directory"])
def test_gguf(tmp_path, place):
    pytest.importorskip("gguf", reason="writes a GGUF file")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF")
    path = write_gguf(tmp_path / "models" / "tiny.gguf")
    model, tokenizer = load_model(path if place == "file" else path.parent, device="cpu")
    assert model.dtype == torch.float32
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    trace = record(model, PROMPT, out=tmp_path / "t", steps=2, tokenizer=tokenizer)
    assert trace.manifest.model["name"] == "tiny.gguf"
    assert trace.manifest.check["max_abs_error"] < 1e-5


def write_gguf(path):
    """A Llama of one layer with quantized weights, in the layout llama.cpp writes."""
    import gguf
    import numpy as np

    path.parent.mkdir()
    width, heads, vocab = 64, 4, 300
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_vocab_size(vocab)
    tokenizer = byte_level()
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    names = [token for token, _ in tokens] + ["the", *(f"<unused{i}>" for i in range(vocab - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([1] * vocab)
    # transformers before 5.24 cannot read a list of a single merge
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (vocab, width), "output.weight": (vocab, width)}
    shapes |= {f"blk.0.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}.weight": (width, width) for name in ("gate", "up", "down")}
    for name, shape in shapes.items():
        weight = rng.normal(scale=0.3, size=shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    for name in ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"):
        writer.add_tensor(name, np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
