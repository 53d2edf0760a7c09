"""Memory of replays: equal to what their sets hold, and to hand-made runs with admission and selection."""

import csv
import dataclasses
import io
import json
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
from cases import SAMPLES
from making import Recording
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.costs import HARDWARE, SHAPES, causal_pairs
from kvsim.errors import KvsimError
from kvsim.footprint import costs_of, footprint
from kvsim.held import held, held_counts, seen
from kvsim.plan import Admission, Selection

POLICIES = ["full", "ema:0.8", "tova", "h2o", "h2o/when=overflow:10%", "snapkv:16", "adakv:snapkv,window_size=16"]
NEEDLE = str(SAMPLES / "smollm2-needle-512")
MULTI = str(SAMPLES / "smollm2-multineedle-256")


@pytest.fixture(scope="module")
def results():
    return kvsim.replay_many(MULTI, POLICIES, shadow_churn=False, raw=False)


def test_tokens_are_those_of_the_retained_sets(results):
    for result in results:
        found, each = footprint(result), 90 // result.plan.groups.count
        assert found.heads == 90
        assert found.tokens[1:].tolist() == (each * held_counts(result).sum(axis=1)).tolist()
        assert found.tokens[0] == each * held(result, 0).sum()
        assert found.attended[1:].tolist() == [each * seen(result, t).sum() for t in range(1, 25)]
        assert (found.pages * 16 >= found.tokens).all()
        assert (found.fragmentation >= 0).all()
        assert (found.fragmentation < 1).all()
        assert found.triggers == found.head_triggers.max()
        assert found.triggered.sum() == found.head_triggers.sum()
        assert found.head_triggers.mean() == result.triggers
        assert found.summary()["logical_bytes"] == result.kv_bytes


def test_compaction_leaves_less_than_a_page_a_head_free(results):
    for result in results:
        stay, move = (footprint(result, layout=layout) for layout in ("append", "compact"))
        assert (move.pages <= stay.pages).all()
        assert (move.pages * 16 - move.tokens < 16 * 90).all()
        assert move.moved.any() == bool(move.evicted.any())
        assert not stay.moved.any()


def test_the_full_cache_costs_what_it_is_compared_with(results):
    found = footprint(results[0])
    assert found.attended_share == 1
    assert found.summary()["cache_size"] == 1
    costs = costs_of(found, HARDWARE["h200"], SHAPES["smollm2-135m"]).summary()
    assert costs["decode_ratio"] == costs["prefill_ratio"] == 1
    config = kvsim.open_trace(MULTI).manifest.model["config"]
    assert costs_of(found, HARDWARE["h200"], config=config).summary() == costs
    # 18 pages of 16 tokens a head: weights, keys and values, and 4 bytes a page and a table.
    last = costs_of(found, HARDWARE["h200"], config=config).decode[-1]
    assert last.bytes == 268_959_744 + 90 * 18 * 16 * 2 * 64 * 2 + 90 * (18 + 1) * 4


def test_another_shape_reads_the_mean_of_the_recordings_heads(results):
    found, llama = footprint(results[3], layout="compact"), SHAPES["llama-3.1-8b"]
    last = costs_of(found, HARDWARE["h200"], llama).decode[-1]
    # 25 tokens and the step's own take 2 pages of each head: 32 x 8 heads of 2 x 16 tokens, 2 entries and a length.
    assert last.bytes == 15_009_316_864 + 256 * 32 * 2 * 128 * 2 + 256 * (2 + 1) * 4


def test_numba_waits_until_pages_are_counted():
    code = "import sys, kvsim.cli, kvsim.footprint; assert 'numba' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_is_as_long_as_a_layers_longest_head(results):
    found = footprint(results[-1])
    counts = held_counts(results[-1])[-1].reshape(30, 3)
    assert found.padded[-1] == 3 * counts.max(axis=1).sum()
    assert found.padded[-1] > found.tokens[-1]
    assert footprint(results[1]).padded.tolist() == footprint(results[1]).tokens.tolist()


def admitted_result(results, selection=None, selected=None):
    """Give a run of one layer and two KV heads, W = 3, prompt 6, 2 steps: head 0 admits 0 and 4, head 1 nothing."""
    plan = results[3].plan
    groups = dataclasses.replace(plan.groups, layers=(0,), num_heads=4, num_kv_heads=2)
    admitted = np.zeros((2, 8), dtype=bool)
    admitted[0, [0, 4]] = True
    gone = np.array([[-1, 0, 0, 0, -1, 2, -1, -1], [0, 0, 0, 0, 1, 2, -1, -1]], dtype=np.int32)
    plan = dataclasses.replace(plan, groups=groups, admission=Admission(3, admitted), selection=selection)
    outcome = dataclasses.replace(results[3].outcome, evicted_at=gone, selected=selected)
    return dataclasses.replace(results[3], plan=plan, outcome=outcome, prompt_length=6, num_steps=2)


def test_admission_is_no_eviction(results):
    found = footprint(admitted_result(results), page_size=2)
    assert found.window == 3
    assert found.tokens.tolist() == [3 + 2, 4 + 2, 4 + 2]
    assert found.attended.tolist() == [0, 4 + 3, 5 + 3]
    # Two pages of each ring, and one that holds 0 and then 4.
    assert found.pages.tolist() == [3 + 2, 3 + 2, 3 + 2]
    assert found.triggers == 0
    assert not found.head_triggers.any()
    mask = np.array([[1, 0, 0, 0, 1, 0], [0] * 6], dtype=bool)
    assert found.prefill_pairs == causal_pairs(6, 3, mask) == 15 + 3 / 2
    costs = costs_of(found, HARDWARE["h200"], SHAPES["llama-3.1-8b"])
    assert costs.full_prefill.operations - costs.prefill.operations == 4 * 128 * 32 * 32 * (21 - 16.5)


def test_a_selection_reads_less_and_holds_as_much(results):
    whole = footprint(admitted_result(results), page_size=2)
    read = np.array([3.0, 3.5])
    quest = footprint(admitted_result(results, Selection("quest", 4, page=2), read), page_size=2)
    topk = footprint(admitted_result(results, Selection("topk", 4), read), page_size=2)
    assert quest.tokens.tolist() == topk.tokens.tolist() == whole.tokens.tolist()
    assert quest.attended.tolist() == topk.attended.tolist() == [0, 6, 7]
    assert quest.read.tolist() == [0, 6, 7]
    # Every visible key, and the values of what is read.
    assert topk.read.tolist() == [0, (7 + 6) / 2, (8 + 7) / 2]
    # Pages of what lies before the window: none, one of 0, one of 0 and 4; of head 1 none.
    assert quest.bounds.tolist() == [1, 1, 1]
    assert (quest.table_bytes - whole.table_bytes).tolist() == [whole.token_bytes] * 3


@pytest.mark.parametrize(
    "policy",
    [
        "full/admit=local:window=32,sink=4",
        "full/admit=random:0.25,window=32/select=quest:64",
        "ema:0.8/admit=random:0.5,window=16/when=overflow:10%/budget=60",
        "tova/group=head/select=topk:20",
    ],
)
def test_admission_and_selection_agree_with_the_result(policy):
    result = kvsim.replay(MULTI, policy, shadow_churn=False)
    found = footprint(result)
    assert found.attended.sum() == result.attended_pairs
    assert found.cache_size == pytest.approx(result.cache_size)
    assert found.head_triggers.mean() == result.triggers
    assert found.summary()["logical_bytes"] == result.kv_bytes
    assert found.tokens[1:].tolist() == held_counts(result).sum(axis=1).tolist()


def test_what_has_no_memory_is_refused(results, tmp_path):
    with pytest.raises(KvsimError, match="a shadow run evicts nothing"):
        footprint(kvsim.replay(MULTI, "tova", shadow=True, shadow_churn=False))
    with pytest.raises(KvsimError, match="does not know its head dimension"):
        footprint(dataclasses.replace(results[0], head_dim=None))
    with pytest.raises(KvsimError, match="bytes of a number"):
        footprint(results[0], dtype_bytes=0)
    with pytest.raises(KvsimError, match="name a shape"):
        costs_of(footprint(results[0]), HARDWARE["h200"])


def run(*words, code=0):
    result = CliRunner().invoke(app, ["analyze", "footprint", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def test_the_command_prints_what_python_says(tmp_path):
    words = [MULTI, "--policy", "h2o", "--policy", "full", "--budget", 20]
    (h2o, full) = json.loads(run(*words, "--json", "--layout", "compact", "--page", 8, "--dtype-bytes", 1).stdout)[
        "results"
    ]
    result = kvsim.replay(MULTI, "h2o", budget=20, shadow_churn=False)
    found = footprint(result, page_size=8, dtype_bytes=1, layout="compact")
    config = kvsim.open_trace(MULTI).manifest.model["config"]
    assert h2o == found.summary() | costs_of(found, HARDWARE["h200"], config=config).summary()
    assert full["attended_share"] == 1
    rows = list(csv.DictReader(io.StringIO(run(*words, "--csv", "--shape", "llama-3.1-8b").stdout)))
    assert [row["policy"] for row in rows] == ["h2o/budget=20", "full"]
    assert float(rows[0]["decode_ms"]) > 3.5
    for suffix, read in (("parquet", pl.read_parquet), ("csv", pl.read_csv)):
        out = tmp_path / f"steps.{suffix}"
        run(*words, "--out", out)
        frame = read(out)
        assert frame.height == 2 * 25
        assert frame["tokens"].to_list()[:25] == found.tokens.tolist()
        assert f"{out}: exists already" in run(*words, "--out", out, code=2).stderr


def test_a_recording_without_a_model_needs_a_shape(tmp_path):
    trace = Recording(prompt=40).write(tmp_path / "t", "qkv")
    assert "name a shape" in run(trace, "--policy", "tova", code=2).stderr
    assert "t: prompt 40" in run(trace, "--policy", "tova", "--shape", "qwen3-4b").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "tpu"], "unknown hardware 'tpu'"),
        (["--shape", "gpt"], "unknown shape 'gpt' (valid: llama-3.1-8b, qwen3-4b, smollm2-135m)"),
        (["--dtype-bytes", "0"], "bytes of a number must be above 0"),
        (["--json", "--csv"], "either --json or --csv"),
        (["--out", "steps.txt"], "unknown suffix of --out '.txt' (valid: .csv, .parquet)"),
    ],
)
def test_bad_input_is_one_line(words, message):
    error = run(MULTI, "--policy", "tova", *words, code=2).stderr
    assert message in error
    assert error.count("\n") == 1
