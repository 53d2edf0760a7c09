"""Random eviction beside policies, and the report of both yardsticks."""

import json

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import oracle
from kvsim.cli import app
from kvsim.floor import random_floor


@pytest.fixture
def trace(tmp_path):
    """A recording whose attention is on the keys with the largest norm, so that knorm keeps the wrong ones."""
    rng = np.random.default_rng(1000)  # no seed of the draws
    steps, prompt = 12, 40
    norms = rng.uniform(0.5, 4, size=prompt + steps)
    rows = np.zeros((steps, 3, 4, prompt + steps), np.float32)
    for t in range(steps):
        weights = np.exp(norms[: prompt + t + 1])
        rows[t, ..., : prompt + t + 1] = weights / weights.sum()
    keys = rng.normal(size=(3, 2, prompt + steps, 8))
    keys *= (norms / np.linalg.norm(keys, axis=-1))[..., None]
    return write_trace(tmp_path / "t", attention=rows, keys=keys.astype(np.float32))


def test_a_policy_that_keeps_the_wrong_ones_is_below_every_draw(trace):
    results = kvsim.replay_many(trace, ["knorm", "tova", "random:4", "full"], budget=8)
    wrong, right, draw, full = random_floor(results, trace)
    assert wrong.below_all
    assert wrong.below
    assert wrong.percentile == 0
    assert not right.below
    assert right.percentile == 1
    assert 0 < draw.percentile < 1
    assert draw.below == (draw.kept_mass < draw.random_mean)
    assert not draw.below_all
    assert (full.percentile, full.below) == (0.5, False)
    assert (wrong.group, right.group, wrong.seeds) == ("head", "layer", 20)


def test_draws_are_replays_of_random_at_equal_group_budget_and_moment(trace):
    texts = ["ema:0.8", "tova/budget=5", "knorm/when=prefill", "ema:0.8/when=overflow:40%"]
    texts += ["tova/admit=random:0.5,window=3/select=topk:4"]
    rivals = ["random:{}", "random:{}/group=layer/budget=5", "random:{}/group=head/when=prefill"]
    rivals += ["random:{}/when=overflow:40%", "random:{}/admit=random:0.5,window=3/select=topk:4"]
    found = random_floor(kvsim.replay_many(trace, texts, budget=8), trace, seeds=4)
    for one, rival in zip(found, rivals, strict=True):
        played = kvsim.replay_many(trace, [rival.format(seed) for seed in range(4)], budget=8)
        kept = [result.summary()["kept_mass"] for result in played]
        assert (one.random_min, one.random_mean, one.random_max) == pytest.approx((min(kept), np.mean(kept), max(kept)))


def test_unequal_budgets_are_compared_with_their_mean(tmp_path):
    trace = write_trace(tmp_path / "t")
    (result,) = results = kvsim.replay_many(trace, ["nonuniform/score=knorm/group=head"], budget=8)
    assert len(set(result.plan.budgets.tolist())) > 1
    (one,) = random_floor(results, trace, seeds=2)
    assert one.budget == 8


def test_the_shadow_mode_is_compared_with_itself(trace):
    (one,) = random_floor(kvsim.replay_many(trace, ["tova"], budget=8, shadow=True), trace, seeds=3)
    kept = [kvsim.replay(trace, f"random:{s}/group=layer", budget=8, shadow=True).summary() for s in range(3)]
    assert one.random_mean == pytest.approx(np.mean([row["kept_mass"] for row in kept]))


def test_bad_requests_are_refused(trace, tmp_path):
    results = kvsim.replay_many(trace, ["tova"])
    with pytest.raises(kvsim.KvsimError, match="at least 1, got 0"):
        random_floor(results, trace, seeds=0)
    with pytest.raises(kvsim.KvsimError, match="is a replay of t"):
        random_floor(results, write_trace(tmp_path / "other", seed=5))


def run(*words, code=0):
    result = CliRunner().invoke(app, ["analyze", *map(str, words)])
    assert result.exit_code == code, (result.output, result.stderr)
    return result


def test_the_floor_command(trace):
    words = "floor", "--trace", trace.path, "--policy", "knorm", "--policy", "tova", "--budget", 8
    assert "every draw" in run(*words).stdout
    rows = json.loads(run(*words, "--json", "--seeds", 3).stdout)["results"]
    assert [row["below_random"] for row in rows] == [True, False]
    assert [row["below_every_seed"] for row in rows] == [True, False]
    assert rows[0]["seeds"] == 3


def test_the_oracle_command(trace, monkeypatch):
    words = ["oracle", "--trace", trace.path, "--budget", 8]
    words += ["--policy", "knorm", "--policy", "tova", "--policy", "knorm/when=prefill"]
    shown = run(*words).stdout
    assert "every draw" in shown
    assert "pooled" in shown
    wrong, right, grown = json.loads(run(*words, "--json", "--method", "exact").stdout)["results"]
    assert (wrong["below_random"], right["below_random"]) == (True, False)
    assert grown["gap"] is grown["best"] is grown["optimum_steps"] is None
    assert not grown["comparable"]
    for row in (wrong, right):
        assert row["gap"] == pytest.approx(1 - row["kept_mass"] / row["best"])
        assert row["pooled_gap"] >= row["gap"]
        assert np.mean(row["kept_mass_steps"]) == pytest.approx(row["kept_mass"])
        assert np.mean(row["optimum_steps"]) == pytest.approx(row["best"])
    (alone,) = json.loads(run(*words[:5], "--policy", "tova", "--no-pooled", "--json").stdout)["results"]
    assert alone["pooled_gap"] is None


def test_samples_have_no_policy_below_random():
    """What SmolLM2 says at 10%: even the worst published rankings beat a draw."""
    trace = kvsim.open_trace(SAMPLES / "smollm2-needle-512")
    texts = ["knorm", "keydiff", "recency", "single", "streaming:4"]
    for one in random_floor(kvsim.replay_many(trace, texts), trace):
        assert one.percentile == 1, one
    assert oracle.comparable(kvsim.replay(trace, "tova"))
