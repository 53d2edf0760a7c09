"""Rules that choose alpha while they run: causal, true to their definitions, and right about directions."""

import dataclasses
import math

import numpy as np
import pytest
from cases import CPU_ENGINES, random_attention, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim.adaptation import adaptation, fixed_beside, hindsight
from kvsim.cli import app
from kvsim.control import Moment
from kvsim.controls.noise import GRID, least_risk, risk
from kvsim.engines.reference import settle
from kvsim.policies.adaptive import Adaptive
from kvsim.policies.ema import Ema
from kvsim.replay import choose_budget
from kvsim.synth import Synthetic, synthetic_of, write_synthetic

HOWS = ("noise,warmup=3", "disagreement,threshold=0.2", "tracking")
PROMPT, STEPS, LAYERS, HEADS = 24, 14, 3, 2


def plan_of(trace, policy, budget=6):
    plan = kvsim.parse(policy).with_budget(choose_budget(budget=budget)).plan(trace)
    assert plan.control is not None
    return plan


def alphas(trace, policy, budget=6, shadow=False):
    return settle(trace, plan_of(trace, policy, budget), shadow=shadow).a[:, 0]


def moment(step, state, scores, visible=None):
    """One group: a state [n] that does not know the last position, and scores [K, n]."""
    visible = np.arange(len(state)) if visible is None else np.array(visible)
    return Moment(step, [visible], [np.array(state, float)], [np.atleast_2d(np.array(scores, float))])


@pytest.mark.parametrize("shadow", [False, True], ids=["irreversible", "shadow"])
@pytest.mark.parametrize("group", ["shared", "layer", "head"])
@pytest.mark.parametrize("over", ["both", "step"])
@pytest.mark.parametrize("how", HOWS)
def test_the_future_changes_nothing_before_it(tmp_path, how, over, group, shadow):
    rng = np.random.default_rng(3)
    attention = random_attention(rng, STEPS, LAYERS, HEADS, PROMPT)
    other = attention.copy()
    other[8:] = random_attention(rng, STEPS, LAYERS, HEADS, PROMPT)[8:]
    policy = f"adaptive:{how},over={over}/group={group}"
    one, two = (
        write_trace(tmp_path / name, attention=rows, prompt=PROMPT) for name, rows in (("a", attention), ("b", other))
    )
    first, second = (settle(trace, plan_of(trace, policy), shadow=shadow) for trace in (one, two))
    assert np.array_equal(first.a[:8], second.a[:8])
    assert np.array_equal(first.b[:8], second.b[:8])
    if how == "tracking":
        assert not np.array_equal(first.a[8:], second.a[8:]), "or it looks at nothing"
    if not shadow:
        gone, gone_two = (kvsim.replay(t, policy, budget=6, shadow_churn=False).evicted_at for t in (one, two))
        early = (gone >= 0) & (gone <= 8)
        assert np.array_equal(early, (gone_two >= 0) & (gone_two <= 8))
        assert np.array_equal(gone[early], gone_two[early])


@pytest.mark.parametrize("how", HOWS)
def test_a_run_starts_afresh(tmp_path, how):
    trace = write_trace(tmp_path / "t", steps=STEPS)
    plan = plan_of(trace, f"adaptive:{how},over=step/group=layer")
    assert np.array_equal(settle(trace, plan).a, settle(trace, plan).a)
    assert settle(trace, plan).control is None


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("over", ["both", "step"])
def test_without_a_choice_it_is_the_ema(tmp_path, how, over):
    trace = write_trace(tmp_path / "t", steps=STEPS)
    bounds = "" if how.startswith("noise") else ",low=0.6,high=0.6"
    how = how.replace("warmup=3", "warmup=50")
    adaptive, fixed = (
        kvsim.replay(trace, policy, budget=6)
        for policy in (f"adaptive:{how},over={over},start=0.6{bounds}", f"ema:0.6,over={over}")
    )
    assert adaptive.evicted_at.tolist() == fixed.evicted_at.tolist()
    assert adaptive.shadow_churn == fixed.shadow_churn


def test_the_risk_is_eq_5_as_we_read_it():
    assert risk(0.8, 2.0, 0.5) == pytest.approx(2 * 0.2 / 1.8 * 4 + (0.5 * 4) ** 2)
    for eta, alpha in ((0.44, 0), (0.45, 0.3), (1.88, 0.3), (1.9, 0.6), (7.1, 0.8), (23.7, 0.9), (72.1, 0.95)):
        assert least_risk(eta, 1) == least_risk(eta * 0.01, 0.01) == alpha
    assert least_risk(0.1, 0) == max(GRID)
    assert least_risk(0, 0.1) == 0
    assert least_risk(0, 0) is None


def test_the_noise_selector_measures_what_it_says(tmp_path):
    trace = write_trace(tmp_path / "t", layers=2, prompt=5, steps=3)
    decide = plan_of(trace, "adaptive:noise,warmup=3", budget=2).control.begin(plan_of(trace, "adaptive:noise", 2))
    one, two, three = [4, 3, 1, 0, 0, 0], [4, 1, 3, 0, 0, 0], [0, 0, 0, 4, 3, 0]
    decide(moment(1, [0] * 6, [one, two]))
    decide(moment(2, [*one, 0], [[*one, 0], [*one, 0]]))
    decide(moment(3, [*two, 0, 0], [[*one, 0, 0], [*three, 0, 0]]))
    assert decide.alpha == 0.8
    assert decide.signals == {}
    decide(moment(4, [*two, 0, 0, 9], [[*two, 0, 0, 0]] * 2))
    # Layers: {0,1} and {0,2}, equal, disjoint. States: {0,1}, {0,2}, {0,2}.
    sigma, delta = np.mean([2 / 3, 0, 1]), np.mean([2 / 3, 0])
    assert decide.signals == pytest.approx({"sigma": sigma, "delta": delta, "eta": sigma / delta}, rel=1e-12)
    assert decide.alpha == least_risk(sigma, delta) == 0.3
    decide(moment(5, [*three, 0, 0, 0, 0], [[*one, 0, 0, 0, 0]] * 2))
    assert decide.alpha == 0.3


def test_the_trigger_compares_the_step_with_the_state(tmp_path):
    trace = write_trace(tmp_path / "t", layers=2, prompt=5, steps=3)
    plan = plan_of(trace, "adaptive:disagreement,share=1,threshold=0.5,low=0.1,high=0.9,start=0.4", budget=2)
    decide = plan.control.begin(plan)
    found = []
    for state, scores in (
        ([0, 0, 0, 0], [[4, 3, 1, 0], [4, 3, 1, 0]]),
        ([4, 3, 0, 0], [[4, 3, 1, 0], [2, 3, 1, 0]]),
        ([4, 3, 0, 0], [[0, 3, 1, 4], [0, 3, 1, 4]]),
        ([4, 3, 0, 0], [[0, 0, 1, 4], [0, 0, 3, 1]]),
    ):
        decide(moment(1, state, scores))
        found.append((decide.alpha, decide.signals.get("disagreement")))
    assert found == [(0.4, None), (0.9, 0.0), (0.1, pytest.approx(2 / 3)), (0.1, 1.0)]


def test_errors_that_keep_their_direction_lower_alpha_and_those_that_turn_raise_it(tmp_path):
    trace = write_trace(tmp_path / "t", layers=1, prompt=4, steps=3)
    plan = plan_of(trace, "adaptive:tracking,beta=0.4,start=0.7,low=0.1", budget=2)
    state, up, down = [2.0, 2, 2, 2], [3.0, 1, 3, 1], [1.0, 3, 1, 3]
    for scores, last in (([up] * 8, 0.1), ([up, down] * 4, 0.95), ([up, up, down, up, up], None)):
        decide = plan.control.begin(plan)
        decide(moment(1, [0] * 4, scores[0]))
        assert decide.alpha == 0.7
        errors = []
        for step, row in enumerate(scores, start=2):
            decide(moment(step, state, row))
            errors.append(np.array(row) / 8 - 0.25)
            if step == 2:
                assert decide.alpha == 0.7
                continue
            weights = 0.4 * 0.6 ** np.arange(len(errors))[::-1]
            signal = np.abs(weights @ errors).sum() / (weights @ np.abs(errors)).sum()
            random = math.sqrt((weights**2).sum()) / weights.sum()
            assert decide.signals == pytest.approx({"signal": signal, "random": random})
            assert decide.alpha == pytest.approx(np.clip(1 - (signal - random) / (1 - random), 0.1, 0.95))
        if last is not None:
            assert decide.alpha == last
        else:
            assert 0.1 < decide.alpha < 0.95


def test_the_signal_is_one_whatever_the_scale_and_forgets_what_is_evicted(tmp_path):
    trace = write_trace(tmp_path / "t", layers=1, prompt=4, steps=3)
    plan = plan_of(trace, "adaptive:tracking", budget=2)
    signals = []
    for scale in (1.0, 1e-6):
        decide = plan.control.begin(plan)
        decide(moment(1, [2, 2, 2, 0], [scale * s for s in (3, 1, 3, 1)]))
        decide(moment(2, [2, 2, 2, 0, 0], [scale * s for s in (3, 1, 3, 1, 1)]))
        decide(moment(3, [2, 2, 0], [scale * s for s in (1, 3, 1)], visible=[0, 2, 5]))
        signals.append(decide.signals["signal"])
    assert signals[0] == pytest.approx(signals[1])
    assert 0 < signals[0] < 1


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synthetic")

    def make(kind, **options):
        spec = Synthetic(kind, prompt=128, steps=60, layers=3, seed=200, **options)
        path = folder / f"{kind}{options}"
        return kvsim.open_trace(path) if path.exists() else write_synthetic(spec, path)

    return make


def test_noise_keeps_alpha_high_drift_lowers_it_and_a_shift_lowers_it_for_a_while(synthetic):
    policy = "adaptive:tracking,over=step"

    def found(trace):
        return alphas(trace, policy, budget="10%", shadow=True)

    assert found(synthetic("iid", noise=2.0))[5:].mean() > 0.9
    drifting = [found(synthetic("drift", noise=0.5, drift=drift))[5:].mean() for drift in (0.01, 0.04, 0.16)]
    assert 0.95 > drifting[0] > drifting[1] > drifting[2] > 0.2
    shift = found(synthetic("shift", noise=1.0, shift_at=31))
    assert shift[20:30].min() > 0.75, "before"
    assert shift[31:34].max() < 0.7, "two steps after it"
    assert shift[50:].min() > 0.75, "over"
    trigger = alphas(synthetic("iid", noise=2.0), "adaptive:disagreement,over=step", budget="10%", shadow=True)
    assert (trigger[5:] == 0.3).mean() > 0.8, "the trigger takes noise for a shift"


def test_tracking_loses_less_to_a_shift_than_any_fixed_alpha(synthetic):
    rules = ["adaptive:tracking,over=step"]
    trace = synthetic("shift", noise=1.0, shift_at=31)
    utility = synthetic_of(trace).utilities
    tracking, *fixed = adaptation(trace, [*rules, *fixed_beside(rules)], utility=utility)
    (best,) = hindsight(fixed)
    assert tracking.shadow_loss < 0.9 * best["shadow_loss"]


def test_the_drift_of_irreversible_eviction_is_arithmetic(tmp_path):
    """One token leaves a step, so the selector's drift is bounded by the budget whatever the recording does."""
    trace = write_trace(tmp_path / "t", steps=STEPS, prompt=120)
    for budget in (5, 20, 60):
        (row,) = adaptation(trace, ["adaptive:noise"], budget=budget)
        own = row.irreversible.signals
        assert 0 <= own["delta"] <= 2 / (budget + 1) + 1e-12
        assert row.shadow.signals["delta"] > 0.2


@pytest.mark.parametrize("group", ["shared", "layer", "head"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_odd_recordings(tmp_path, engine, how, group):
    flat = np.zeros((6, 2, 2, 14), np.float32)
    for t in range(6):
        flat[t, ..., : 9 + t] = 1 / (9 + t)
    odd = {
        "one": write_trace(tmp_path / "one", steps=1, prompt=8),
        "flat": write_trace(tmp_path / "flat", attention=flat, prompt=8),
        "zero": write_trace(tmp_path / "zero", attention=np.zeros_like(flat), prompt=8, sink_logits=True),
        "lone": write_trace(tmp_path / "lone", layers=1, steps=6, prompt=1),
    }
    for name, trace in odd.items():
        for budget in (1, 4, 1000):
            for tail in ("", "/refresh=2", "/refresh=first"):
                policy = f"adaptive:{how},over=step/group={group}{tail}"
                result = kvsim.replay(trace, policy, budget=budget, engine=engine, shadow_churn=False)
                assert math.isfinite(result.summary()["kept_mass"])
                if budget == 1000:
                    assert (result.evicted_at == -1).all()
                for shadow in (False, True):
                    found = alphas(trace, policy, budget, shadow)
                    assert ((found >= 0) & (found < 1)).all()
                    if name in ("one", "zero") and how == "tracking":
                        assert (found == 0.8).all(), "there is nothing to choose by"


def test_a_head_means_recording_runs_too(tmp_path):
    trace = write_trace(tmp_path / "t", capture="scores", steps=STEPS)
    found = {how: alphas(trace, f"adaptive:{how},over=step/group=layer") for how in HOWS}
    assert all(0.8 not in own[4:] for own in found.values())


def test_steps_that_are_not_scored_choose_nothing(tmp_path):
    trace = write_trace(tmp_path / "t", steps=STEPS)
    plan = plan_of(trace, "adaptive:disagreement,over=step,start=0.5/refresh=3")
    settled = settle(trace, plan)
    assert set(settled.a[~plan.scored, 0]) == {0.5}
    assert 0.5 not in settled.a[plan.scored, 0][1:]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("adaptive", "adaptive:tracking"),
        ("adaptive:noise,warmup=10,over=both", "adaptive:noise"),
        ("adaptive:disagreement,threshold=0.30,low=.3,high=0.9", "adaptive:disagreement,high=0.9"),
        ("adaptive:how=tracking,high=0.9,over=step,low=-0.0", "adaptive:tracking,over=step,low=0,high=0.9"),
    ],
)
def test_canonical_strings(text, canonical):
    assert str(kvsim.parse(text)) == canonical
    assert kvsim.parse(canonical) == kvsim.parse(text)
    assert kvsim.parse(canonical).head == dataclasses.replace(kvsim.parse(text).head)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adaptive:clever", r"unknown how of 'adaptive' 'clever' \(valid: disagreement, noise, tracking\)"),
        ("adaptive:noise,over=layer", r"unknown over .*valid: both, step"),
        ("adaptive:noise,beta=0.3", r"'adaptive:noise' does not take beta \(it takes over, start, warmup\)"),
        ("adaptive:disagreement,warmup=3", "does not take warmup"),
        ("adaptive:tracking,threshold=0.4", r"does not take threshold \(it takes over, start, beta, low, high\)"),
        ("adaptive:tracking,gamma=1", "unknown argument of 'adaptive' 'gamma'"),
        ("adaptive:tracking,start=1", r"start of 'adaptive' must be in \[0, 1\)"),
        ("adaptive:tracking,high=-0.1", r"high of 'adaptive' must be in \[0, 1\)"),
        ("adaptive:tracking,low=0.9,high=0.2", "low of 'adaptive' must be at most high"),
        ("adaptive:tracking,beta=1", r"beta of 'adaptive' must be in \(0, 1\)"),
        ("adaptive:noise,warmup=1", "warmup of 'adaptive' must be at least 2"),
        ("adaptive:disagreement,threshold=1.1", r"threshold of 'adaptive' must be in \[0, 1\]"),
        ("adaptive:disagreement,share=0", r"share of 'adaptive' must be in \(0, 1\]"),
    ],
)
def test_bad_arguments(text, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.parse(text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ema(0.8, over="steps"), "unknown over of 'ema' 'steps'; did you mean 'step'"),
        (lambda: Adaptive("noise", over="layer"), "unknown over of 'adaptive' 'layer'"),
        (lambda: Adaptive("noises"), "unknown how of 'adaptive' 'noises'; did you mean 'noise'"),
    ],
)
def test_objects_are_checked_as_strings_are(make, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        make()


def test_the_list_of_policies_has_it():
    output = CliRunner().invoke(app, ["policies", "adaptive"]).stdout
    for field in dataclasses.fields(Adaptive):
        assert f"{field.name} :" in output or f", {field.name} :" in output or f"{field.name}, " in output
