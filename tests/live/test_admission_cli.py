"""`kvsim live`, `kvsim eval` and closed loops under admission, as a user meets them."""

import json

import pytest
from gates import gate_for
from recording import tiny
from token_texts import byte_level
from typer.testing import CliRunner

from kvsim.cli import app
from kvsim.live import prefill
from kvsim.live.closed_loop import closed_loop
from kvsim.live.device import closed_loop_on_device

LOCAL = "full/admit=local:window=4,sink=1"


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa3", vocab_size=300, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def words(folder, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the three thin thieves")
    return ["live", "--model", folder, "--prompt", prompt, "--device", "cpu", "--steps", 3]


def test_live_reads_the_prompt_under_each_policys_admission(words, model, tmp_path):
    gate = gate_for(prefill(model, [0]), tmp_path / "gate.safetensors")
    policies = ["full", LOCAL, f"full/admit=wgkv:{gate}", "ema:0.8/admit=random:0.5,window=4/select=topk:3"]
    given = [part for policy in policies for part in ("--policy", policy)]
    rows = json.loads(run(*words, *given, "--budget", 8, "--json").stdout)["results"]
    held = [row["logical_bytes"] for row in rows]
    # After the last step the sink and what the next query's window will still hold: 4 tokens of 2 layers with 2 heads
    # of 16 numbers, keys and values, float32.
    assert held[1] == 4 * 2 * 2 * 16 * 2 * 4
    assert held[1] < held[2] < held[0] == rows[0]["full_bytes"]
    assert held[3] <= 8 * 2 * 2 * 16 * 2 * 4
    for row in rows:
        assert 0 < row["kept_mass"] < 1 + 1e-6
    physical = json.loads(run(*words, "--policy", LOCAL, "--physical", "--json").stdout)["results"][0]
    assert physical["physical_bytes"] == held[1]
    assert physical["text"] == rows[1]["text"]


def test_live_on_the_device_says_the_same(words):
    plain = json.loads(run(*words, "--policy", LOCAL, "--json").stdout)["results"][0]
    fast = json.loads(run(*words, "--policy", LOCAL, "--engine", "triton", "--json").stdout)["results"][0]
    assert fast["tokens"] == plain["tokens"]
    assert fast["logical_bytes"] == plain["logical_bytes"]
    assert fast["evictions"] == plain["evictions"]


def test_live_refuses_by_name(words):
    found = run(*words, "--policy", "full/admit=oracle:0.5", code=2)
    assert "reads what later queries attend to; it can be replayed, not run live" in found.stderr
    found = run(*words, "--policy", "h2o/admit=local:window=2", "--engine", "triton", code=2)
    assert "the dual cache on the device does not evict" in found.stderr
    found = run(*words, "--policy", "full/select=topk:3", "--engine", "triton", code=2)
    assert "the fast form does not run select=" in found.stderr


@pytest.mark.parametrize("loop", [closed_loop, closed_loop_on_device])
@pytest.mark.parametrize("policy", [LOCAL, "ema:0.8/select=topk:3"])
def test_closed_loops_refuse_by_name(model, loop, policy):
    from kvsim.errors import KvsimError

    axis = "admit" if "admit" in policy else "select"
    with pytest.raises(KvsimError, match=f"a closed loop does not run {axis}="):
        loop(model, prefill(model, [1, 2, 3, 4, 5, 6]), [7, 8], [policy])


def test_eval_takes_admission(folder):
    rows = json.loads(
        run(
            "eval", "--model", folder, "--task", "niah_single_1", "--length", 640, "--samples", 1, "--answer-tokens", 2,
            "--policy", "full", "--policy", "full/admit=local:window=8,sink=2", "--device", "cpu", "--json", "-q",
        ).stdout
    )  # fmt: skip
    text = json.dumps(rows)
    assert "admit=local:window=8,sink=2" in text
