"""What became of tokens: checked against the sets of the replay, and against its kept mass."""

import json

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import KvsimError
from kvsim.cli import app
from kvsim.fates import FATES, fates_of, given_to, table_of
from kvsim.plan import GROUP_KINDS

CODE = {name: place for place, name in enumerate(FATES)}
POLICIES = ["ema:0.6,over=step/protect=sink:2+recent:3", "single", "knorm/when=prefill", "cumulative/when=overflow:40%"]


def naive(result, trace, group, step):
    """Say what each position is after a step, from plain sets."""
    prompt, plan = trace.prompt_length, result.plan

    def inside(t):
        return set(range(prompt)) if t == 0 and result.mode == "shadow" else set(result.retained(t, group).tolist())

    now = inside(step)
    before = inside(step - 1) | {prompt + step - 1} if step else set(range(prompt))
    found = []
    for i in range(trace.num_positions):
        if i >= prompt + step:
            found.append("absent")
        elif i in now:
            guarded = i < plan.n_sink[group] or i > prompt + step - 1 - plan.n_recent[group]
            found.append("protected" if guarded else "kept")
        else:
            found.append("evicted now" if i in before else "evicted")
    return found


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_fates_are_those_of_the_sets(tmp_path, kind, shadow):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    met = set()
    for result in kvsim.replay_many(trace, [f"{one}/group={kind}" for one in POLICIES], budget=9, shadow=shadow):
        kept = []
        for group in range(result.plan.groups.count):
            fates = fates_of(result, group)
            assert (fates.label, fates.mode) == (result.plan.groups.label(group), result.mode)
            for step in range(15):
                want = naive(result, trace, group, step)
                met.update(want)
                assert [list(FATES)[code] for code in fates.at(step)] == want
                assert fates.left(step).tolist() == [i for i, fate in enumerate(want) if fate == "evicted now"]
                inside = [i for i, fate in enumerate(want) if fate in ("kept", "protected")]
                assert np.flatnonzero(fates.inside(step)).tolist() == inside
                assert fates.held[step] == len(inside)
            given = given_to(fates, trace)
            kept.append(1 - given.mass_later.sum() / 14)
            assert given.mass.sum() == pytest.approx(14, abs=0.05)
            assert (given.mass_later <= given.mass).all()
            if not shadow:
                assert (fates.first_left == result.evicted_at[group]).all()
        # Rows as they are stored sum to 1 only nearly, so that what is missed is what the rows hold less what is seen.
        assert np.mean(kept) == pytest.approx(result.outcome.metrics["kept_mass"].mean(), abs=2e-3)
        assert [fates_of(result, 0).held[1:].size, trace.num_steps] == [14, 14]
    assert met == set(FATES)


def test_held_is_the_column_of_the_steps(tmp_path):
    trace = write_trace(tmp_path / "t", seed=5, steps=14)
    for shadow in (False, True):
        result = kvsim.replay(trace, "ema:0.6/group=layer", budget=9, shadow=shadow)
        held = np.mean([fates_of(result, g).held[1:] for g in range(result.plan.groups.count)], axis=0)
        assert held.tolist() == result.steps["retained"].to_list()


def test_later_mass_comes_after_the_eviction(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1, steps=14)
    fates = fates_of(kvsim.replay(trace, "ema:0.6", budget=9))
    given = given_to(fates, trace)
    layers = list(trace.eligible_layers)
    rows = [trace.attention_rows(t, layers).mean(axis=(0, 1), dtype=np.float64) for t in range(1, 15)]
    for i, gone in enumerate(fates.first_left.tolist()):
        own = [row[i] if i < row.size else 0.0 for row in rows]
        assert given.mass[i] == pytest.approx(sum(own))
        assert given.mass_later[i] == pytest.approx(sum(own[gone:]) if gone >= 0 else 0)


def test_what_does_not_exist_is_refused(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1)
    result = kvsim.replay(trace, "ema:0.6/group=layer", budget=9)
    with pytest.raises(KvsimError, match=r"group must be in 0\.\.2, got 3"):
        fates_of(result, 3)
    fates = fates_of(result, 2)
    for wrong in (-1, trace.num_steps + 1):
        with pytest.raises(KvsimError, match="step must be in"):
            fates.at(wrong)
    with pytest.raises(KvsimError, match=r"step must be in 1\.\."):
        fates.visible(0)


def test_table_and_command(tmp_path):
    needle = str(SAMPLES / "smollm2-needle-512")
    trace = kvsim.open_trace(needle)
    result = kvsim.replay(trace, "tova", budget="10%")
    fates = fates_of(result, 4)
    frame = table_of(fates, trace, given_to(fates, trace))
    assert frame.columns == ["position", "token", "id", "evicted_at", "mass", "mass_later"]
    assert frame["evicted_at"].to_list() == result.evicted_at[4].tolist()
    words = ["analyze", "tokens", "tova", "--trace", needle, "--group", "4", "--budget", "10%"]
    done = CliRunner().invoke(app, [*words, "--step", "9", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["label"] == "layer 4"
    assert told["left"] == len(told["tokens"]) == fates.left(9).size
    assert sorted(one["position"] for one in told["tokens"]) == fates.left(9).tolist()
    assert told["held"] == fates.held[9] == 51
    text = CliRunner().invoke(app, [*words, "--limit", "3"]).stdout
    worst = frame.sort("mass_later", descending=True)
    assert f"{worst['mass_later'][0]:.4f}" in text
    assert "'" in text
    shadow = CliRunner().invoke(app, [*words, "--shadow", "--json", "--limit", "2"])
    first = json.loads(shadow.stdout)["tokens"][0]
    assert {"first_left", "times_left"} <= set(first)
