import json
from typing import Any

import pytest
from kvsim_traces import LayerInfo, Manifest, TraceError
from making import Recording


def data(**changes: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(Recording().manifest("qkv").to_json()))
    made.update(changes)
    return made


def test_round_trip_keeps_unknown_keys() -> None:
    given = data(future={"a": [1]})
    manifest = Manifest.from_json(given)
    assert manifest.extra == {"future": {"a": [1]}}
    assert json.loads(json.dumps(manifest.to_json())) == given


def test_eligible_layers() -> None:
    layers = [LayerInfo(), LayerInfo("sliding_attention", False, 512), LayerInfo()]
    assert Recording().manifest("heads", layers=layers).eligible_layers == (0, 2)


@pytest.mark.parametrize("name", sorted(set(data())))
def test_every_field_is_needed(name: str) -> None:
    given = data()
    del given[name]
    with pytest.raises(TraceError, match=rf"^F: {name}: "):
        Manifest.from_json(given, "F")


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("format_version", 2, "format_version"),
        ("format_version", True, "format_version"),
        ("capture", "head", "capture"),
        ("capture", ["heads"], "capture"),
        ("prompt_length", 0, "prompt_length"),
        ("prompt_length", True, "prompt_length"),
        ("prompt_length", "13", "prompt_length"),
        ("prompt_length", 13.0, "prompt_length"),
        ("prompt_length", 10**12, "prompt_length"),
        ("planned_steps", 10**12, "planned_steps"),
        ("planned_steps", 0, "planned_steps"),
        ("committed_steps", 10**12, "committed_steps"),
        ("committed_steps", 22, "committed_steps"),
        ("committed_steps", -1, "committed_steps"),
        ("committed_steps", None, "committed_steps"),
        ("complete", 1, "complete"),
        ("complete", True, "planned_steps"),
        ("num_layers", 10**12, "num_layers"),
        ("num_layers", 2**31 - 1, "num_layers"),
        ("num_layers", 2**16, "layers"),
        ("num_heads", 10**12, "num_heads"),
        ("num_heads", 2**16 + 2, "num_heads"),
        ("num_kv_heads", 2**17, "num_kv_heads"),
        ("head_dim", 2**16 + 1, "head_dim"),
        ("num_heads", 3, "num_heads"),
        ("num_kv_heads", False, "num_kv_heads"),
        ("head_dim", None, "head_dim"),
        ("head_dim", "8", "head_dim"),
        ("layers", {}, "layers"),
        ("layers", [], "layers"),
        ("layers", [1, 2, 3], r"layers\[0\]"),
        ("layers", [{"eligible": True}] * 3, r"layers\[0\]\.type"),
        ("layers", [{"type": "full_attention"}] * 3, r"layers\[0\]\.eligible"),
        ("layers", [{"type": "full_attention", "eligible": 1}] * 3, r"layers\[0\]\.eligible"),
        ("layers", [{"type": "none", "eligible": True}] * 3, r"layers\[0\]\.type"),
        ("layers", [{"type": "sliding_attention", "eligible": True}] * 3, r"layers\[0\]\.sliding_window"),
        ("layers", [{"type": "full_attention", "eligible": True, "scaling": 10**400}] * 3, r"layers\[0\]\.scaling"),
        ("layers", [{"type": "full_attention", "eligible": True, "scaling": 1e308}] * 3, r"layers\[0\]\.scaling"),
        ("layers", [{"type": "full_attention", "eligible": True, "scaling": -1e-300}] * 3, r"layers\[0\]\.scaling"),
        ("layers", [{"type": "full_attention", "eligible": True, "softcap": 0}] * 3, r"layers\[0\]\.softcap"),
        ("layers", [{"type": "full_attention", "eligible": True, "softcap": 1e-320}] * 3, r"layers\[0\]\.softcap"),
        ("sink_logits", 0, "sink_logits"),
        ("source", "magic", "source"),
        ("arrays", "keys", "arrays"),
        ("arrays", ["queries", "keys"], "arrays"),
        ("arrays", ["queries", "keys", "values", "keys"], "arrays"),
        ("arrays", ["queries", "keys", "values", "../../etc/passwd"], r"arrays\[3\]"),
        ("arrays", ["queries", "keys", "values", "/etc/passwd"], r"arrays\[3\]"),
        ("arrays", ["queries", "keys", "values", 3], r"arrays\[3\]"),
        ("arrays", ["queries", "keys", "values", "attention"], "capture"),
        ("arrays", ["queries", "keys", "values", "tokens", "text"], "arrays"),
        ("model", [], "model"),
        ("model", {"name": "m"}, r"model\.config"),
        ("tokenizer", {"name": 1, "hash": None}, r"tokenizer\.name"),
        ("vocab_size", 0, "vocab_size"),
        ("environment", {"torch": 2}, r"environment\.torch"),
        ("generation", {}, r"generation\.mode"),
        ("check", {"step": 1}, r"check\.max_abs_error"),
        ("notes", "x", "notes"),
        ("notes", [1], r"notes\[0\]"),
        ("created", 5, "created"),
    ],
)
def test_bad_values_name_file_and_field(name: str, value: Any, field: str) -> None:
    with pytest.raises(TraceError, match=rf"^F: {field}: "):
        Manifest.from_json(data(**{name: value}), "F")


@pytest.mark.parametrize("given", [None, [], "x", 3])
def test_not_an_object(given: Any) -> None:
    with pytest.raises(TraceError, match=r"^F: manifest: must be an object"):
        Manifest.from_json(given, "F")
