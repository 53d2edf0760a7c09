"""Whether a model is the one that was recorded: what must agree, and what may differ."""

import copy
import json

import pytest
import torch
from kvsim_traces import open_trace, record
from recording import tiny
from token_texts import byte_level, sentencepiece

from kvsim.errors import KvsimError
from kvsim.live.match import check_model

VOCAB = 300


def model_of(**changes):
    return tiny("llama-gqa3", vocab_size=VOCAB, **changes)


def recorded(path, model, tokenizer=None):
    return record(model, [1, 2, 3, 4], out=path, steps=2, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recordings") / "t", model_of(), byte_level())


def test_the_recorded_model_is_accepted(trace):
    check_model(trace, model_of())
    check_model(trace, model_of(), byte_level())


def test_a_copy_in_another_number_type_is_accepted(trace):
    check_model(trace, model_of(dtype=torch.bfloat16), byte_level())


def test_how_weights_are_stored_says_nothing(trace):
    model = model_of()
    model.config.use_cache = False
    model.config.architectures = ["Something"]
    model.config.quantization_config = {"quant_method": "gguf"}
    model.config.a_key_of_tomorrow = 1
    check_model(trace, model, byte_level())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "its config has num_hidden_layers 3, this one 2"),
        ({"rms_norm_eps": 1e-3}, "its config has rms_norm_eps 1e-06, this one 0.001"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "its config has rope_parameters"),
    ],
)
def test_another_config_is_named(trace, changes, message):
    with pytest.raises(KvsimError, match=message) as caught:
        check_model(trace, model_of(**changes))
    assert str(caught.value).startswith(str(trace.path))


def test_another_tokenizer_is_named(trace):
    with pytest.raises(KvsimError, match=r"another tokenizer \(\w+\), hash \w{12}…; this one's is \w{12}…"):
        check_model(trace, model_of(), sentencepiece())
    changed = byte_level()
    changed.add_tokens(["<new>"])
    with pytest.raises(KvsimError, match="another tokenizer"):
        check_model(trace, model_of(), changed)


def test_other_weights_are_named(trace):
    model = model_of()
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    with pytest.raises(KvsimError, match=r"other weights \(LlamaForCausalLM, hash"):
        check_model(trace, model)


def test_a_recording_without_a_tokenizer_fits_any(tmp_path):
    check_model(recorded(tmp_path / "t", model_of()), model_of(), sentencepiece())


def edited(trace, path, change):
    """A copy of a recording with another manifest."""
    for file in trace.path.rglob("*"):
        if file.is_file():
            target = path / file.relative_to(trace.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    document = json.loads((path / "zarr.json").read_text())
    manifest = document["attributes"]["kvsim"]
    change(manifest)
    (path / "zarr.json").write_text(json.dumps(document))
    return open_trace(path)


def test_recordings_that_do_not_say_what_they_came_from(trace, tmp_path):
    def imported(manifest):
        manifest["source"] = "import"

    def anonymous(manifest):
        manifest["model"] = None

    for name, change in (("a", imported), ("b", anonymous)):
        with pytest.raises(KvsimError, match="was not made by the recorder"):
            check_model(edited(trace, tmp_path / name, change), model_of())


def test_a_recording_without_a_hash_of_the_weights_goes_by_the_config(trace, tmp_path):
    def unhashed(manifest):
        manifest["model"]["weights_hash"] = None

    model = copy.deepcopy(model_of())
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    check_model(edited(trace, tmp_path / "a", unhashed), model)
