"""The next-token loss of texts under policies: one masked pass is what decoding and eager attention give."""

import json
import os
import subprocess
import sys
from itertools import chain

import numpy as np
import pytest
import torch
from gates import gate_for
from recording import VOCAB, tiny
from token_texts import byte_level
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.live import prefill
from kvsim.text_loss import compare, text_losses

TEXTS = [[(a * i * i + 3 * i + b) % VOCAB for i in range(26)] for a, b in ((7, 1), (5, 11), (11, 4))]
PROMPT = 14


@pytest.fixture(scope="module")
def llama():
    return tiny("llama-gqa3")


@pytest.fixture(scope="module")
def policies(llama, tmp_path_factory):
    gate = gate_for(prefill(llama, [0]), tmp_path_factory.mktemp("gate") / "gate.safetensors")
    return ["full", "full/admit=local:window=5,sink=2", f"full/admit=wgkv:{gate}", "full/admit=random:0.4,window=1"]


def measured(model, policies, **options):
    return list(text_losses(model, TEXTS, policies, prompt=PROMPT, **options))


def test_one_pass_is_what_decoding_gives(llama, policies):
    fast, slow = (measured(llama, policies, one_pass=one) for one in (True, False))
    for ours, theirs in zip(chain(*fast), chain(*slow), strict=True):
        assert ours.one_pass
        assert not theirs.one_pass
        assert ours.loss == pytest.approx(theirs.loss, abs=2e-5)
        assert ours.cache_tokens == pytest.approx(theirs.cache_tokens, abs=1e-9)
        assert ours.cache_share == pytest.approx(theirs.cache_share, abs=1e-12)
        assert ours.policy == theirs.policy
        assert ours.tokens == 12


def test_a_full_cache_has_the_models_own_loss(llama, policies):
    for text, (full, *_) in zip(TEXTS, measured(llama, policies), strict=True):
        with torch.inference_mode():
            logits = llama(torch.tensor([text])).logits[0, PROMPT - 1 : -1]
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(text[PROMPT:]))
        assert full.loss == pytest.approx(float(wanted), abs=1e-5)
        # Steps 1 to T - 1 feed tokens; they see 15, 16, … 25.
        assert full.cache_tokens == pytest.approx(np.mean(range(15, 26)))
        assert full.cache_share == 1


def test_local_attention_sees_its_window_and_sink(llama, policies):
    for _, local, *_ in measured(llama, policies):
        assert local.cache_tokens == 7


def test_eviction_and_selection_are_decoded(llama, policies):
    given = ["ema:0.8", "h2o/admit=random:0.6,window=3", "full/select=topk:3"]
    for row in measured(llama, given, budget=7):
        assert [one.one_pass for one in row] == [False] * 3
        assert row[0].cache_tokens <= 8 + 7 / 11
        assert row[1].cache_tokens < row[0].cache_tokens
        assert row[2].cache_share == 1
    alone = measured(llama, given, budget=7, rows=1)
    assert [[one.loss for one in row] for row in alone] == [
        pytest.approx([one.loss for one in row], abs=2e-5) for row in measured(llama, given, budget=7)
    ]


def test_compare_pairs_by_text(llama, policies):
    rows = measured(llama, policies)
    table = compare(rows)
    assert table[0]["against_first"] is None
    for index, row in enumerate(table):
        own = [text[index].loss for text in rows]
        assert row["loss"] == pytest.approx(np.mean(own))
        assert row["perplexity"] == pytest.approx(np.exp(np.mean(own)))
        assert row["texts"] == 3
        if index:
            other = row["against_first"]
            assert other["delta"] == pytest.approx(np.mean(own) - table[0]["loss"])
            assert other["low"] <= other["delta"] <= other["high"]


def test_errors(llama):
    with pytest.raises(KvsimError, match="a text has 4 tokens; a prompt of 3 and 2 more are needed"):
        list(text_losses(llama, [[1, 2, 3, 4]], ["full"], prompt=3))
    with pytest.raises(KvsimError, match="reads what later queries attend to"):
        list(text_losses(llama, TEXTS, ["full/admit=oracle:0.5"], prompt=3))
    with pytest.raises(KvsimError, match="there are no texts"):
        compare([])
    broken = tiny("llama-gqa3")
    with torch.no_grad():
        broken.get_input_embeddings().weight[TEXTS[0][0]] = torch.nan
    for policy in ("full", "ema:0.8"):
        with pytest.raises(KvsimError, match="the model's logits are not numbers"):
            list(text_losses(broken, TEXTS, [policy], prompt=PROMPT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny("llama-gqa3", vocab_size=300).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def words(folder, tmp_path):
    data = tmp_path / "text.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"{i} thin thieves thought of three"}) for i in range(6)))
    return [
        "--model", folder, "--data", data, "--length", 20, "--prefill", 9, "--texts", 3, "--device", "cpu",
        "--policy", "full", "--policy", "full/admit=local:window=3,sink=1",
    ]  # fmt: skip


def test_both_commands_say_the_same(words):
    found = CliRunner().invoke(app, ["loss", *map(str, words), "--json"])
    assert found.exit_code == 0, (found.output, found.exception)
    report = json.loads(found.stdout)
    code = (
        "import sys; sys.modules['polars'] = sys.modules['typer'] = None; "
        "from kvsim.text_loss_command import main; raise SystemExit(main(sys.argv[1:]))"
    )
    own = subprocess.run(
        [sys.executable, "-c", code, *map(str, words), "--json"],
        check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert own.returncode == 0, own.stderr
    assert json.loads(own.stdout) == report
    assert report["results"][1]["cache_tokens"] == 4
    assert len(report["losses"]) == 3
    shown = CliRunner().invoke(app, ["loss", *map(str, words), "-q"])
    assert "perplexity" in shown.output
    assert kvsim.__version__ == report["version"]


def test_bad_numbers_are_one_line(words):
    found = CliRunner().invoke(app, ["loss", *map(str, words), "--skip", "99"])
    assert found.exit_code == 2
    assert "has no piece of 20 tokens after the first 99" in found.stderr
    found = CliRunner().invoke(app, ["loss", *map(str, words), "--texts", "0"])
    assert "texts must be at least 1, got 0" in found.stderr


def test_texts_are_no_longer_than_the_model_is_made_for(words):
    words = ["129" if word == 20 else word for word in words]
    found = CliRunner().invoke(app, ["loss", *map(str, words)])
    assert found.exit_code == 2
    assert "length 129: the model takes at most 128 tokens" in found.output + found.stderr
