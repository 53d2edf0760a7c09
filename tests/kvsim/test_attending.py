"""Attention of and on chosen tokens, the scale it is seen on, and ranges of positions."""

import json

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from specs import rows_of_chart
from typer.testing import CliRunner

import kvsim
from kvsim import KvsimError, charts
from kvsim.attending import LEVELS, attention_of, attention_on, shade
from kvsim.cli import app
from kvsim.fates import fates_of
from kvsim.ranges import read_positions, write_positions

MULTI = str(SAMPLES / "smollm2-multineedle-256")


@pytest.mark.parametrize("layer", [None, 1])
def test_attention_of_and_on_tokens(tmp_path, layer):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    prompt = trace.prompt_length
    layers = list(trace.eligible_layers) if layer is None else [layer]
    rows = [trace.attention_rows(t, layers).mean(axis=(0, 1), dtype=np.float64) for t in range(1, 15)]
    chosen = [prompt + 4, 2, prompt + 1, prompt + 4]
    want = np.zeros(trace.num_positions)
    for row in (rows[4], rows[1]):
        want[: row.size] += row
    assert attention_of(trace, chosen, layer) == pytest.approx(want, abs=1e-12)
    assert not attention_of(trace, [1, 2], layer).any()
    result = kvsim.replay(trace, "ema:0.6", budget=9)
    fates = fates_of(result)
    found = attention_on(trace, chosen, layer, fates=fates)
    assert found.positions == (2, prompt + 1, prompt + 4)
    for t, row in enumerate(rows, start=1):
        there = [i for i in found.positions if i < row.size]
        seen = [i for i in there if i == prompt + t - 1 or i in (result.retained(t - 1))]
        assert found.full[t - 1] == pytest.approx(row[there].sum())
        assert found.visible[t - 1] == pytest.approx(row[seen].sum())
    groups = kvsim.replay(trace, "ema:0.6/group=head", budget=9)
    assert attention_on(trace, chosen, layer or 0, fates=fates_of(groups, 2)).visible is None
    own = attention_of(trace, [prompt + 4], fates=fates_of(groups, 3))
    layers, heads, _ = groups.plan.groups.members(3)
    rows4 = trace.attention_rows(5, list(groups.plan.groups.layers))[layers, heads]
    assert own[: prompt + 5] == pytest.approx(rows4.mean(axis=(0, 1), dtype=np.float64), abs=1e-12)
    late = attention_on(trace, [prompt + 4], layer)
    assert np.isnan(late.full).tolist() == [True] * 4 + [False] * 10
    assert late.visible is None


def test_attention_is_that_of_the_group(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    result = kvsim.replay(trace, "ema:0.6/group=layer", budget=9)
    fates = fates_of(result, 1)
    mine, same, other = (attention_on(trace, [2, 5], layer, fates=fates) for layer in (None, 1, 2))
    assert mine.full.tolist() == same.full.tolist() != other.full.tolist()
    assert mine.visible.tolist() == same.visible.tolist()
    assert other.visible is None
    everything = attention_on(trace, range(trace.num_positions), fates=fates)
    kept = [replayed(trace, result, 1, t) for t in range(1, 15)]
    assert everything.visible == pytest.approx(kept, abs=1e-12)


def replayed(trace, result, layer, t):
    row = trace.attention_rows(t, [layer]).mean(axis=(0, 1), dtype=np.float64)
    seen = [*(result.retained(t - 1, layer)), trace.prompt_length + t - 1]
    return row[seen].sum()


def test_wrong_positions_and_layers(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3)
    with pytest.raises(KvsimError, match="layer must be in"):
        attention_of(trace, [14], 9)
    with pytest.raises(KvsimError, match="position must be in"):
        attention_on(trace, [3, trace.num_positions])
    with pytest.raises(KvsimError, match="name a position"):
        attention_on(trace, [])


def test_the_scale_is_not_swallowed_by_the_sink():
    rng = np.random.default_rng(0)
    values = rng.lognormal(-8, 1, 1000)
    plain = shade(values)
    values[0] = 0.9
    shading = shade(values)
    assert shading.edges == pytest.approx(shade(np.concatenate([[5.0], values[1:]])).edges)
    assert (shading.levels[1:] == plain.levels[1:]).all()
    assert shading.sink == 0.9
    assert shading.levels[0] == LEVELS
    assert shading.edges[0] == pytest.approx(np.median(values[1:]), rel=0.01)
    assert shading.edges[-1] == pytest.approx(np.quantile(values[1:], 0.99), rel=0.02)
    assert shading.beyond == (values[1:] >= shading.edges[-1]).sum() > 5
    for level in range(LEVELS + 1):
        own = values[1:][shading.levels[1:] == level]
        assert own.size
        assert level == 0 or own.min() >= shading.edges[level - 1]
        assert level == LEVELS or own.max() < shading.edges[level]


@pytest.mark.parametrize("values", [[0.0, 0, 0], [0.7, 0, 0], [0.7], [0.5, 0.25, 0.25, 0.25], [0.1, 1e-30, 0.3]])
def test_the_scale_of_few_values(values):
    shading = shade(np.array(values))
    assert shading.levels[0] == (LEVELS if values[0] > 0 and values[0] >= max([0, *values[1:]]) else shading.levels[0])
    assert np.isfinite(shading.edges).all()
    assert (shading.levels[np.array(values) == 0] == 0).all()


def test_positions_are_read_and_written():
    assert read_positions("530, 513-515,514", 560) == [513, 514, 515, 530]
    assert read_positions("", 5) == []
    assert write_positions([530, 513, 514, 515, 514]) == "513-515,530"
    assert write_positions([]) == ""
    for text, why in (("a", "no position"), ("5-3", "backwards"), ("3-9", "0 to 8"), ("-2", "no position")):
        with pytest.raises(KvsimError, match=why):
            read_positions(text, 9)


def test_the_chart_draws_what_is_received():
    words = ["chart", "received", MULTI, "--positions", "3-9,257", "--layer", "2", "--budget", "20"]
    done = CliRunner().invoke(app, [*words, "--policy", "tova", "--group", "2", "--json"])
    assert done.exit_code == 0, done.output
    rows = [row for rows in json.loads(done.stdout)["datasets"].values() for row in rows]
    trace = kvsim.open_trace(MULTI)
    fates = fates_of(kvsim.replay(trace, "tova", budget=20), 2)
    found = attention_on(trace, [*range(3, 10), 257], 2, fates=fates)
    drawn = {row["series"]: [] for row in rows}
    for row in rows:
        drawn[row["series"]].append(row["value"])
    assert drawn["full cache"] == pytest.approx(found.full.tolist(), rel=1e-4)
    assert drawn["visible to the policy"] == pytest.approx(found.visible.tolist(), rel=1e-4)
    chart = charts.attention_received(found, trace, layer=2, fates=fates)
    assert rows_of_chart(chart)
    for words, why in (([], "--positions"), (["--positions", "2-900"], "positions are 0 to")):
        refused = CliRunner().invoke(app, ["chart", "received", MULTI, *words, "--json"])
        assert refused.exit_code == 2
        assert why in refused.output
