"""What each layer and head keeps and sees: its means are the replay's own metrics, and parts make up the whole."""

import numpy as np
import pytest
from cases import SAMPLES
from making import Recording
from specs import checked, rows_of_chart

import kvsim
from kvsim import charts
from kvsim.errors import KvsimError
from kvsim.heads import PARTS, by_head, kept_fraction
from kvsim.held import held, held_counts, seen

POLICIES = ["ema:0.8", "tova", "h2o", "nonuniform/score=knorm/group=head", "snapkv:4", "full"]
MULTI, LONG = (SAMPLES / f"smollm2-{name}" for name in ("multineedle-256", "long-64"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return kvsim.open_trace(Recording(prompt=40).write(tmp_path_factory.mktemp("heads") / "t", "qkv"))


@pytest.mark.parametrize("shadow", [False, True])
def test_means_over_layers_and_heads_are_the_metrics(trace, shadow):
    results = kvsim.replay_many(trace, POLICIES, budget=7, shadow=shadow, shadow_churn=False)
    found = by_head(results, trace)
    assert found.kept_mass.shape == (len(POLICIES), 21, 3, 2)
    for p, result in enumerate(results):
        metrics = result.outcome.metrics
        assert found.kept_mass[p].mean(axis=(1, 2)) == pytest.approx(metrics["kept_mass"], abs=1e-6)
        lengths = 40 + np.arange(1, 22)
        assert found.kept_fraction[p].mean(axis=(1, 2)) * lengths == pytest.approx(metrics["retained"])


def test_a_cell_is_what_its_own_group_sees(trace):
    (result,) = kvsim.replay_many(trace, ["h2o"], budget=7, shadow_churn=False)
    found, t = by_head([result], trace), 9
    row = trace.attention_rows(t, [2])[0, 2:].mean(axis=0)
    visible = [*result.retained(t - 1, group=2 * 2 + 1), 40 + t - 1]
    assert found.kept_mass[0, t - 1, 2, 1] == pytest.approx(row[visible].sum(), abs=1e-6)
    cell = next(one for one in found.rows(t) if (one["layer"], one["head"]) == (2, 1))
    assert cell["kept_mass"] == found.kept_mass[0, t - 1, 2, 1]
    assert cell["kept_fraction"] == len(result.retained(t, group=5)) / (40 + t)
    mean = next(one for one in found.rows() if (one["layer"], one["head"]) == (2, 1))
    assert mean["kept_mass"] == pytest.approx(found.kept_mass[0, :, 2, 1].mean())


def test_sets_are_those_of_the_result(trace):
    for shadow in (False, True):
        for result in kvsim.replay_many(trace, ["snapkv:4", "h2o"], budget=7, shadow=shadow, shadow_churn=False):
            counts = held_counts(result)
            for t in (1, 5, 21):
                for group in range(6):
                    own = result.retained(t, group)
                    assert np.flatnonzero(held(result, t)[group]).tolist() == own.tolist()
                    assert counts[t - 1, group] == own.size
            assert (seen(result, 5) == held(result, 4)).sum(axis=1).tolist() == [60] * 6
            assert seen(result, 5)[:, 44].all()


def test_equal_budgets_are_flat_and_unequal_ones_are_not(trace):
    for text, flat in (("h2o", True), ("tova", True), ("nonuniform/score=knorm/group=head", False)):
        (result,) = kvsim.replay_many(trace, [text], budget=7, shadow_churn=False)
        fraction = kept_fraction(result)
        assert bool((np.ptp(fraction, axis=(1, 2)) == 0).all()) is flat
    assert fraction[-1].mean() == pytest.approx(7 / 61)


@pytest.mark.parametrize(("n_sink", "n_recent"), [(4, 8), (0, 1), (50, 3), (2, 1000), (4, 15)])
def test_parts_are_the_whole_and_do_not_overlap(trace, n_sink, n_recent):
    (result,) = kvsim.replay_many(trace, ["full"], shadow_churn=False)
    found = by_head([result], trace, n_sink=n_sink, n_recent=n_recent)
    assert found.attention.sum(axis=3) == pytest.approx(np.ones((21, 3, 2)), abs=1e-5)
    for t in (1, 12, 21):
        n = 40 + t
        names = [
            "sink" if i < n_sink else "recent" if i >= n - n_recent else "prompt" if i < 40 else "rest"
            for i in range(n)
        ]
        row = trace.attention_rows(t, [1])[0].mean(axis=0)
        want = {part: sum(float(row[i]) for i in range(n) if names[i] == part) for part in PARTS}
        got = {one["part"]: one["attention"] for one in found.part_rows(t) if one["layer"] == 1}
        assert got == pytest.approx(want, abs=1e-5)


def test_head_means_make_one_column():
    trace = kvsim.open_trace(LONG)
    (result,) = kvsim.replay_many(trace, ["tova"], shadow_churn=False)
    found = by_head([result], trace)
    assert found.kept_mass.shape == (1, 160, 30, 1)
    assert {row["head"] for row in found.rows()} == {None}
    assert found.kept_mass[0].mean(axis=(1, 2)) == pytest.approx(result.outcome.metrics["kept_mass"], abs=1e-6)


def test_what_cannot_be_shown_is_refused(trace):
    results = kvsim.replay_many(trace, ["tova"], budget=7, shadow_churn=False)
    shadows = kvsim.replay_many(trace, ["tova"], budget=7, shadow=True)
    with pytest.raises(KvsimError, match="step must be from 1 to 21, got 22"):
        by_head(results, trace).rows(22)
    with pytest.raises(KvsimError, match="give one mode"):
        by_head([*results, *shadows], trace)
    with pytest.raises(KvsimError, match="name at least one policy"):
        by_head([], trace)
    with pytest.raises(KvsimError, match="at least 0, got -1"):
        by_head(results, trace, n_sink=-1)
    with pytest.raises(KvsimError, match="is a replay of t, not of"):
        by_head(results, kvsim.open_trace(MULTI))


def test_the_map_has_a_cell_a_head(trace):
    results = kvsim.replay_many(trace, POLICIES[:4], budget=7, shadow_churn=False)
    found = by_head(results, trace)
    for column in ("kept_fraction", "kept_mass"):
        chart = charts.kept_by_head(found.rows(3), column)
        checked(chart)
        rows = [row for table in rows_of_chart(chart) for row in table]
        assert [row["value"] for row in rows] == pytest.approx([one[column] for one in found.rows(3)], rel=1e-5)
    many = [row | {"head": head} for row in found.rows() for head in range(1200)]
    spec = charts.kept_by_head(many).to_dict()
    assert sum(map(len, spec["datasets"].values())) <= 5000
    assert "KV head (means of 3)" in str(spec)
    with pytest.raises(KvsimError, match="recordings of equal layers"):
        charts.kept_by_head([*found.rows(), found.rows()[0] | {"trace_hash": "other", "trace": "other"}])


def test_layers_are_means_over_heads(trace):
    found = by_head(kvsim.replay_many(trace, ["h2o", "tova"], budget=7, shadow_churn=False), trace)
    rows = checked(charts.mass_by_layer(found.rows(), found.part_rows()))
    lines = [row for row in rows if "series" in row]
    assert [row["value"] for row in lines] == pytest.approx(found.kept_mass.mean(axis=(1, 3)).ravel(), rel=1e-5)
    bars = [row for row in rows if "part" in row]
    assert max(row["end"] for row in bars) == pytest.approx(1, abs=1e-5)
    want = found.attention.mean(axis=(0, 2)).T.ravel()
    assert [row["attention"] for row in bars] == pytest.approx(want, rel=1e-5)
