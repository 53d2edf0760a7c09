"""Proposition 1: measured against its definition written out again, and where its assumptions hold, against theory."""

import dataclasses
import json
import math

import numpy as np
import pytest
from cases import SAMPLES, write_trace
from kvsim_traces import LayerInfo, Manifest, TraceWriter, open_trace
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError, PolicyError
from kvsim.proposition import ema_states, finite_factor, limit_factor, mean_factor, variance_factor
from kvsim.scoring import attention_scores, independent_scores
from kvsim.stability import rank_stability
from kvsim.synth import Synthetic, write_synthetic
from kvsim.twotokens import two_tokens

RULES = [
    *("single", "cumulative", "ema:0", "ema:0.8", "ema:0.9,over=step", "ema:0.7,over=layer", "tova", "inertiakv"),
    *("cumulative/group=layer", "ema:0.5/group=head", "ema:0.8,over=step/refresh=3", "score-free"),
    *("ema:0.8/protect=sink:1+recent:1", "ema:0.6/score=vnorm", "ema:0.6/score=entropy"),
    "ema:0.5,over=step/score=knorm",
]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def rows_trace(path, rows, prompt, *, zero=False):
    """A recording of one layer and one head with the given rows, [T][n]."""
    manifest = Manifest(
        capture="heads",
        prompt_length=prompt,
        planned_steps=len(rows),
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        arrays=["attention", "row_sums"],
        layers=[LayerInfo()],
        sink_logits=zero,
    )
    with TraceWriter(path, manifest) as writer:
        writer.write_prompt()
        for row in rows:
            writer.append(attention=np.array(row, np.float32)[None, None])
    return open_trace(path)


def series_trace(path, scores, prompt=None):
    """A recording whose prompt positions 1, 2, … have the scores [T, n]; position 0 takes the rest of each row."""
    rest = 1 - scores.sum(axis=1, keepdims=True)
    rows = np.concatenate([rest, scores], axis=1)
    return rows_trace(path, [[*row, *[0.0] * (t + 1)] for t, row in enumerate(rows)], rows.shape[1])


def by_definition(trace, policy):
    """Pairs as the design words them, from the rule's own recurrence, layer after layer."""
    plan = kvsim.parse(policy).plan(trace)
    T, L0 = trace.num_steps, trace.prompt_length
    found = {}
    for g in range(plan.groups.count):
        raw, states, updates = np.zeros((T, L0)), np.zeros((T, L0)), np.zeros(T)
        m, count = np.zeros(L0), 0
        for t in range(T):
            everything = np.arange(L0 + t + 1)
            if plan.score.kind == "attention":
                rows = trace.attention_rows(t + 1, list(plan.groups.layers)).astype(float)
                s = attention_scores(plan.score, rows, plan.groups, g, everything, renormalise=False)[:, :L0]
            else:
                s = independent_scores(plan.score, plan.groups, g, everything, t + 1)[:, :L0]
            alone, weight = np.zeros(L0), 0.0
            for a, b, row in zip(plan.a[t], plan.b[t], s, strict=True):
                alone, weight = a * alone + b * row, a * weight + b
            raw[t] = alone / weight
            if plan.scored[t]:
                count += 1
                m = np.zeros(L0) if plan.reset else m
                for a, b, row in zip(plan.a[t], plan.b[t], s, strict=True):
                    m = a * m + b * row
            states[t], updates[t] = m, count
        decay = 0.0 if plan.reset else float(np.prod(plan.a[0]))
        mean, variance, budget = raw.mean(axis=0), raw.var(axis=0), int(plan.budgets[g])
        ranked = np.argsort(-mean, kind="stable")
        for i in ranked[max(0, budget - 9) : budget]:
            for j in ranked[budget : budget + 9]:
                half = T // 2
                noise = (variance[i] + variance[j]) / (mean[i] - mean[j]) ** 2
                if decay == 1:
                    limit, finite = None, np.mean(1 / updates[half:])
                else:
                    power = decay ** updates[half:]
                    finite = np.mean((1 - decay) * (1 + power) / ((1 + decay) * (1 - power)))
                    limit = None if count == 1 else (1 - decay) / (1 + decay) * noise
                gap = raw[:, i] - raw[:, j] - (mean[i] - mean[j])
                found[g, int(i), int(j)] = (
                    float((states[half:, i] < states[half:, j]).mean()),
                    limit,
                    float(finite * noise),
                    float((gap[1:] * gap[:-1]).sum() / (gap**2).sum()) if (gap**2).sum() > 1e-20 else None,
                    float(mean[i] - mean[j]),
                )
    return found


@pytest.mark.parametrize("policy", RULES)
def test_pairs_are_those_of_the_definition(tmp_path, policy):
    trace = write_trace(tmp_path / "t", steps=15, prompt=30, layers=2)
    (found,) = rank_stability(trace, [policy], budget=11, shuffles=2)
    want = by_definition(trace, f"{policy}/budget=11")
    groups = {kvsim.parse(policy).plan(trace).groups.label(g): g for g, _, _ in want}
    assert len(found.pairs) == len(want) == 81 * len(groups)
    for pair in found.pairs:
        misranked, limit, finite, lag, delta = want[groups[pair.group], pair.above, pair.below]
        assert pair.misranked == misranked
        assert pair.asymptotic == pytest.approx(limit)
        assert pair.finite == pytest.approx(finite)
        assert pair.delta == pytest.approx(delta)
        if lag is not None:
            assert pair.autocorrelation == pytest.approx(lag)
    summary = found.summary()
    for bound, place in (("asymptotic", 1), ("finite", 2)):
        values = [(row[0], row[place]) for row in want.values() if row[place] is not None]
        assert summary[bound]["pairs"] == len(values)
        assert summary[bound]["vacuous"] == sum(value >= 1 for _, value in values)
        assert summary[bound]["violated"] == sum(share > value for share, value in values)
    assert summary["misranked"] == pytest.approx(np.mean([row[0] for row in want.values()]))
    assert found.misranked_steps[7:].mean() == pytest.approx(summary["misranked"])


def test_by_hand(tmp_path):
    # Scores of positions 1 and 2: 3/8, 1/8, 3/8, 1/8 and 1/4, 1/4, 1/8, 1/4, so means 1/4 and 7/32 and variances 1/64
    # and 3/1024. With A = 1/2 the states after step 3 are 17/64 and 5/32, after step 4 25/128 and 26/128: reversed.
    trace = series_trace(tmp_path / "t", np.array([[3, 2], [1, 2], [3, 1], [1, 2]]) / 8)
    (found,) = rank_stability(trace, ["ema:0.5"], budget=2, shuffles=0)
    (pair,) = [pair for pair in found.pairs if pair.above == 1]
    assert (pair.rank_above, pair.rank_below, pair.below) == (2, 3, 2)
    assert pair.delta == 1 / 32
    assert (pair.variance_above, pair.variance_below) == (1 / 64, 3 / 1024)
    assert pair.misranked == 0.5
    noise = (1 / 64 + 3 / 1024) * 32**2
    assert pair.asymptotic == pytest.approx(noise / 3)
    assert pair.asymptotic_common == pytest.approx(2 / 64 * 32**2 / 3)
    factors = [0.5 * (1 + 0.5**t) / (1.5 * (1 - 0.5**t)) for t in (3, 4)]
    assert pair.finite == pytest.approx(noise * sum(factors) / 2)
    # Differences from their mean: 3/32, -5/32, 7/32, -5/32.
    assert pair.autocorrelation == pytest.approx((-15 - 35 - 35) / (9 + 25 + 49 + 25))
    assert found.summary()["misranked_shuffled"] is None


def test_the_finite_form_is_variance_over_squared_mean():
    for decay in (0, 0.3, 0.8, 0.999, 1):
        t = np.arange(1, 400)
        assert np.allclose(finite_factor(decay, t), variance_factor(decay, t) / mean_factor(decay, t) ** 2, rtol=1e-9)
        assert finite_factor(decay, t)[0] == pytest.approx(1)
        assert (np.diff(finite_factor(decay, t)) <= 1e-15).all()
        weights = ema_states(np.eye(50), decay)[-1]
        assert mean_factor(decay, [50])[0] == pytest.approx(weights.sum())
        assert variance_factor(decay, [50])[0] == pytest.approx((weights**2).sum())
    assert limit_factor(0.8) == pytest.approx(finite_factor(0.8, [500])[0])
    assert limit_factor(1) is None


SEEDS, STEPS, HEADS, NOISE = 120, 40, 2, 0.6


def independent(seed):
    """Layer means [T, n] of an i.i.d. synthetic recording without position 0, with their true means and variances.

    A head's attention is u times noise of variance NOISE^2, independent between layers, heads and positions, so the
    mean of two layers over two heads has the variance (u_1^2 + u_2^2) / 4 * NOISE^2 / 2. Position 0 takes the rest of a
    row and depends on the others. A trace would store float16, whose rounding adds less than 1e-6 of that variance.
    """
    spec = Synthetic(prompt=60, steps=STEPS, layers=2, heads=HEADS, noise=NOISE, seed=seed)
    x = np.stack([spec.rows(t)[:, :, 1:60].mean(axis=(0, 1)) for t in range(1, STEPS + 1)])
    # Without noise the utilities are not scaled down to leave it room.
    u = dataclasses.replace(spec, noise=0).rows(1)[:, 0, 1:60] / (1 + NOISE**2)
    return x, u.mean(axis=0), (u**2).sum(axis=0) / 4 * NOISE**2 / HEADS


@pytest.fixture(scope="module")
def drawn():
    """Scores of 9 x 9 pairs around rank 12 by true utility, in independent recordings."""
    found = []
    for seed in range(SEEDS):
        x, mean, variance = independent(seed)
        order = np.argsort(-mean)
        above, below = np.repeat(order[3:12], 9), np.tile(order[12:21], 9)
        found.append((x[:, above] - x[:, below], mean[above] - mean[below], variance[above] + variance[below]))
    return found


def over_seeds(values):
    """Mean of [seeds, …] and its standard error; pairs of one recording share tokens, recordings share nothing."""
    values = np.asarray(values)
    return values.mean(axis=0), values.std(axis=0, ddof=1) / math.sqrt(len(values))


def close_to_zero(values):
    """Check [seeds, T]: three standard errors for the mean over steps, four at each step (of 400 that are checked)."""
    mean, error = over_seeds(values)
    assert (np.abs(mean) < 4 * error).all()
    mean, error = over_seeds(np.mean(values, axis=1))
    assert abs(mean) < 3 * error


@pytest.mark.parametrize("decay", [0, 0.5, 0.8, 0.95, 1])
def test_the_gap_has_the_mean_and_the_variance_of_the_proposition_at_every_step(drawn, decay):
    t = np.arange(1, STEPS + 1)[:, None]
    shift, spread = [], []
    for gap, delta, variance in drawn:
        off = (ema_states(gap, decay) - mean_factor(decay, t) * delta) / np.sqrt(variance_factor(decay, t) * variance)
        shift.append(off.mean(axis=1))
        spread.append((off**2).mean(axis=1))
    close_to_zero(shift)
    close_to_zero(np.array(spread) - 1)
    assert np.std(spread, axis=0).max() / math.sqrt(SEEDS) < 0.05, "an error of a fifth would be seen"


@pytest.mark.parametrize("decay", [0, 0.5, 0.8, 0.95, 1])
def test_the_finite_bound_holds_at_every_step(drawn, decay):
    """Where the bound says something, misranking stays below it on average, within three standard errors."""
    t = np.arange(1, STEPS + 1)[:, None]
    excess, share = [], []
    for gap, delta, variance in drawn:
        wrong = ema_states(gap, decay) < 0
        bound = finite_factor(decay, t) * variance / delta**2
        telling = bound < 1
        excess.append(np.where(telling, wrong - bound, 0).mean(axis=1))
        share.append((wrong & telling).mean())
    mean, error = over_seeds(excess)
    assert (mean < 3 * error).all()
    assert decay < 0.8 or np.mean(share) > 0.003, "something is misranked"


def test_the_limit_alone_fails_early(drawn):
    """At t = 1 a slow EMA has averaged nothing yet, whatever its limit promises."""
    telling = [
        ((gap[0] < 0)[keep], bound[keep])
        for gap, delta, variance in drawn
        if (keep := (bound := limit_factor(0.95) * variance / delta**2) < 0.3).any()
    ]
    wrong, bound = (np.concatenate([one[place] for one in telling]) for place in range(2))
    assert wrong.mean() > 1.5 * bound.mean()


def test_what_the_measure_says_where_the_assumptions_hold(tmp_path):
    """On i.i.d. recordings nothing depends on time, and no order of the steps is special."""
    found = []
    for seed in range(12):
        spec = Synthetic(prompt=120, steps=48, layers=2, heads=2, noise=NOISE, seed=seed)
        (one,) = rank_stability(write_synthetic(spec, tmp_path / str(seed)), ["ema:0.8,over=step"], budget=16)
        assert all(pair.above > 0 for pair in one.pairs), "position 0 is not independent of the others"
        assert (one.misranked_steps <= 1).all()
        row = one.summary()
        found.append(
            (
                row["autocorrelation"] + 1 / 48,
                row["correlation"],
                row["misranked"] - row["misranked_shuffled"],
                row["variance_ratio"] - row["variance_ratio_shuffled"],
                (row["finite"]["violated"] - row["finite"]["shuffled"]) / 81,
                *(one.misranked_steps - one.finite_steps)[::8],
            )
        )
    mean, error = over_seeds(found)
    assert (np.abs(mean[:5]) <= 3 * error[:5]).all()
    assert (mean[5:] <= 3 * error[5:]).all()


def drifting(steps=200, late=0.25):
    """Position 1 is worth 0.3 in the first half and 0.1 in the second, position 2 0.1 and then `late`."""
    half = steps // 2
    scores = np.full((steps, 4), 0.01)
    scores[:half, :2], scores[half:, :2] = (0.3, 0.1), (0.1, late)
    return scores


def test_a_violated_bound_is_shown_as_violated(tmp_path):
    trace = series_trace(tmp_path / "t", drifting())
    (found,) = rank_stability(trace, ["ema:0.97"], budget=2, shuffles=5)
    (pair,) = [pair for pair in found.pairs if (pair.above, pair.below) == (1, 2)]
    assert pair.autocorrelation > 0.95
    assert pair.finite < 0.5 < pair.misranked
    assert pair.violated("finite")
    assert pair.violated("asymptotic")
    row = found.summary()
    assert row["finite"]["violated"] >= row["asymptotic_common_violated"] >= 1
    assert row["finite"]["shuffled"] == 0, "without dependence over time the bound holds"
    shown = run("analyze", "stability", "--trace", trace.path, "--policy", "ema:0.97", "--budget", 2).stdout
    tally = row["finite"]
    assert f"{tally['violated']}/{tally['pairs'] - tally['vacuous']}" in shown


@pytest.mark.parametrize("budget", [1, 3, 7])
@pytest.mark.parametrize(
    ("make", "tied"),
    [
        (lambda path: rows_trace(path, [[1 / (8 + t)] * (8 + t) for t in range(4)], 7), True),
        (lambda path: rows_trace(path, [[0.0] * (8 + t) for t in range(4)], 7, zero=True), True),
        (lambda path: series_trace(path, np.tile([0.3, 0.2, 0.1, 0.05, 0.04, 0.03, 0.02], (2, 1))), False),
        (lambda path: write_trace(path, capture="scores", prompt=9, steps=2), False),
    ],
    ids=["equal scores", "all-zero rows", "constant scores", "head means"],
)
def test_odd_recordings_give_numbers_or_none(tmp_path, make, tied, budget):
    trace = make(tmp_path / "t")
    words = ["analyze", "stability", "--trace", trace.path, "--budget", budget]
    if budget >= trace.prompt_length:
        assert "no boundary" in run(*words, code=2).stderr
        return
    found = json.loads(run(*words, "--json", "--pairs").stdout)["results"]
    for row in found:
        assert row["pairs"] == len(row["pair_rows"]) == budget * (trace.prompt_length - budget)
        assert row["tied"] == (row["pairs"] if tied else 0)
        assert (row["misranked"] is None) == tied
        if tied:
            assert row["finite"] | {"shuffled": 0} == {
                **{"pairs": 0, "vacuous": 0, "violated": 0, "shuffled": 0, "median": None},
                **{"violated_share": None, "violated_of_telling": None},
            }
            assert row["autocorrelation"] is None or trace.num_steps == 4
    shown = run(*words).stdout
    assert "nan" not in shown.lower()
    assert ("-" in shown.splitlines()[-2]) or not tied


def test_constant_scores_are_never_misranked(tmp_path):
    trace = series_trace(tmp_path / "t", np.tile([0.3, 0.2, 0.1, 0.05], (6, 1)))
    for found in rank_stability(trace, budget=2):
        for pair in found.pairs:
            assert (pair.misranked, pair.finite, pair.violated("finite")) == (0, 0, False)
            assert pair.autocorrelation is pair.correlation is pair.variance_ratio is None


def test_bad_input_is_an_error(tmp_path):
    trace = write_trace(tmp_path / "t", steps=4)
    with pytest.raises(KvsimError, match="at least 2"):
        rank_stability(write_trace(tmp_path / "one", steps=1))
    for budget in (40, 1000):
        with pytest.raises(KvsimError, match="no boundary"):
            rank_stability(trace, budget=budget)
    with pytest.raises(KvsimError, match="state of 0"):
        rank_stability(trace, ["h2o"])
    with pytest.raises(PolicyError, match="linear rule"):
        rank_stability(trace, ["snapkv:6"])
    with pytest.raises(KvsimError, match="at least one policy"):
        rank_stability(trace, [])
    for shuffles in (-1, 1.5, True):
        with pytest.raises(KvsimError, match="shuffles"):
            rank_stability(trace, shuffles=shuffles)
    assert "linear rule" in run("analyze", "stability", "--trace", trace.path, "--policy", "rkv", code=2).stderr
    run("analyze", "stability", code=2)


def test_scaling_scores_changes_no_share(tmp_path):
    """Bounds and misranking are ratios: halving every score (exactly, in binary) leaves all of them."""
    scores = np.random.default_rng(0).uniform(0.01, 0.1, size=(20, 8))
    one, half = (series_trace(tmp_path / str(f), f * np.float16(scores * 2**15) / 2**15) for f in (1, 0.5))
    for a, b in zip(*(rank_stability(trace, budget=5) for trace in (one, half)), strict=True):
        keep = [[pair for pair in found.pairs if pair.above] for found in (a, b)]
        for x, y in zip(*keep, strict=True):
            assert (x.above, x.below, x.misranked) == (y.above, y.below, y.misranked)
            assert x.finite == pytest.approx(y.finite, rel=1e-9)


def test_shuffles_repeat_with_their_seed(tmp_path):
    trace = write_trace(tmp_path / "t", steps=20)
    one, same, other = (rank_stability(trace, ["ema:0.9,over=step"], seed=seed)[0].summary() for seed in (1, 1, 2))
    assert one == same
    assert one["misranked_shuffled"] != other["misranked_shuffled"]
    together = rank_stability(trace, RULES, budget=12)
    assert together == [rank_stability(trace, [rule], budget=12)[0] for rule in RULES]


def test_the_command_prints_what_python_returns():
    sample = SAMPLES / "smollm2-multineedle-256"
    words = ["analyze", "stability", "--trace", sample, "--policy", "ema:0.80", "--policy", "ema:0.8,over=step"]
    found = json.loads(run(*words, "--json", "--pairs").stdout)
    want = rank_stability(sample, ["ema:0.8", "ema:0.8,over=step"])
    assert found["mode"] == "shadow"
    for row, one in zip(found["results"], want, strict=True):
        assert row.pop("pair_rows") == [pair.summary() for pair in one.pairs]
        assert row == one.summary()
    shown = run(*words).stdout
    for word in (
        "shadow mode",
        "ema:0.8 ",
        "0.0012",
        "misranked",
        "shuffled",
        "viol.",
        "lag-1",
        "compression_ratio 0.9",
    ):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_two_tokens_are_those_of_the_shadow_replay(tmp_path):
    trace = write_trace(tmp_path / "t", steps=12, prompt=30)
    for policy in ("ema:0.8", "ema:0.8,over=step", "cumulative", "single", "ema:0.9,over=step/refresh=3"):
        found = two_tokens(trace, policy, budget=8)
        plan = kvsim.parse(f"{policy}/budget=8").plan(trace)
        m = np.zeros(30)
        scale = plan.b[0] @ np.append(np.cumprod(plan.a[0, :0:-1])[::-1], 1)
        for t in range(12):
            rows = trace.attention_rows(t + 1).astype(float)
            s = attention_scores(plan.score, rows, plan.groups, 0, np.arange(31 + t), renormalise=False)[:, :30]
            if plan.scored[t]:
                for a, b, row in zip(plan.a[t], plan.b[t], s, strict=True):
                    m = a * m + b * row
            top = np.argsort(m, kind="stable")[-8:]
            assert found.states_inside[t].tolist() == [position in top for position in found.positions]
            if 0 < found.step_decay < 1:
                assert found.states[t] * scale / (1 - found.step_decay) == pytest.approx(m[list(found.positions)])
        pair = rank_stability(trace, [policy], budget=8)[0].pairs
        (nearest,) = [one for one in pair if (one.rank_above, one.rank_below) == (8, 9)]
        assert found.positions == (nearest.above, nearest.below)
        wrong = found.states[6:, 0] < found.states[6:, 1]
        assert nearest.misranked == pytest.approx(wrong.mean())
        rows = found.rows()
        assert len(rows) == 24
        assert rows[3]["score"] == found.scores[1, 1]


def test_two_tokens_by_hand(tmp_path):
    # B = 2, position 0 always first: the scores swap at every step, their running mean never does.
    trace = series_trace(tmp_path / "t", np.array([[0.2, 0.1], [0.1, 0.15]] * 4))
    found = two_tokens(trace, "cumulative", budget=2)
    assert found.positions == (1, 2)
    assert found.flips() == {
        **{"scores_crossings": 7, "scores_reversed": 4},
        **{"states_crossings": 0, "states_reversed": 0},
    }
    assert two_tokens(trace, "cumulative", budget=2, positions=(2, 1)).positions == (1, 2)
    for wrong in ((1, 1), (0, 3), (-1, 0)):
        with pytest.raises(KvsimError, match="positions"):
            two_tokens(trace, budget=2, positions=wrong)
    with pytest.raises(KvsimError, match="group"):
        two_tokens(trace, budget=2, group=1)
    with pytest.raises(KvsimError, match="no boundary"):
        two_tokens(trace, budget=3)
