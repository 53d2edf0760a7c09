"""Recordings and settings at the edge give defined values or one clear line, from every analysis: never NaN."""

import json
import math
import re

import numpy as np
import pytest
import typer
from cases import POLICIES, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import oracle
from kvsim.anatomy import dissect
from kvsim.cli import analyze, app
from kvsim.floor import random_floor
from kvsim.memory import memory
from kvsim.synth import Synthetic, write_synthetic
from kvsim.tradeoff import PARTS, decompose

PROMPT = 24


def rows_of(value, steps=6):
    """Recorded rows whose every entry is `value(n)` for n positions."""
    rows = np.zeros((steps, 3, 4, PROMPT + steps), np.float32)
    for t in range(steps):
        rows[t, ..., : PROMPT + t + 1] = value(PROMPT + t + 1)
    return rows


RECORDINGS = {
    "usual": lambda path: write_trace(path, prompt=PROMPT),
    "one step": lambda path: write_trace(path, prompt=PROMPT, steps=1),
    "two steps": lambda path: write_trace(path, prompt=PROMPT, steps=2),
    "one token": lambda path: write_trace(path, prompt=1, steps=1),
    "constant scores": lambda path: write_trace(path, attention=rows_of(lambda n: 1 / n), prompt=PROMPT),
    "all-zero rows": lambda path: write_trace(path, attention=rows_of(lambda n: 0), prompt=PROMPT, sink_logits=True),
    "one layer, one head": lambda path: write_trace(path, prompt=PROMPT, layers=1, heads=1, kv_heads=1),
    "head means": lambda path: write_trace(path, prompt=PROMPT, capture="scores"),
    "synthetic": lambda path: write_synthetic(Synthetic(prompt=1, steps=1, layers=1, heads=1, noise=0), path),
}
BUDGETS = [1, PROMPT, 1000]

# What a command is called with where its own defaults, and those below for what it requires, will not do.
CALLS: dict[str, list[list[str]]] = {
    "alpha": [[], ["--h", "0"], ["--h", "1000", "--smoothed"]],
    "diff": [["ema:0.8", "single"], ["ema:0.8", "cumulative", "random:1", "--shadow"]],
    "floor": [["--policy", "knorm", "--policy", "ema:0.8", "--policy", "full", "--seeds", "3"], ["--policy", "single"]],
    "footprint": [
        ["--policy", "ema:0.8", "--shape", "smollm2-135m", "--layout", layout] for layout in ("append", "compact")
    ],
    "oracle": [
        ["--policy", "ema:0.8", "--policy", "tova", "--policy", "full", "--policy", "random:1", "--seeds", "2"],
        ["--policy", "ema:0.8", "--policy", "oracle:future", "--method", "exact", "--seeds", "1"],
    ],
}
REQUIRED = {"policy": "ema:0.8"}
OTHERS = {"prediction"}
"""Commands that read files of results instead of recordings."""


def calls():
    """Every command of `kvsim analyze` with the words that it needs besides recordings and a budget."""
    commands = typer.main.get_command(analyze.app).commands
    assert set(CALLS) <= set(commands)
    for name in sorted(set(commands) - OTHERS):
        command, words = commands[name], []
        for param in command.params:
            if param.required:
                value = REQUIRED[param.name]
                words += [param.opts[0], value] if param.opts[0].startswith("-") else [value]
        options = {option for param in command.params for option in param.opts}
        for own in CALLS.get(name, [words]):
            yield pytest.param(name, own, options, id=f"{name} {' '.join(own)}".strip())


def refuse(name):
    raise AssertionError(f"{name} in JSON")


def run(*words):
    """Run a command; give its exit code and its output, which must be numbers or one line of error."""
    result = CliRunner().invoke(app, [*map(str, words)])
    assert result.exit_code in (0, 2), (words, result.output, result.exception)
    if result.exit_code == 2:
        lines = result.stderr.strip().splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("kvsim: error: "), result.stderr
    assert not re.search(r"\b(nan|inf|None)\b", result.stdout, re.IGNORECASE), result.stdout
    return result.exit_code, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("recording", RECORDINGS)
@pytest.mark.parametrize(("name", "words", "options"), list(calls()))
def test_analyses(tmp_path, name, words, options, recording):
    trace = RECORDINGS[recording](tmp_path / "t")
    where = ["--trace", trace.path] if "--trace" in options else []
    budgets = [["--budget", budget] for budget in BUDGETS] if "--budget" in options else [[]]
    codes = []
    for budget in budgets:
        code, text = run("analyze", name, *words, *where, *budget, "--json")
        codes.append(code)
        if code == 0:
            assert json.loads(text, parse_constant=refuse)
    assert 0 in codes or recording != "usual"
    assert run("analyze", name, *words, *where, *budgets[0])[0] == codes[0]


EDGES = [
    "full/admit=random:0,window=1",
    "ema:0.8/admit=local:window=1,sink=1",
    "cumulative/when=overflow/admit=random:0.5,window=1",
    "full/admit=oracle:0.5,window=2/select=quest:16",
    "single/select=topk:1",
    "ema:0.8/when=overflow/select=quest:16",
]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("recording", RECORDINGS)
def test_replays(tmp_path, recording, budget):
    """Every policy of the shared list: numbers, or a refusal."""
    trace = RECORDINGS[recording](tmp_path / "t")
    ran = 0
    texts = [*POLICIES, *EDGES]
    for text in texts:
        try:
            result = kvsim.replay(trace, text, budget=budget)
        except (kvsim.KvsimError, kvsim.TraceError):
            continue
        ran += 1
        json.dumps(result.summary(), allow_nan=False)
        assert 0 <= result.summary()["kept_mass"] <= 1 + 2e-3
        for column in result.steps:
            assert column.is_finite().all()
    assert ran == len(texts) or recording != "usual" or budget == 1
    assert ran > 20
    words = [word for method in oracle.METHODS for word in ("--policy", f"oracle:{method}")]
    assert run("replay", "--trace", trace.path, "--budget", budget, *words)[0] == 0
    code, text = run("replay", "--trace", trace.path, "--budget", budget, *words, "--json")
    assert code == 0
    for row in json.loads(text, parse_constant=refuse)["results"]:
        assert 0 <= row["oracle_gap"] <= 1


@pytest.mark.parametrize("recording", RECORDINGS)
def test_functions(tmp_path, recording):
    trace = RECORDINGS[recording](tmp_path / "t")
    for budget in BUDGETS:
        results = kvsim.replay_many(trace, ["ema:0.8", "single", "random:1"], budget=budget, shadow_churn=False)
        for result in results:
            assert 0 <= oracle.gap(result, trace, "exact") <= oracle.gap(result, trace) + 1e-12 <= 1 + 1e-12
            over_time = oracle.gap_over_time(result, trace)
            assert np.isfinite(over_time.policy).all()
            assert np.isfinite(over_time.optimum).all()
        found = dissect(results, trace)
        assert 0 <= found.invariant_steps <= 1
        assert all(np.isfinite(pair.jaccard).all() for pair in found.pairs)
        for one in random_floor(results, trace, seeds=2):
            assert 0 <= one.percentile <= 1
        for row in decompose(trace, ["ema:0.8", "cumulative"], budget=budget, h=1000):
            assert all(math.isfinite(getattr(row, part)) for part in PARTS)
            assert budget < 1000 or row.total == 0
    json.dumps(memory("ema:0.8", 1, steps=trace.num_steps).summary(), allow_nan=False)


@pytest.mark.parametrize("kind", ["iid", "drift", "shift", "heavy", "sink"])
@pytest.mark.parametrize("noise", [0, 0.3])
def test_the_smallest_synthetic_recording(tmp_path, kind, noise):
    out = tmp_path / "s"
    words = ["--kind", kind, "--prompt", 1, "--steps", 1, "--layers", 1, "--heads", 1, "--noise", noise]
    assert run("trace", "synth", "--out", out, *words)[0] == 0
    trace = kvsim.open_trace(out)
    assert np.isfinite(trace.attention_rows(1)).all()
    code, text = run("analyze", "alpha", "--trace", out, "--budget", 1, "--json")
    assert code == 0
    rows = json.loads(text, parse_constant=refuse)["results"]
    assert noise or all(row["boundary"] == 0 for row in rows)


@pytest.mark.parametrize("words", [["--prompt", 0], ["--steps", 0], ["--noise", "nan"], ["--drift", "inf"]])
def test_what_is_no_recording_is_refused(tmp_path, words):
    assert run("trace", "synth", "--out", tmp_path / "s", "--kind", "drift", *words)[0] == 2
    assert not (tmp_path / "s").exists()
