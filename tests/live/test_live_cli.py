"""`kvsim live`, `kvsim replay --closed-loop` and `kvsim bench closed-loop` as a user meets them."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch
from kvsim_traces import open_trace, record
from recording import tiny
from token_texts import byte_level, sentencepiece
from typer.testing import CliRunner

from kvsim.cli import app

STEPS = 6
TEXT = "the three thin thieves"
VOCAB = 300


def run(*words, code=0, text=None):
    result = CliRunner().invoke(app, [str(word) for word in words], input=text)
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    if code == 2:
        assert result.stderr.startswith("kvsim: error: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
    return result


def save(path, tokenizer=None, model=None, **changes):
    (tiny("llama-gqa3", vocab_size=VOCAB, **changes) if model is None else model).save_pretrained(path)
    (tokenizer or byte_level()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def trace(folder, tmp_path_factory):
    from kvsim_traces.loading import load_model

    model, tokenizer = load_model(folder, device="cpu")
    out = tmp_path_factory.mktemp("recordings") / "thieves"
    record(model, tokenizer(TEXT).input_ids, out=out, steps=STEPS, capture="qkv", tokenizer=tokenizer)
    return out


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def live(folder, prompt):
    return ["live", "--model", folder, "--prompt", prompt, "--steps", STEPS, "--budget", 5, "-q"]


@pytest.fixture
def closed(folder, trace):
    return ["replay", "--closed-loop", "--model", folder, "--trace", trace, "--budget", 5, "-q"]


# kvsim live


def test_live_prints_what_each_policy_held_and_wrote(live):
    output = run(*live, "--policy", "full", "--policy", "ema:0.8").stdout
    assert max(len(line) for line in output.splitlines() if not line.startswith(("full: ", "ema:0.8: "))) <= 100
    for word in ("ema:0.8", "full", "kept", "evicted keys masked", "B: 5 tokens", "prompt 18 tokens"):
        assert word in output, output


def test_live_warns_of_positions_beyond_the_models(live):
    """A prompt of 18 tokens, and a model that is made for 128."""
    words = [*live, "--policy", "ema:0.8", "--steps"]
    assert run(*words, 110).stderr == ""
    assert run(*words, 111).stderr == (
        "kvsim: warning: a prompt of 18 tokens and 111 steps reach beyond the 128 positions that the model is made "
        "for\n"
    )


def test_live_json_holds_everything(live):
    rows = json.loads(run(*live, "--policy", "full", "--policy", "ema:0.8", "--json").stdout)["results"]
    full, ema = rows
    assert full["policy"] == "full"
    assert ema["policy"] == "ema:0.8/budget=5"
    assert full["evictions"] == 0
    assert full["kept_mass"] == pytest.approx(1)
    assert ema["loop"] == "live"
    assert ema["steps"] == len(ema["tokens"]) == STEPS
    assert 0 < ema["kept_mass"] < 1
    assert ema["logical_bytes"] < ema["physical_bytes"] == ema["full_bytes"]
    assert {"near_ties", "text", "churn", "output_error", "trace_hash", "version"} <= set(ema)


def test_live_removes_keys_when_asked(live):
    (row,) = json.loads(run(*live, "--policy", "ema:0.8", "--physical", "--json").stdout)["results"]
    (kept,) = json.loads(run(*live, "--policy", "ema:0.8", "--json").stdout)["results"]
    assert row["tokens"] == kept["tokens"]
    assert row["physical_bytes"] == row["logical_bytes"] < row["full_bytes"]
    assert "kept_mass" not in row
    output = run(*live, "--policy", "ema:0.8", "--physical").stdout
    assert "evicted keys removed" in output


def test_live_feeds_given_text_and_samples_by_seed(live, tmp_path):
    forced = tmp_path / "forced.txt"
    forced.write_text("the end")
    (row,) = json.loads(run(*live, "--policy", "tova", "--force", forced, "--json").stdout)["results"]
    assert row["text"] == "the end"[: len(row["text"])]
    assert row["tokens"] == byte_level()("the end").input_ids[:STEPS]
    sampled = [
        json.loads(run(*live, "--policy", "tova", "--temperature", 9, "--seed", seed, "--json").stdout)["results"][0]
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1]
    assert sampled[0]["tokens"] != sampled[2]["tokens"]


def test_live_reads_the_prompt_from_stdin(folder, live):
    piped = [*live[:4], "-", *live[5:], "--policy", "ema:0.8", "--json"]
    from_file = run(*live, "--policy", "ema:0.8", "--json").stdout
    assert run(*piped, text=TEXT).stdout == from_file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", 0], "--steps must be at least 1"),
        (["--policy", "emma"], "did you mean 'ema'"),
        (["--policy", "oracle:exact"], "not run live"),
        (["--policy", "kvzip"], "record with --kvzip"),
        (["--budget", 5, "--compression-ratio", 0.5], "not both"),
        (["--budget", 0], "at least 1 token"),
        (["--temperature", -1], "temperature must be finite"),
        (["--prompt", "/nowhere/prompt.txt"], "--prompt /nowhere/prompt.txt: No such file or directory"),
        (["--force", "/nowhere/forced.txt"], "--force /nowhere/forced.txt: No such file or directory"),
        (["--model", "/nowhere/model"], "no such model directory"),
        (["--dtype", "float99"], "is not a torch number type"),
        (["--chat"], "no chat template"),
    ],
)
def test_live_refuses_in_one_line(live, words, message):
    given = live if "--policy" in words else [*live, "--policy", "ema:0.8"]
    assert message in run(*given, *words, code=2).stderr


def test_live_refuses_text_outside_the_vocabulary(prompt, tmp_path):
    small = save(tmp_path / "small", model=tiny("llama-gqa3", vocab_size=150))
    forced = tmp_path / "forced.txt"
    forced.write_text("é")
    words = ["live", "--model", small, "--policy", "ema:0.8", "-q"]
    message = "is outside the vocabulary of 150"
    assert message in run(*words, "--prompt", prompt, "--force", forced, code=2).stderr
    assert message in run(*words, "--prompt", forced, code=2).stderr


def test_layers_that_are_not_attention_are_refused(folder, trace, prompt, tmp_path):
    other = shutil.copytree(folder, tmp_path / "linear")
    config = json.loads((other / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    (other / "config.json").write_text(json.dumps(config))
    message = "layer 1 is 'linear_attention'; live decoding knows full_attention, sliding_attention, chunked_attention"
    assert message in run("live", "--model", other, "--prompt", prompt, "--policy", "ema:0.8", "-q", code=2).stderr
    words = ["replay", "--closed-loop", "--model", other, "--trace", trace, "--policy", "ema:0.8", "-q"]
    assert message in run(*words, code=2).stderr


# kvsim replay --closed-loop


def test_closed_loop_prints_passes_and_the_certificate(closed):
    output = run(*closed, "--policy", "ema:0.8", "--policy", "single/group=head").stdout
    assert max(map(len, output.splitlines())) <= 100
    for word in ("closed loop", "ema:0.8", "single/group=head", "yes", "passes", "B: 5 tokens"):
        assert word in output, output
    assert "--max-passes" not in output


def test_closed_loop_says_so_when_it_did_not_settle(closed):
    output = run(*closed, "--policy", "single", "--max-passes", 1).stdout
    assert " no " in output
    assert "allow more --max-passes" in output
    (row,) = json.loads(run(*closed, "--policy", "single", "--max-passes", 1, "--json").stdout)["results"]
    assert row["exact"] is False
    assert row["passes"] == 1


def test_closed_loop_json_is_live_decoding_of_the_recorded_text(closed, live, trace, tmp_path):
    (row,) = json.loads(run(*closed, "--policy", "ema:0.8", "--json", "--out", tmp_path / "out").stdout)["results"]
    assert row["exact"] is True
    assert row["loop"] == "closed"
    assert row["trace"] == "thieves"
    assert row["trace_hash"] == open_trace(trace).hash
    assert row["changed"][-1] == 0
    assert row["exact_steps"][-1] == STEPS
    forced = tmp_path / "forced.txt"
    tokens = open_trace(trace).tokens[-STEPS:].tolist()
    forced.write_text(byte_level().decode(tokens))
    if byte_level()(forced.read_text()).input_ids == tokens:
        (lived,) = json.loads(run(*live, "--policy", "ema:0.8", "--force", forced, "--json").stdout)["results"]
        assert lived["evictions"] == row["evictions"]
        assert lived["kept_mass"] == pytest.approx(row["kept_mass"], abs=1e-5)
    results = pl.read_parquet(tmp_path / "out" / "results.parquet")
    assert results["loop"].to_list() == ["closed"]


def test_closed_loop_takes_the_prompt_from_the_recording(closed):
    own = json.loads(run(*closed, "--policy", "ema:0.8", "--json").stdout)["results"][0]
    read = json.loads(run(*closed, "--policy", "ema:0.8", "--prefix", "trace", "--json").stdout)["results"][0]
    assert read["exact"] is True
    assert read["kept_mass"] == pytest.approx(own["kept_mass"], abs=5e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-passes", 0], "max_passes must be at least 1"),
        (["--shadow"], "--closed-loop does not take --shadow"),
        (["--store-rows"], "--closed-loop does not take"),
        (["--engine", "reference"], "--closed-loop does not take"),
        (["--mode", "fast"], "--closed-loop does not take"),
        (["--policy", "oracle:exact"], "not run live"),
        (["--policy", "kvzip"], "record with --kvzip"),
        (["--model", "/nowhere/model"], "no such model directory"),
    ],
)
def test_closed_loop_refuses_in_one_line(closed, words, message):
    given = closed if "--policy" in words else [*closed, "--policy", "ema:0.8"]
    assert message in run(*given, *words, code=2).stderr


def test_closed_loop_needs_a_model(trace, folder):
    words = ["replay", "--trace", trace, "--policy", "ema:0.8"]
    assert "name it with --model" in run(*words, "--closed-loop", code=2).stderr
    for extra in (["--model", folder], ["--max-passes", 3], ["--prefix", "trace"]):
        assert "are for --closed-loop" in run(*words, *extra, code=2).stderr


def other_models(folder, tmp_path):
    """Folders that are not the recorded model, and what is said of them."""
    weights = tiny("llama-gqa3", vocab_size=VOCAB)
    with torch.no_grad():
        weights.lm_head.weight[0, 0] += 1
    yield (
        save(tmp_path / "a", num_hidden_layers=2),
        "another model (tiny): its config has num_hidden_layers 3, this one 2",
    )
    yield save(tmp_path / "b", tokenizer=sentencepiece()), "another tokenizer (tiny)"
    yield save(tmp_path / "c", model=weights), "other weights (tiny, hash"


def test_another_model_is_not_run_over_a_recording(folder, trace, tmp_path):
    for command in (["replay", "--closed-loop", "--policy", "ema:0.8"], ["bench", "closed-loop"]):
        for number, (model, message) in enumerate(other_models(folder, tmp_path / command[0])):
            result = run(*command, "--model", model, "--trace", trace, "-q", code=2)
            assert message in result.stderr, (number, result.stderr)


def test_imports_say_nothing_about_their_model(folder, trace, tmp_path):
    run("trace", "export", trace, "--out", tmp_path / "a.npz")
    run("trace", "import", tmp_path / "a.npz", "--out", tmp_path / "a")
    words = ["replay", "--closed-loop", "--model", folder, "--trace", tmp_path / "a", "--policy", "ema:0.8", "-q"]
    assert "was not made by the recorder" in run(*words, code=2).stderr


def test_captures_without_values_hold_no_prompt(folder, tmp_path):
    from kvsim_traces.loading import load_model

    model, tokenizer = load_model(folder, device="cpu")
    record(model, tokenizer(TEXT).input_ids, out=tmp_path / "t", steps=2, capture="qk", tokenizer=tokenizer)
    words = ["replay", "--closed-loop", "--model", folder, "--trace", tmp_path / "t", "--policy", "ema:0.8", "-q"]
    assert "captures that have them: qkv" in run(*words, "--prefix", "trace", code=2).stderr


# kvsim bench closed-loop


def test_bench_reports_equal_sets_and_times(folder, trace):
    words = ["bench", "closed-loop", "--model", folder, "--trace", trace, "--compression-ratio", "0.7", "-q"]
    report = json.loads(run(*words, "--json").stdout)
    assert report["cases"] == len(report["rows"]) == 18
    assert report["swaps"] == 0
    assert report["passes_max"] <= STEPS
    assert report["time_ratio_median"] is None
    assert sum(one["policies"] for one in report["batches"]) == 18
    output = run(*words, "--policy", "ema:0.8", "--policy", "tova", "--alone").stdout
    assert max(map(len, output.splitlines())) <= 100
    assert "closed / live" in output
    assert "tova" in output


def test_no_number_from_sets_that_differ(folder, trace, monkeypatch):
    import kvsim.bench_closed_loop as bench

    def wrong(*args, **options):
        runs = bench_decode(*args, **options)
        runs[0].evicted_at[0] = np.where(runs[0].evicted_at[0] == 1, 2, runs[0].evicted_at[0])
        return runs

    bench_decode = bench.decode
    monkeypatch.setattr(bench, "decode", wrong)
    words = ["bench", "closed-loop", "--model", folder, "--trace", trace, "--policy", "ema:0.8", "-q"]
    assert "closed loop and live decoding differ in" in run(*words, code=2).stderr
