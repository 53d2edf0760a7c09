"""How far back linear rules remember, against states of rules that were run."""

import json

import numpy as np
import pytest
from cases import write_trace
from kvsim_traces import LayerInfo
from making import Recording
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.memory import memory

RULES = ["single", "cumulative", "ema:0.8", "ema:0.3", "ema:0.9,over=step", "ema:0.7,over=layer"]


def influence(policy, trace, steps):
    """Weight of each step's and layer's score in the state after `steps` steps, by feeding one score at a time."""
    plan = kvsim.parse(policy).plan(trace)
    depth = plan.groups.depth
    weights = np.zeros((steps, depth))
    for source in np.ndindex(steps, depth):
        m = 0.0
        for t in range(steps):
            if plan.reset:
                m = 0.0
            for layer in range(depth):
                m = plan.a[t, layer] * m + plan.b[t, layer] * ((t, layer) == source)
        weights[source] = m
    return weights


@pytest.mark.parametrize("policy", [*RULES, "ema:0.8/group=layer", "inertiakv", "tova"])
def test_shares_and_horizons_are_those_of_the_state(tmp_path, policy):
    trace = write_trace(tmp_path / "t", steps=12)
    found = memory(policy, 3, steps=12)
    weights = influence(policy, trace, 12)
    assert found.earlier_share_last == pytest.approx(weights[:-1].sum() / weights.sum())
    assert found.last_layer_share == pytest.approx(weights[-1, -1] / weights[-1].sum())
    per_step = weights.sum(axis=1)
    assert found.step_decay == pytest.approx(per_step[-2] / per_step[-1])
    if found.horizon_steps is not None and found.step_decay < 0.6:
        assert found.horizon_steps == pytest.approx(per_step.sum() / per_step.max(), rel=2e-3)
        assert found.horizon_layers == pytest.approx(weights.sum() / weights.max(), rel=2e-3)


def test_the_papers_example():
    both, step, layer = (memory(f"ema:0.8{over}", 32) for over in ("", ",over=step", ",over=layer"))
    assert both.step_decay == pytest.approx(0.8**32)
    assert both.horizon_layers == pytest.approx(5)
    assert step.step_decay == step.earlier_share == pytest.approx(0.8)
    assert step.horizon_steps == pytest.approx(5)
    assert step.horizon_layers == pytest.approx(160)
    assert (layer.step_decay, layer.horizon_steps, layer.earlier_share) == (0, 1, 0)
    assert memory("cumulative", 32).horizon_steps is None


def test_refresh_counts_scored_steps():
    assert memory("cumulative/refresh=4", 2, steps=9).earlier_share_last == pytest.approx(2 / 3)
    assert memory("cumulative/refresh=first", 2, steps=9).earlier_share_last == 0


def test_the_command(tmp_path):
    def run(*words, code=0):
        result = CliRunner().invoke(app, ["analyze", "memory", *map(str, words)])
        assert result.exit_code == code, (result.output, result.stderr)
        return result

    trace = write_trace(tmp_path / "t")
    (row,) = json.loads(run("--policy", "ema:0.8", "--trace", trace.path, "--json").stdout)["results"]
    assert row == memory("ema:0.8", 3, steps=12).summary()
    assert "unbounded" in run("--policy", "cumulative", "--layers", 32).stdout
    assert "linear rule" in run("--policy", "window:3", "--layers", 32, code=2).stderr
    assert "--layers" in run("--policy", "ema", code=2).stderr
    assert "layers" in run("--policy", "ema", "--layers", 0, code=2).stderr
    write_trace(tmp_path / "u")
    assert "2 recordings" in run("--policy", "ema", "--trace", tmp_path / "*", code=2).stderr
    assert "layers" in run("--policy", "ema", "--layers", 10**9, code=2).stderr
    sliding = LayerInfo("sliding_attention", eligible=False, sliding_window=4)
    none = Recording(layers=1).write(tmp_path / "none", "heads", layers=[sliding])
    assert f"{none}: no recorded layer is eligible" in run("--policy", "ema", "--trace", none, code=2).stderr
    with pytest.raises(KvsimError, match="steps"):
        memory("ema", 3, steps=0)
