"""Admissions of equal cache size: how they are found, when not, and what is said of them."""

import math

import numpy as np
import pytest
from cases import MODEL, write_trace
from gates import random_gate

import kvsim
from kvsim.admission_quality.command import main, table_lines
from kvsim.admission_quality.composition import BOTH, compositions
from kvsim.admission_quality.families import FAMILIES, Families, gate_window
from kvsim.admission_quality.quality import quality
from kvsim.admission_quality.recordings import Recordings
from kvsim.admission_quality.sizes import match_size
from kvsim.admission_quality.verdicts import Row, verdict
from kvsim.admissions.random import RandomAdmit
from kvsim.budget import Budget
from kvsim.errors import KvsimError
from kvsim.policies.full import Full
from kvsim.policy import Policy
from kvsim.retrieval_heads import save_heads

LLAMA = {**MODEL, "config": {"model_type": "llama", "rope_theta": 1e4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quality")


@pytest.fixture(scope="module")
def recordings(folder):
    shape = {"layers": 2, "steps": 40, "capture": "qkv", "model": LLAMA}
    return Recordings([write_trace(folder / f"t{seed}", prompt=200 + seed, seed=seed, **shape) for seed in range(3)])


@pytest.fixture(scope="module")
def families(folder):
    gates = [random_gate(folder / f"g{seed}.safetensors", [0, 1], 2, 8, window=8, seed=seed) for seed in (1, 2)]
    scores = [[0.3, 0.9], [0.1, 0.4]]
    heads = {"model": "m", "num_layers": 2, "num_kv_heads": 2, "scores": scores, "threshold": 0.5}
    save_heads(heads, folder / "heads.json")
    return Families(tuple(gates), str(folder / "heads.json"), window=8, sink=4, seed=0, longest=242)


def at(share):
    return Policy(Full(), admit=RandomAdmit(share, window=4))


# Matching


def test_the_search_ends_within_the_tolerance():
    found = match_size(at, lambda policy: 0.1 + 0.8 * policy.admit.share**3, 0, 1, 0.37)
    assert abs(found.size / 0.37 - 1) <= 0.002
    assert found.policy.admit.share == pytest.approx((0.27 / 0.8) ** (1 / 3), abs=2e-3)
    assert found.evaluations < 20


def test_whole_numbers():
    def policy_of(value):
        assert value == int(value)
        return at(value / 1000)

    found = match_size(policy_of, lambda policy: policy.admit.share, 1, 1000, 0.5004, whole=True)
    assert found.size in (0.5, 0.501)
    with pytest.raises(KvsimError, match=r"within 1.0% of 0.0104; nearest: 0.0100 and 0.0110"):
        match_size(policy_of, lambda policy: policy.admit.share, 1, 1000, 0.0104, whole=True)


@pytest.mark.parametrize(
    ("size_of", "nearest"),
    [
        (lambda policy: 0.5 + policy.admit.share, "nearest: 0.5000"),
        (lambda policy: 0.1 * policy.admit.share, "nearest: 0.1000"),
        (lambda policy: 0.1 + 0.8 * (policy.admit.share > 0.3), "nearest: 0.1000 and 0.9000"),
    ],
)
def test_impossible_sizes_are_refused(size_of, nearest):
    with pytest.raises(KvsimError, match=f"no parameter gives a cache size within 1.0% of 0.3; {nearest}"):
        match_size(at, size_of, 0, 1, 0.3)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", [0.2, 0.55])
def test_families_have_the_size_that_was_asked_for(name, target, families, recordings):
    found = families.match(name, target, recordings.size)
    results = [kvsim.replay(trace, found.policy, shadow_churn=False) for trace in recordings.traces]
    size = float(np.mean([result.cache_size for result in results]))
    assert found.size == pytest.approx(size, rel=1e-12)
    assert abs(size / target - 1) <= 0.01
    assert found.policy.admit.name == name


def test_duo_has_as_many_retrieval_heads_as_fit(families, recordings):
    for target, heads in [(0.2, 0), (0.4, 1), (0.6, 2), (0.85, 3)]:
        admit = families.match("duo", target, recordings.size).policy.admit
        assert math.floor(admit.share * 4) == heads
        assert admit.window >= families.window


def test_of_several_gates_the_nearest_is_taken(families, recordings):
    own = {file: recordings.size(families.gated(file)) for file in families.gates}
    assert abs(own[families.gates[0]] - own[families.gates[1]]) > 0.02
    for file, size in own.items():
        assert families.match("wgkv", size, recordings.size).policy.admit.file == file


def test_sizes_below_the_window_are_refused(families, recordings):
    for name, message in [
        ("wgkv", "no parameter gives"),
        ("random", "no parameter gives"),
        ("duo", "a window of 8 and a sink of 4 alone exceed"),
    ]:
        with pytest.raises(KvsimError, match=message):
            families.match(name, 0.02, recordings.size)


def test_windows_of_gates(families, folder):
    assert gate_window(families.gates) == 8
    other = random_gate(folder / "other.safetensors", [0, 1], 2, 8, window=9)
    with pytest.raises(KvsimError, match=r"different windows \(\[8, 9\]\); say which with --window"):
        gate_window([*families.gates, other])


# Hard budgets


@pytest.mark.parametrize("share", ["15%", "40%"])
def test_all_three_keep_within_the_budget(share, families, recordings):
    budget = Budget.parse(share)
    policies = compositions(families, recordings, budget)
    measured = dict(zip(policies, recordings.measure(list(policies.values())), strict=True))
    budgets = [budget.resolve(trace.prompt_length) for trace in recordings.traces]
    for name, rows in measured.items():
        for row, most in zip(rows, budgets, strict=True):
            assert row.peak <= most, name
    # Admission alone uses the budget up, and eviction acts where it is there.
    assert max(row.peak / most for row, most in zip(measured["admission"], budgets, strict=True)) > 0.95
    assert str(policies["admission"]).startswith("full/admit=wgkv:")
    for name in (BOTH, "eviction"):
        assert kvsim.replay(recordings.traces[0], policies[name]).triggers > 0


def test_a_window_beyond_the_budget_is_left_out(families, recordings):
    with pytest.raises(KvsimError, match="a local window of 8 alone exceeds the budget 2%"):
        compositions(families, recordings, Budget.parse("2%"))
    report = quality(families, [], [Budget.parse("2%")], recordings=recordings)
    assert report["hard_budget"][0]["left_out"] == {BOTH: "a local window of 8 alone exceeds the budget 2%"}


# Verdicts


def row(name, values, size=0.3, metric="kept_mass"):
    return Row(name, f"policy {name}", size, {metric: values})


def test_verdicts():
    better, same = [0.9, 0.8, 0.95, 0.85] * 2, [0.7, 0.65, 0.7, 0.6] * 2
    found = verdict("kept_mass", row("a", better), row("b", same, 0.301), "here")
    assert found.beats
    assert found.line.startswith("here, kept mass: a beats b: 0.87500 against 0.66250 (+0.21250, 95% +0.1")
    assert found.line.endswith("8 texts; sizes 0.3000 and 0.3010)")
    reverse = verdict("kept_mass", row("b", same), row("a", better), "here")
    assert not reverse.beats
    assert "does not beat (it is worse than) a" in reverse.line
    # Of errors and losses less is better.
    assert verdict("loss", row("b", same, metric="loss"), row("a", better, metric="loss"), "here").beats
    unsure = verdict("kept_mass", row("a", [0.9, 0.5] * 3), row("b", [0.7, 0.6] * 3), "here")
    assert not unsure.beats
    assert "a does not beat b: " in unsure.line
    one = verdict("output_error", row("a", [0.1], metric="output_error"), row("b", [0.2], metric="output_error"), "x")
    assert not one.beats
    assert "(-0.10000; 1 text, too few to tell; sizes" in one.line
    few = verdict("kept_mass", row("a", better[:5]), row("b", same[:5]), "here")
    assert few.difference.low > 0
    assert not few.beats
    alike = verdict("kept_mass", row("a", [0.75] * 6), row("b", [0.5] * 6), "here")
    assert alike.beats
    assert alike.difference.low is None


def test_unequal_sizes_are_not_compared():
    found = verdict("kept_mass", row("a", [0.9, 0.8], 0.31), row("b", [0.1, 0.2], 0.3), "here")
    assert not found.beats
    assert found.difference is None
    assert found.line == ("here, kept mass: a is not compared with b: sizes 0.3100 and 0.3000 are more than 2% apart")
    assert verdict("kept_mass", row("a", [0.9, 0.8] * 3, 0.31), row("b", [0.1, 0.2] * 3, 0.3), "", apart=None).beats


def test_the_report(families, recordings):
    report = quality(families, [0.02, 0.5], [Budget.parse("40%")], recordings=recordings)
    impossible, possible = report["equal_size"]
    assert set(impossible["left_out"]) >= {"wgkv", "duo", "random"}
    assert not impossible["verdicts"]
    assert [one["name"] for one in possible["rows"]] == list(FAMILIES)
    sizes = [one["size"] for one in possible["rows"]]
    assert max(sizes) <= 1.02 * min(sizes)
    assert len(possible["verdicts"]) == 6
    assert len(report["hard_budget"][0]["verdicts"]) == 4
    saved = []
    own = quality(
        families, [None], [], recordings=recordings, save=lambda found: saved.append(len(found["equal_size"]))
    )
    sizes = {recordings.size(families.gated(file)): str(families.gated(file)) for file in families.gates}
    assert saved == list(range(1, len(families.gates) + 1))
    assert [section["size"] for section in own["equal_size"]] == sorted(sizes)
    assert [section["rows"][0]["policy"] for section in own["equal_size"]] == [sizes[size] for size in sorted(sizes)]
    text = "\n".join(table_lines(report))
    assert "nan" not in text.lower()
    assert "replay, size 2%: without wgkv, local, duo, random" in report["summary"]
    assert sum("beat" in line for line in report["summary"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--gate: name at least one write gate"),
        (["--gate", "g"], "name recordings with --trace, or a model"),
        (["--gate", "g", "--trace", "t", "--size", "1.5"], "--size must be between 0 and 1, or 'own', got 1.5"),
        (["--gate", "g", "--trace", "t", "--size", "owl"], "--size must be between 0 and 1, or 'own', got owl"),
        (["--gate", "g", "--trace", "t", "--budget", "0.1"], "budget must be a number of tokens"),
        (["--gate", "none.safetensors", "--trace", "t"], "none.safetensors: no such file"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_command(families, recordings, tmp_path, capsys):
    paths = [str(trace.path) for trace in recordings.traces[:2]]
    options = ["--gate", *families.gates, "--heads", families.heads, "--sink", "4", "--size", "0.5", "--budget"]
    assert main([*options, "--trace", *paths, "--out", str(tmp_path / "q.json")]) == 0
    assert "replay at 50%, kept mass: wgkv" in capsys.readouterr().out
    assert '"NaN"' not in (tmp_path / "q.json").read_text()
