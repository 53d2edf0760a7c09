"""Open loop against closed loop: every number by hand or in plain sets, and the command."""

import dataclasses
import json
import math

import numpy as np
import pytest
from asking import record_run, run, run_json, save_model
from cases import rows_trace, write_trace
from kvsim_traces.loading import load_model

import kvsim
from kvsim.errors import KvsimError
from kvsim.fidelity import fidelity
from kvsim.live import decode, prefill
from kvsim.live.closed_loop import closed_loop
from kvsim.live.prefix import recorded_tokens

RUN = {"prompt": 20, "steps": 7, "layers": 3, "heads": 4, "kv_heads": 2}


def pretend(result, evicted_at=None, *, loop="closed", **metrics):
    """A result with another history."""
    outcome = result.outcome
    history = outcome.evicted_at if evicted_at is None else np.array(evicted_at, np.int32)
    outcome = dataclasses.replace(outcome, evicted_at=history, metrics=outcome.metrics | metrics)
    return dataclasses.replace(result, outcome=outcome, loop=loop)


@pytest.fixture
def even(tmp_path):
    """One head that looks everywhere alike: prompt 4, three steps."""
    return rows_trace(tmp_path / "even", [[[1 / n] * n] for n in (5, 6, 7)], prompt=4)


# Positions 0 to 3 are the prompt, 4 to 6 the steps' own; B = 3.


def test_by_hand(even):
    replayed = kvsim.replay(even, "ema:0.5", budget=3)
    own = pretend(replayed, [[1, 1, -1, 2, 3, -1, -1]], loop="open", kept_mass=np.array([1.0, 0.5, 0.4]))
    run = pretend(replayed, [[1, 1, -1, -1, 2, 3, -1]], kept_mass=np.array([1.0, 0.7, 0.1]))
    found = fidelity(own, run, even, even)
    # {2,3,4} both; {2,4,5} with {2,3,5}; {2,5,6} with {2,3,6}
    assert found.steps == pytest.approx([1, 2 / 4, 2 / 4])
    assert found.jaccard == pytest.approx(2 / 3)
    assert found.jaccard_last == pytest.approx(1 / 2)
    # the oldest go: {3,4,5} with {2,3,5}; {4,5,6} with {2,3,6}
    assert found.oldest_steps == pytest.approx([1, 2 / 4, 1 / 5])
    assert found.oldest == pytest.approx((1 + 1 / 2 + 1 / 5) / 3)
    assert found.oldest_last == pytest.approx(1 / 5)
    # of two later evictions neither is the same; a draw from four visible tokens hits one in four
    assert found.same_evictee == 0
    assert found.same_evictee_random == 1 / 4
    assert (found.kept_mass_open, found.kept_mass) == pytest.approx((1.9 / 3, 1.8 / 3))
    assert found.kept_mass_error == pytest.approx(0.5 / 3)
    assert found.total_variation == 0
    assert (found.policy, found.budget, found.loop) == ("ema:0.5/budget=3", 3, "closed")
    assert found.trace_hash == even.hash


def test_evictions_of_several_tokens_agree_as_wholes(even):
    replayed = kvsim.replay(even, "ema:0.5", budget=3)
    run = pretend(replayed, [[1, 2, 2, -1, 3, 3, -1]])
    same = fidelity(pretend(replayed, [[1, 2, 2, 3, -1, 3, -1]], loop="open"), run, even, even)
    assert same.same_evictee == 1 / 2
    # of 5 visible tokens two leave, then two of 4
    assert same.same_evictee_random == pytest.approx((1 / math.comb(5, 2) + 1 / math.comb(4, 2)) / 2)


def test_the_random_null_is_that_of_all_draws(even):
    replayed = kvsim.replay(even, "ema:0.5", budget=3)
    run = pretend(replayed, [[1, 1, -1, -1, 2, 3, -1]])
    found = fidelity(pretend(replayed, loop="open"), run, even, even, seeds=3000)
    # After step 2: of {2,3,4,5} one leaves; the run let 4 go.
    assert found.random_steps[0] == 1
    assert found.random_steps[1] == pytest.approx((1 + 3 * (2 / 4)) / 4, abs=0.02)
    again = fidelity(pretend(replayed, loop="open"), run, even, even, seeds=3000)
    assert again.random_steps.tolist() == found.random_steps.tolist()


def test_nulls_follow_a_group_up_to_its_own_first_eviction(tmp_path):
    trace = write_trace(tmp_path / "t", layers=2, heads=2, kv_heads=2, prompt=4, steps=3)
    replayed = kvsim.replay(trace, "single/group=layer", budget=3)
    run = pretend(replayed, [[0, -1, -1, -1, -1, 2, -1], [-1, -1, 2, 2, -1, -1, 3]])
    found = fidelity(pretend(replayed, loop="open"), run, trace, trace)
    # layer 0 drops again at step 2: {2,3,4,5} with {1,2,3,4}, then 6 comes to both; layer 1 first at step 2, with the
    # run, and at step 3: {1,4,5,6} with {0,1,4,5}
    assert found.oldest_steps == pytest.approx([1, (3 / 5 + 1) / 2, (4 / 6 + 3 / 5) / 2])


def test_nothing_is_evicted(even):
    replayed = kvsim.replay(even, "full")
    found = fidelity(replayed, pretend(replayed), even, even)
    assert (found.jaccard, found.random, found.oldest_last) == (1, 1, 1)
    assert found.same_evictee is None
    assert found.same_evictee_random is None
    json.dumps(found.summary(), allow_nan=False)


def naive_variation(run, recorded, seen):
    groups = run.plan.groups
    by_layer = []
    for place, layer in enumerate(groups.layers):
        values = []
        for t in range(1, run.num_steps + 1):
            for head in range(groups.num_heads):
                kv = head // (groups.num_heads // groups.num_kv_heads)
                group = {"shared": 0, "layer": place, "head": place * groups.num_kv_heads + kv}[groups.kind]
                history = run.evicted_at[group]
                visible = [i for i in range(run.prompt_length + t) if history[i] < 0 or history[i] >= t]
                p, q = ([float(x.attention_rows(t)[layer, head, i]) for i in visible] for x in (recorded, seen))
                values.append(sum(abs(a / sum(p) - b / sum(q)) for a, b in zip(p, q, strict=True)) / 2)
        by_layer.append(sum(values) / len(values))
    return by_layer


@pytest.mark.parametrize("policy", ["ema:0.8", "tova", "h2o", "ema:0.8/when=overflow/group=head"])
@pytest.mark.parametrize("eligible", [None, [0, 2]])
def test_total_variation_is_the_naive_one(tmp_path, policy, eligible):
    recorded = write_trace(tmp_path / "a", seed=1, eligible=eligible, **RUN)
    seen = write_trace(tmp_path / "b", seed=2, eligible=eligible, **RUN)
    replayed = kvsim.replay(recorded, policy, budget=6)
    run = pretend(kvsim.replay(seen, policy, budget=6))
    found = fidelity(replayed, run, recorded, seen)
    assert found.by_layer.tolist() == pytest.approx(naive_variation(run, recorded, seen))
    assert found.total_variation == pytest.approx(found.by_layer.mean())
    assert found.total_variation_most == found.by_layer.max()
    assert 0.2 < found.total_variation < 1


def test_what_cannot_be_compared(tmp_path):
    trace = write_trace(tmp_path / "t", **RUN)
    means = write_trace(tmp_path / "s", capture="scores", **RUN)
    result = kvsim.replay(trace, "ema:0.8", budget=6)
    with pytest.raises(KvsimError, match="got open and open"):
        fidelity(result, result, trace, trace)
    with pytest.raises(KvsimError, match="not one policy on one sequence"):
        fidelity(result, pretend(kvsim.replay(trace, "ema:0.9", budget=6)), trace, trace)
    with pytest.raises(KvsimError, match="seeds"):
        fidelity(result, pretend(result), trace, trace, seeds=0)
    with pytest.raises(KvsimError, match="no attention of single heads"):
        fidelity(result, pretend(result), means, trace)
    shadow = kvsim.replay(trace, "ema:0.8", budget=6, shadow=True)
    with pytest.raises(KvsimError, match="shadow"):
        fidelity(shadow, dataclasses.replace(shadow, loop="closed"), trace, trace)


# With a model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def recorded(folder, tmp_path_factory):
    return record_run(folder, tmp_path_factory.mktemp("traces") / "run", steps=9)


def test_closed_and_live_give_the_same_numbers(folder, recorded):
    model, _ = load_model(folder, device="cpu")
    tokens = recorded_tokens(recorded)
    forced = tokens[recorded.prompt_length :]
    prefix = prefill(model, tokens[: recorded.prompt_length], trace=recorded)
    for policy in ("ema:0.8/budget=9", "tova/budget=9"):
        replayed = kvsim.replay(recorded, policy)
        (loop,) = closed_loop(model, prefix, forced, [policy])
        (live,) = decode(model, [prefix], [policy], steps=len(forced), force=forced)
        closed = fidelity(replayed, loop.result, recorded, loop.trace)
        other = fidelity(replayed, live.result(), recorded, live.sequence.trace)
        assert other.loop == "live"
        assert closed.steps.tolist() == other.steps.tolist()
        assert closed.by_layer == pytest.approx(other.by_layer, abs=1e-5)
        assert closed.total_variation > 1e-3
        # the first eviction is exact, whatever follows
        assert closed.steps[0] == 1


def test_the_command(folder, recorded, tmp_path):
    words = [
        "fidelity",
        recorded.path,
        "--model",
        folder,
        "--policy",
        "ema:0.8",
        "--policy",
        "tova",
        "--policy",
        "full",
    ]
    words += ["--compression-ratio", 0.8, "--compression-ratio", 0.5]
    out = tmp_path / "new" / "rows.json"
    found = run_json(*words, "--out", out)["results"]
    assert json.loads(out.read_text()) == {"results": found}
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    at_20, at_50 = ([f"{head}/budget={share}%" for head in ("ema:0.8", "tova")] for share in (20, 50))
    assert [row["policy"] for row in found] == [*at_20, "full", *at_50]
    row = found[0]
    assert row["trace"] == "run"
    assert row["loop"] == "closed"
    assert len(row["jaccard_steps"]) == len(row["random_steps"]) == len(row["oldest_steps"]) == 9
    assert row["jaccard"] == pytest.approx(np.mean(row["jaccard_steps"]))
    assert len(row["total_variation_by_layer"]) == 3
    assert found[2]["same_evictee"] is None
    live = run_json(*words, "--live")["results"]
    assert [one["loop"] for one in live] == ["live"] * 5
    assert [one["jaccard_steps"] for one in live] == [one["jaccard_steps"] for one in found]
    printed = run(*words, "--quiet").stdout
    assert "nan" not in printed.lower()
    assert max(map(len, printed.splitlines()[:-1])) <= 100
    assert printed.splitlines()[-1] == (
        "open loop against closed loop; nulls start from the run's first eviction; "
        "B: 20% of the prompt (compression_ratio 0.8); B: 50% of the prompt (compression_ratio 0.5)"
    )


def test_what_the_command_refuses(folder, recorded, tmp_path):
    words = ["fidelity", recorded.path, "--model", folder, "--policy", "ema:0.8"]
    there = tmp_path / "there.json"
    there.write_text("mine")
    assert "exists already" in run(*words, "--out", there, code=2).stderr
    assert there.read_text() == "mine"
    assert "cannot be written" in run(*words, "--out", there / "below.json", code=2).stderr
    means = write_trace(tmp_path / "means", capture="scores")
    assert "no attention of single heads" in run("fidelity", means.path, *words[2:], code=2).stderr
    assert "holds no token ids" in run("fidelity", write_trace(tmp_path / "i").path, *words[2:], code=2).stderr
    assert "oracle:future" in run(*words, "--policy", "oracle:future", code=2).stderr
    assert "unknown policy" in run(*words, "--policy", "emma", code=2).stderr
    assert "compression_ratio" in run(*words, "--compression-ratio", 1, code=2).stderr
    other = save_model(tmp_path / "other", initializer_range=0.2)
    assert "another model" in run(*words[:3], other, *words[4:], code=2).stderr
    assert not list(tmp_path.glob(".*"))
