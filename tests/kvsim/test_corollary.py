"""Corollary 2: scaling all scores changes no retained set; an increasing map of them may."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cases import random_attention, write_trace
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvsim
from kvsim.corollary import map_of_scores
from kvsim.engines import get_engine, stepper
from kvsim.errors import KvsimError

LINEAR = [
    *("single", "cumulative", "ema:0", "ema:0.8", "ema:0.95", "ema:0.8,over=step", "ema:0.7,over=layer", "tova", "h2o"),
    *("inertiakv", "inertiakv-lazy:3", "score-free", "cumulative/group=layer", "ema:0.6/group=head"),
    *("ema:0.8/protect=sink:2+recent:2", "ema:0.8,over=step/refresh=2", "ema:0.5/score=vnorm", "ema:0.5/score=entropy"),
    *("ema:0.7,over=step/score=knorm", "cumulative/score=kvzip", "ema:0.8/score=keydiff"),
]

quick = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
shapes = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 7),
        "prompt": st.integers(8, 20),
        "seed": st.integers(0, 2**20),
        "layers": st.integers(1, 3),
    }
)


def scaled(plan, factor):
    """The plan of the same policy with every score, and a state that starts from scores, times `factor`."""
    source = plan.score
    if source.kind == "static":
        assert source.values is not None
        score = dataclasses.replace(source, values=source.values * factor)
        return dataclasses.replace(plan, score=score, m0=plan.m0 * factor)
    # The engines compute these scores themselves; a linear state sees b * s.
    return dataclasses.replace(plan, b=plan.b * factor, m0=plan.m0 * factor)


def plan_on(directory, policy, shape, budget):
    trace = write_trace(Path(tempfile.mkdtemp(dir=directory)) / "t", heads=4, kv_heads=2, **shape)
    return trace, kvsim.parse(policy).with_budget(kvsim.Budget(budget)).plan(trace)


def sets(engine, trace, plan, shadow):
    (outcome,) = get_engine(engine)(trace, [plan], shadow=shadow)
    return outcome.retained if shadow else outcome.evicted_at


@quick
@given(shapes, st.sampled_from(LINEAR), st.integers(6, 12), st.integers(-20, 20), st.booleans())
def test_powers_of_two_change_no_set_at_all(tmp_path, shape, policy, budget, exponent, shadow):
    trace, plan = plan_on(tmp_path, policy, shape, budget)
    for engine in ("reference", "cpu"):
        want = sets(engine, trace, plan, shadow)
        assert np.array_equal(sets(engine, trace, scaled(plan, 2.0**exponent), shadow), want)


@quick
@given(shapes, st.sampled_from(LINEAR), st.integers(6, 12), st.floats(1e-5, 1e5), st.booleans())
def test_other_factors_change_no_set_without_near_ties(tmp_path, shape, policy, budget, factor, shadow):
    trace, plan = plan_on(tmp_path, policy, shape, budget)
    gaps = [1.0]

    def watched(plan, group, m, visible, own=stepper.ranking):
        rank = own(plan, group, m, visible)
        ordered = np.sort(rank)
        # Zeros are tied whatever they are scaled by; one of them is the shifted minimum of a signed score.
        known = ordered[1:] > 0
        gaps.append(float((np.diff(ordered)[known] / ordered[1:][known]).min(initial=1.0)))
        return rank

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepper, "ranking", watched)
        want = sets("reference", trace, plan, shadow)
    assume(len(gaps) > 1 and min(gaps) > 1e-6)
    for engine in ("reference", "cpu"):
        assert np.array_equal(sets(engine, trace, scaled(plan, factor), shadow), want)


def test_halved_rows_keep_every_shadow_set(tmp_path):
    """The same with scores that are halved in the recording: models with a sink logit record smaller rows."""
    rows = random_attention(np.random.default_rng(3), 9, 2, 2, 24)
    found = []
    for factor in (1, 0.5):
        trace = write_trace(tmp_path / str(factor), attention=rows, prompt=24)
        halved = trace.attention_rows
        trace.attention_rows = lambda *given, read=halved, f=factor: read(*given) * np.float32(f)
        found.append([sets("reference", trace, kvsim.parse(p).plan(trace), True) for p in ("ema:0.8", "cumulative")])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


@given(st.floats(0.01, 30))
def test_a_map_of_expected_utilities_keeps_the_expected_ranking(power):
    found = map_of_scores(power, steps=1)
    assert found.expected[0] > found.expected[1]
    assert found.map_of_expected[0] > found.map_of_expected[1]


@pytest.mark.parametrize(("power", "first"), [(0.5, "i"), (1, "i"), (1.17, "i"), (1.19, "j"), (4, "j"), (9, "j")])
def test_a_map_of_scores_need_not(power, first):
    found = map_of_scores(power)
    assert found.rows()[2]["first"] == first
    assert [row["first"] for row in found.rows()[:2]] == ["i", "i"]


def test_the_fourth_power_reverses_the_expected_order():
    found = map_of_scores()
    assert found.expected == (0.5, 0.45)
    assert found.map_of_expected == pytest.approx((0.0625, 0.45**4))
    assert found.expected_of_map == pytest.approx((0.0625, 0.9**4 / 2))
    # States of drawn scores settle around the expected scores, within three standard deviations of a mean over 2,000.
    for states, want, high in (
        (found.states, found.expected, 0.9),
        (found.states_of_map, found.expected_of_map, 0.9**4),
    ):
        assert states[1000:, 0].mean() == pytest.approx(want[0], rel=1e-3)
        assert states[1000:, 1].mean() == pytest.approx(want[1], abs=3 * high / 2 / np.sqrt(1000))
    leading = found.rows()
    assert leading[0]["steps_with_i_first"] > 0.7
    assert leading[2]["steps_with_i_first"] < 0.05
    assert leading[1]["steps_with_i_first"] is None


def test_bad_input_is_an_error():
    for power in (0, -1, float("nan"), float("inf")):
        with pytest.raises(KvsimError, match="power"):
            map_of_scores(power)
    with pytest.raises(KvsimError, match="step"):
        map_of_scores(steps=0)
    with pytest.raises(KvsimError, match="decay"):
        map_of_scores(decay=1)
