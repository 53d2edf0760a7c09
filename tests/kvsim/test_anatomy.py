"""Where policies part: positions, moments and masses, checked against plain sets."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from making import Recording
from typer.testing import CliRunner

import kvsim
from kvsim.anatomy import dissect
from kvsim.cli import app
from kvsim.plan import GROUP_KINDS


def naive(a, b, trace):
    """For each group and position: when they parted, who kept it, the mass afterwards, and the gain of `a` over `b`."""
    groups, steps = a.plan.groups, trace.num_steps
    found = {}
    for g in range(groups.count):
        layers, heads, _ = groups.members(g)
        rows = [
            np.asarray(trace.attention_rows(t, list(groups.layers)), np.float64)[layers, heads].mean(axis=(0, 1))
            for t in range(1, steps + 1)
        ]
        first = 1 if a.mode == "shadow" else 0
        sets = {t: [set(r.retained(t, g).tolist()) for r in (a, b)] for t in range(first, steps + 1)}
        for i in range(trace.num_positions):
            apart = [t for t, (own, other) in sets.items() if (i in own) != (i in other)]
            if apart:
                start = apart[0]
                gained = sum(rows[t][i] if i in sets[t][0] else -rows[t][i] for t in apart if t < steps)
                after = sum(rows[t][i] for t in range(start, steps))
                found[groups.label(g), i] = (start, i in sets[start][0], after, gained)
    return found


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("group", GROUP_KINDS)
def test_partings_are_those_of_the_sets(tmp_path, group, shadow):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    texts = [f"{p}/group={group}" for p in ("ema:0.6,over=step", "single", "cumulative/when=overflow:40%", "random:2")]
    results = kvsim.replay_many(trace, texts, budget=9, shadow=shadow)
    found = dissect(results, trace)
    assert found.policies == [result.policy for result in results]
    for pair, other in zip(found.pairs, results[1:], strict=True):
        want = naive(results[0], other, trace)
        partings = pair.worst()
        assert len(partings) == pair.count == len(want) > 5
        for one in partings:
            start, mine, after, gained = want[one.group, one.position]
            assert (one.parted, one.kept_by == pair.a) == (start, mine)
            assert {one.kept_by, one.lost_by} == {pair.a, pair.b}
            assert one.mass_after == pytest.approx(after, abs=1e-12)
            assert one.mass_gained == pytest.approx(gained if mine else -gained, abs=1e-12)
        masses = [abs(one.mass_gained) for one in partings]
        assert masses == sorted(masses, reverse=True)
        kept = [float(result.outcome.metrics["kept_mass"].sum()) for result in (results[0], other)]
        assert pair.mass_gained.sum() / results[0].plan.groups.count == pytest.approx(kept[0] - kept[1], abs=1e-9)
        tokens = pair.tokens()
        assert len(tokens) == len({position for _, position in want})
        gains = [one.mass_gained for one in tokens]
        assert gains == sorted(gains, reverse=True)
        for one in tokens:
            own = [values for (_, position), values in want.items() if position == one.position]
            total = sum(gained for *_, gained in own)
            assert one.mass_gained == pytest.approx(abs(total), abs=1e-12)
            sides = [sum(mine for _, mine, *_ in own), sum(not mine for _, mine, *_ in own)]
            if one.gained_by == pair.b:
                assert total < 1e-12
                sides.reverse()
            assert [one.groups_gained_by, one.groups_other] == sides
            assert one.parted == min(start for start, *_ in own)
            assert one.mass_after == pytest.approx(sum(after for _, _, after, _ in own), abs=1e-12)
        for t in range(1, 15):
            pairs = [[set(r.retained(t, g)) for r in (results[0], other)] for g in range(results[0].plan.groups.count)]
            assert pair.jaccard[t - 1] == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in pairs]))
            assert pair.equal[t - 1] == all(a == b for a, b in pairs)


def test_the_keeper_loses_it_later_or_never(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    results = kvsim.replay_many(trace, ["ema:0.6,over=step", "single"], budget=9)
    by_name = {result.policy: result for result in results}
    partings = dissect(results, trace).pairs[0].worst()
    assert {one.held_until is None for one in partings} == {True, False}
    for one in partings:
        keeper, loser = (by_name[name].evicted_at[0, one.position] for name in (one.kept_by, one.lost_by))
        assert one.parted == loser
        assert one.held_until == (None if keeper < 0 else keeper)


def test_evictions_before_the_first_step_part_at_zero(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1)
    results = kvsim.replay_many(trace, ["knorm/group=head", "knorm/group=head/when=prefill"], budget=9)
    partings = dissect(results, trace).pairs[0].worst()
    assert {one.parted for one in partings} > {0, 12}
    assert all(one.kept_by == results[0].policy for one in partings if one.parted == 0)
    want = naive(*results, trace)
    for one in partings:
        start, _, after, _ = want[one.group, one.position]
        assert (one.parted, one.mass_after) == (start, pytest.approx(after, abs=1e-12))


def test_invariance_is_that_of_all_policies(tmp_path):
    trace = write_trace(tmp_path / "t", seed=2)
    same = dissect(kvsim.replay_many(trace, ["single", "ema:0"], budget=9), trace)
    assert same.invariant
    assert same.invariant_steps == 1
    assert same.pairs[0].count == 0
    assert same.pairs[0].worst() == []
    three = dissect(kvsim.replay_many(trace, ["single", "ema:0", "random:1"], budget=9), trace)
    assert [pair.equal.all() for pair in three.pairs] == [True, False]
    assert not three.invariant
    assert three.invariant_steps == pytest.approx(three.pairs[1].equal.mean())
    everything = dissect(kvsim.replay_many(trace, ["single", "random:1"], budget=500), trace)
    assert everything.invariant


def test_what_cannot_be_compared_is_refused(tmp_path):
    trace, other = write_trace(tmp_path / "t"), write_trace(tmp_path / "u", seed=1)
    single = kvsim.replay(trace, "single")
    with pytest.raises(kvsim.KvsimError, match="at least two"):
        dissect([single], trace)
    with pytest.raises(kvsim.KvsimError, match=r"group=shared and tova.*group=layer.*the same group="):
        dissect([single, kvsim.replay(trace, "tova")], trace)
    with pytest.raises(kvsim.KvsimError, match="given twice"):
        dissect([single, single], trace)
    with pytest.raises(kvsim.KvsimError, match="one mode only"):
        dissect([single, kvsim.replay(trace, "ema", shadow=True)], trace)
    with pytest.raises(kvsim.KvsimError, match="is a replay of u"):
        dissect([single, kvsim.replay(other, "ema")], trace)


def run(*words, code=0):
    result = CliRunner().invoke(app, ["analyze", "diff", *map(str, words)])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


def test_the_command(tmp_path):
    sample = SAMPLES / "smollm2-needle-512"
    shown = run("ema:0.8", "cumulative", "--trace", sample).stdout
    assert "' the'" in shown
    assert "0.9786" in shown
    document = json.loads(run("ema:0.8", "cumulative", "single", "--trace", sample, "--json", "--limit", 2).stdout)
    (found,) = document["results"]
    assert [len(pair["worst"]) for pair in found["pairs"]] == [2, 2]
    assert len(found["pairs"][0]["jaccard_steps"]) == 48
    assert found["pairs"][0]["worst"][0]["token"] == " the"
    assert document["invariant_traces"] == 0
    for seed in range(2):
        write_trace(tmp_path / f"t{seed}", seed=seed)
    several = "single", "ema:0", "--trace", tmp_path / "*", "--budget", 5
    assert json.loads(run(*several, "--json").stdout)["invariant_traces"] == 1
    assert "2 of 2" in run(*several).stdout
    assert "None" not in run("single", "random", "--trace", tmp_path / "t0", "--shadow").stdout
    assert "at least two" in run("ema:0.8", "--trace", sample, code=2).stderr
    assert "the same group=" in run("ema:0.8", "tova", "--trace", sample, code=2).stderr
    assert "--trace DIR" in run("ema:0.8", "single", code=2).stderr


def test_tokens_that_the_terminal_cannot_show_are_escaped(tmp_path):
    recording = Recording()
    recording.texts = ["é؆😀".encode(), b"\xff"] * (len(recording.texts) // 2)
    trace = recording.write(tmp_path / "t", "heads")
    words = ["analyze", "diff", "ema:0.8", "single", "--trace", str(trace), "--budget", "5"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-m", "kvsim", *words], env=env, capture_output=True, text=True, check=True)
    assert r"'\xe9\u0606\U0001f600'" in shown.stdout


def test_tokens_stand_for_all_groups(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3)
    words = "single/group=layer", "ema:0.6/group=layer", "--trace", trace.path, "--budget", 5
    shown = run(*words).stdout
    assert "sums over 3 groups, each of them a layer" in shown
    assert "layer 1" not in shown
    assert "layer 1" in run(*words, "--by", "group").stdout
    assert (
        "sums over 1 group, each of them all layers"
        in run("single", "ema:0.6", "--trace", trace.path, "--budget", 5, "--by", "token").stdout
    )
    (pair,) = json.loads(run(*words, "--json", "--limit", 3).stdout)["results"][0]["pairs"]
    assert (pair["groups"], len(pair["worst_tokens"])) == (3, 3)
    assert max(map(len, shown.splitlines())) <= 100
