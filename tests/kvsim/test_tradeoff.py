"""layer + lag + boundary = total: against the definition written out again, by hand, and where the truth is known."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from cases import SAMPLES, random_attention, rows_trace, write_trace
from typer.testing import CliRunner

import kvsim
from kvsim import tradeoff
from kvsim.alphas import ALPHAS, at_edge
from kvsim.cli import app
from kvsim.errors import KvsimError, PolicyError
from kvsim.intervals import best_alphas, over_traces
from kvsim.plan import Groups
from kvsim.scoring import attention_scores, independent_scores
from kvsim.synth import KINDS, Synthetic, write_synthetic
from kvsim.tradeoff import DEFAULT_H, DEFAULT_POLICIES, PARTS, decompose

RULES = [
    *("single", "cumulative", "ema:0", "ema:0.8", "ema:0.9,over=step", "ema:0.7,over=layer", "tova", "inertiakv"),
    *("cumulative/group=layer", "ema:0.5/group=head", "ema:0.8/refresh=3", "ema:0.8/protect=sink:1+recent:1"),
    *("ema:0.6/score=vnorm", "ema:0.6/score=entropy", "cumulative:start=prompt/group=layer", "ema:0.5/score=knorm"),
    *("cumulative/score=attention:heads=max", "ema:0.5/score=keydiff/group=head"),
]


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def scores_of(trace, plan, group, t):
    """The shadow scores of step t, [K_g, n]."""
    everything = np.arange(trace.prompt_length + t)
    if plan.score.kind != "attention":
        return independent_scores(plan.score, plan.groups, group, everything, t)
    rows = trace.attention_rows(t, list(plan.groups.layers)).astype(float)
    return attention_scores(plan.score, rows, plan.groups, group, everything, renormalise=False)


def top(m, budget):
    return np.argsort(np.asarray(m, np.float32), kind="stable")[max(0, len(m) - budget) :]


def by_definition(trace, policy, h, utility=None):
    """Layer, lag, boundary and total as the design words them, layer after layer."""
    plan = kvsim.parse(policy).plan(trace)
    T, L0, G = trace.num_steps, trace.prompt_length, plan.groups.count
    lost = np.zeros((3, T, G))
    for g in range(G):
        s = [scores_of(trace, plan, g, t) for t in range(1, T + 1)]
        memory, memory_u = np.zeros(L0 + T), np.zeros(L0 + T)
        for t in range(T):
            n = L0 + t + 1
            if utility is None:
                u = np.zeros_like(s[t])
                for i in range(n):
                    near = [s[j][:, i] for j in range(max(0, t - h), min(T, t + h + 1)) if i < L0 + j + 1]
                    u[:, i] = np.mean(near, axis=0)
            else:
                u = utility(t + 1)[plan.groups.members(g)[0]]
            alone = np.zeros(n)
            for a, b, row in zip(plan.a[t], plan.b[t], u, strict=True):
                alone = a * alone + b * row
            for m, source in ((memory, s[t]), (memory_u, u)):
                if plan.reset:
                    m[:] = 0
                for a, b, row in zip(plan.a[t], plan.b[t], source, strict=True):
                    m[:n] = a * m[:n] + b * row
            ubar, budget = u.mean(axis=0), int(plan.budgets[g])
            best = ubar[top(ubar, budget)].sum()
            for place, m in enumerate((alone, memory_u[:n], memory[:n])):
                lost[place, t, g] = 1 - ubar[top(m, budget)].sum() / best
    layer, rule_u, rule_s = lost.mean(axis=(1, 2))
    return layer, rule_u - layer, rule_s - rule_u, rule_s


@pytest.mark.parametrize("policy", [rule for rule in RULES if not any(w in rule for w in ("refr", "prot", "start"))])
@pytest.mark.parametrize("h", [0, 2, 8])
def test_the_parts_are_those_of_the_definition(tmp_path, policy, h):
    trace = write_trace(tmp_path / "t", steps=14, prompt=30)
    (row,) = decompose(trace, [policy], budget=6, h=h)
    want = by_definition(trace, f"{policy}/budget=6", h)
    assert [getattr(row, part) for part in PARTS] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("policy", RULES)
def test_the_parts_sum_to_the_loss_of_the_shadow_replay(tmp_path, policy):
    trace = write_trace(tmp_path / "t", steps=14, prompt=30)
    (row,) = decompose(trace, [policy], budget=6, h=3)
    assert row.total == pytest.approx(row.layer + row.lag + row.boundary, abs=1e-9)
    assert row.steps.shape == (3, 14)
    assert row.steps.mean(axis=1) == pytest.approx([row.layer, row.lag, row.boundary], abs=1e-12)
    result = kvsim.replay(trace, policy, budget=6, shadow=True, engine="reference")
    plan, retained = result.plan, result.outcome.retained
    lost = []
    for t in range(1, 15):
        for g in range(plan.groups.count):
            near = range(max(1, t - 3), min(14, t + 3) + 1)
            rows = np.zeros((len(near), len(scores_of(trace, plan, g, t)), 30 + t))
            count = np.zeros(30 + t)
            for k, j in enumerate(near):
                n = min(30 + t, 30 + j)
                rows[k, :, :n] = scores_of(trace, plan, g, j)[:, :n]
                count[:n] += 1
            ubar = (rows.sum(axis=0) / count).mean(axis=0)
            lost.append(1 - ubar[retained[t - 1, g, : 30 + t]].sum() / ubar[top(ubar, 6)].sum())
    assert row.total == pytest.approx(np.mean(lost), abs=1e-9)


FLAT = (0.5, 0.25, 0.125, 0.125), (0.125, 0.5, 0.125, 0.125, 0.125)
OTHER = (0.125, 0.125, 0.5, 0.25), (0.125, 0.125, 0.5, 0.125, 0.125)


def parts(trace, policy, h):
    (row,) = decompose(trace, [policy], budget=1, h=h)
    return [row.layer, row.lag, row.boundary, row.total]


def test_boundary_by_hand(tmp_path):
    # u = (5/16, 6/16, 2/16, 2/16) at both steps: position 1 is best. The rule sees 1/2 at position 0 first, and keeps
    # it: 1 - 5/6 lost at step 1. At step 2 its state is 3/16 there and 5/16 at position 1: nothing lost.
    trace = rows_trace(tmp_path / "t", [[FLAT[0]], [FLAT[1]]], 3)
    assert parts(trace, "ema:0.5", 1) == pytest.approx([0, 0, 1 / 12, 1 / 12])


def test_layer_by_hand(tmp_path):
    # ubar = (7/32, 8/32, 10/32, 5/32); the last layer alone trusts position 1 (1 - 8/10 lost), and with its noise
    # position 0 at step 1 (1 - 7/10 lost).
    trace = rows_trace(tmp_path / "t", [[OTHER[0], FLAT[0]], [OTHER[1], FLAT[1]]], 3)
    assert parts(trace, "single", 1) == pytest.approx([0.2, 0, 0.05, 0.25])


def test_lag_by_hand(tmp_path):
    # Without smoothing u = s. The sum still has 7/8 at position 0 in step 2, where position 1 is worth 1/2 and 0 1/8.
    trace = rows_trace(tmp_path / "t", [[(0.75, 0.125, 0.0625, 0.0625)], [FLAT[1]]], 3)
    assert parts(trace, "cumulative", 0) == pytest.approx([0, 0.375, 0, 0.375])


@pytest.mark.parametrize("kind", KINDS)
def test_no_noise_gives_boundary_zero(tmp_path, kind):
    spec = Synthetic(kind, prompt=60, steps=30, layers=3, heads=3, noise=0, drift=0.1 * (kind == "drift"))
    trace = write_synthetic(spec, tmp_path / "t")
    for row in decompose(trace, utility=spec.utilities):
        assert row.boundary == 0
        assert row.h is None
        assert row.total == pytest.approx(row.layer + row.lag, abs=1e-12)
        if "over=layer" in row.policy:
            assert row.lag == 0
        elif "over=step" in row.policy:
            assert row.layer == pytest.approx(0, abs=1e-7)
            assert row.lag >= -1e-7


def test_noise_costs_boundary_and_memory_wins_it_back(tmp_path):
    spec = Synthetic(prompt=200, steps=60, layers=2, heads=1, noise=1.0)
    trace = write_synthetic(spec, tmp_path / "t")
    rules = [f"ema:{alpha},over=step" for alpha in (0, 0.5, 0.9)]
    found = [row.boundary for row in decompose(trace, rules, utility=spec.utilities)]
    assert found[0] > 2 * found[1] > 0
    assert found[1] > found[2] > 0
    want = by_definition(trace, "ema:0.5,over=step/budget=20", 0, spec.utilities)
    (row,) = decompose(trace, ["ema:0.5,over=step"], budget=20, utility=spec.utilities)
    assert [getattr(row, part) for part in PARTS] == pytest.approx(want, abs=1e-12)


def test_a_shift_costs_lag_from_its_step_on(tmp_path):
    spec = Synthetic("shift", prompt=100, steps=40, noise=0, shift_at=21)
    trace = write_synthetic(spec, tmp_path / "t")
    (row,) = decompose(trace, ["ema:0.8,over=step"], utility=spec.utilities)
    lag = row.steps[1]
    assert lag[20] == lag.max() > 3 * lag[:20].max()
    assert lag[-1] < lag[20] / 3


def test_invariances(tmp_path):
    rng = np.random.default_rng(5)
    attention = random_attention(rng, 10, 3, 4, 24)
    trace = write_trace(tmp_path / "a", prompt=24, attention=attention)

    def found(trace, *policies):
        return [[getattr(row, part) for part in PARTS] for row in decompose(trace, policies, budget=5, h=2)]

    pairs = found(trace, "single", "ema:0", "ema:0,over=layer", "ema:0.8/group=layer", "ema:0.8,over=step/group=layer")
    assert pairs[0] == pairs[1] == pairs[2]
    assert np.allclose(pairs[3], pairs[4], atol=1e-12)
    heads = write_trace(tmp_path / "h", prompt=24, attention=attention[:, :, [2, 0, 3, 1]])
    assert np.allclose(found(trace, *RULES[:6]), found(heads, *RULES[:6]), atol=1e-12)
    layers = write_trace(tmp_path / "l", prompt=24, attention=attention[:, [2, 0, 1]])
    blind = "cumulative", "ema:0.7,over=step"
    assert np.allclose(found(trace, *blind), found(layers, *blind), atol=1e-12)
    order = [*rng.permutation(24), *range(24, 34)]
    moved = write_trace(tmp_path / "p", prompt=24, attention=attention[..., order])
    assert np.allclose(found(trace, *RULES[:6]), found(moved, *RULES[:6]), atol=1e-12)


def test_the_full_cache_loses_nothing(tmp_path):
    for row in decompose(write_trace(tmp_path / "t"), ["full"]):
        assert [getattr(row, part) for part in PARTS] == [0, 0, 0, 0]


def test_one_pass_gives_what_single_passes_give(tmp_path):
    trace = write_trace(tmp_path / "t")
    together = decompose(trace, RULES, h=(4, 8))
    apart = [row for rule in RULES for h in (4, 8) for row in decompose(trace, [rule], h=h)]
    assert together == apart


def test_an_average_wider_than_the_recording_is_the_mean_of_it(tmp_path):
    trace = write_trace(tmp_path / "t", steps=6)
    whole, wider = decompose(trace, ["ema:0.8"], h=(5, 1000))
    assert [whole.layer, whole.lag, whole.boundary] == [wider.layer, wider.lag, wider.boundary]


@pytest.mark.parametrize(
    "make",
    [
        lambda path: write_trace(path, steps=1),
        lambda path: rows_trace(path, [[[1 / (8 + t)] * (8 + t)] * 2 for t in range(4)], 7),
        lambda path: rows_trace(path, [[[0.0] * (8 + t)] * 2 for t in range(4)], 7, sink_logits=True),
        lambda path: write_trace(path, capture="scores"),
    ],
    ids=["one step", "constant scores", "all-zero rows", "head means"],
)
@pytest.mark.parametrize("budget", [1, 7, 1000])
def test_odd_recordings_give_numbers(tmp_path, make, budget):
    trace = make(tmp_path / "t")
    output = run("analyze", "alpha", "--trace", trace.path, "--budget", budget, "--json").stdout
    found = json.loads(output)["results"]
    assert len(found) == len(DEFAULT_POLICIES) * 3
    for row in found:
        assert all(math.isfinite(row[part]) and row[part] < 1 for part in PARTS)
        assert row["total"] == pytest.approx(row["layer"] + row["lag"] + row["boundary"], abs=1e-9)
        assert row["total"] >= -1e-6
        if budget == 1000:
            assert [row[part] for part in PARTS] == [0, 0, 0, 0]
    assert "nan" not in run("analyze", "alpha", "--trace", trace.path, "--budget", budget).stdout.lower()


@pytest.mark.parametrize(
    ("policy", "word"),
    [
        ("window:4", "linear rule"),
        ("rkv:4", "linear rule"),
        ("snapkv:6", "linear rule"),
        ("knorm/when=prefill", "every step"),
        ("ema:0.8/when=overflow", "every step"),
    ],
)
def test_other_rules_are_refused(tmp_path, policy, word):
    trace = write_trace(tmp_path / "t")
    with pytest.raises(PolicyError, match=word):
        decompose(trace, [policy])
    assert word in run("analyze", "alpha", "--trace", trace.path, "--policy", policy, code=2).stderr


def test_bad_input_is_an_error(tmp_path):
    trace = write_trace(tmp_path / "t")
    for h in (-1, 1.5, True, ()):
        with pytest.raises(KvsimError, match="h"):
            decompose(trace, h=h)
    with pytest.raises(KvsimError, match="shape"):
        decompose(trace, utility=lambda step: np.ones((1, 1)))
    with pytest.raises(KvsimError, match="finite"):
        decompose(trace, utility=lambda step: np.full((3, 40 + step), np.nan))
    run("analyze", "alpha", "--trace", trace.path, "--h", -3, code=2)
    run("analyze", "alpha", code=2)
    spec = Synthetic(prompt=20, steps=4)
    other = write_synthetic(spec, tmp_path / "s")
    assert "--smoothed" in run("analyze", "alpha", "--trace", trace.path, other.path, code=2).stderr
    run("analyze", "alpha", "--trace", trace.path, other.path, "--smoothed", "--policy", "ema")


def test_more_memory_than_its_limit_is_refused_and_a_smaller_h_named(tmp_path, monkeypatch):
    """12 steps of 52 positions in 3 layers: a step's scores take 1,248 bytes, a rule's states 416 each."""
    trace = write_trace(tmp_path / "t")
    monkeypatch.setattr(tradeoff, "LARGEST", 7 * 1248 + 2 * 416)
    decompose(trace, ["ema:0.8"], h=3)
    with pytest.raises(KvsimError, match="no h above 3"):
        decompose(trace, ["ema:0.8"], h=4)
    monkeypatch.setattr(tradeoff, "LARGEST", 12 * 1248 + 2 * 416)
    decompose(trace, ["ema:0.8"], h=1000)
    words = "analyze", "alpha", "--trace", trace.path, "--policy", "ema:0.8"
    monkeypatch.setattr(tradeoff, "LARGEST", 7 * 1248 + 4 * 416)
    assert "no h above 3" in run(*words, code=2).stderr
    found = json.loads(run(*words, "--h", 3, "--only-h", "--json").stdout)["results"]
    assert [row["h"] for row in found] == [3]
    run(*words, "--h", 3, "--only-h")
    monkeypatch.setattr(tradeoff, "LARGEST", 1248)
    with pytest.raises(KvsimError, match="fewer policies"):
        decompose(trace, ["ema:0.8"], h=0)


def test_the_defaults_fit_a_long_prompt(tmp_path):
    shape = SimpleNamespace(path=tmp_path, num_positions=65536 + 1024, num_steps=1024)
    tradeoff._check_memory(shape, Groups("shared", tuple(range(30)), 9, 3), len(DEFAULT_POLICIES), DEFAULT_H)


def test_intervals_and_best_alphas(tmp_path):
    traces = [write_trace(tmp_path / str(seed), seed=seed) for seed in range(4)]
    rules = [f"ema:{alpha},over=step" for alpha in (0, 0.5, 0.9)]
    rows = [row for trace in traces for row in decompose(trace, rules, h=2)]
    averaged = over_traces(rows, seed=3)
    assert averaged == over_traces(rows, seed=3) != over_traces(rows, seed=4)
    for row in averaged:
        own = [one.total for one in rows if one.policy == row["policy"]]
        assert row["total"] == pytest.approx(np.mean(own))
        assert min(own) <= row["total_low"] <= row["total"] <= row["total_high"] <= max(own)
    (best,) = best_alphas(rows)
    assert best["policy"] == "ema:alpha,over=step/budget=10%"
    assert best["lag"] == [0]
    least = min(averaged, key=lambda row: row["total"])
    assert best["total"] == [float(least["policy"].split(":")[1].split(",")[0])]
    assert over_traces(rows[:3])[0]["total_low"] is None
    with pytest.raises(KvsimError, match="same policies"):
        over_traces(rows[:4])
    with pytest.raises(KvsimError, match="twice"):
        over_traces(rows[:3] + rows[:3])
    with pytest.raises(KvsimError, match="resamples"):
        over_traces(rows, resamples=0)


def test_the_command_prints_what_python_returns(tmp_path):
    sample = SAMPLES / "smollm2-multineedle-256"
    words = ["analyze", "alpha", "--trace", sample, "--policy", "ema:0.80", "--policy", "ema:0.8", "--policy", "single"]
    found = json.loads(run(*words, "--json", "--h", 2).stdout)
    assert found["mode"] == "shadow"
    assert found["results"] == [row.summary() for row in decompose(sample, ["ema:0.8", "single"], h=(2, 4, 8, 16))]
    output = run(*words).stdout
    for word in (
        "shadow mode",
        "ema:0.8 ",
        "single ",
        "layer",
        "lag",
        "boundary",
        "total",
        "h=16",
        "compression_ratio 0.9",
    ):
        assert word in output


def test_a_best_alpha_at_the_edge_says_so(tmp_path):
    """Without drift more memory is always better, so the last alpha tried wins; 0 is no edge, there is none below."""
    assert ALPHAS[-2:] == (0.98, 0.99)
    assert at_edge([0.9], (0, 0.5, 0.9))
    assert at_edge([0.5], (0.5, 0.9))
    assert not at_edge([0], (0, 0.5, 0.9))
    assert not at_edge([0.5], (0, 0.5, 0.9))
    assert not at_edge([0.5, 0.9], (0.5, 0.9))
    noisy = write_synthetic(Synthetic("iid", 60, 24, 2, 1, noise=2.0), tmp_path / "t").path
    words = ["analyze", "alpha", "--trace", noisy, *(f"--policy=ema:{a},over=step" for a in (0, 0.6, 0.8))]
    (best,) = json.loads(run(*words, "--json").stdout)["best"]
    assert best["total"] == [0.8]
    assert best["at_edge"] == {"layer": False, "lag": False, "boundary": True, "total": True}
    output = run(*words).stdout
    assert "0.8 (edge)" in output
    assert "one beyond it may be better" in output


def test_tables_leave_out_a_budget_that_the_footer_tells(tmp_path):
    paths = [write_trace(tmp_path / name, seed=seed).path for seed, name in enumerate("ab")]
    words = ["analyze", "alpha", *paths, *(f"--policy=ema:{a}" for a in (0.3, 0.8))]
    output = run(*words).stdout
    assert "ema:alpha " in output
    assert "budget=" not in output
    assert json.loads(run(*words, "--json").stdout)["best"][0]["policy"] == "ema:alpha/budget=10%"
    own = run(*words, *(f"--policy=ema:{a}/budget=9/protect=sink:1" for a in (0.3, 0.8))).stdout
    assert "ema:alpha/budget=9/protect=sink:1" in own


def test_a_mean_has_the_digits_of_its_interval(tmp_path):
    paths = [write_trace(tmp_path / name, seed=seed).path for seed, name in enumerate("ab")]
    lines = run("analyze", "alpha", *paths, "--policy", "ema:0.8").stdout.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("ema:0.8") and "[" in line)
    assert {len(number.partition(".")[2]) for number in lines[place - 1].split()} == {3}
    assert {len(number.strip("[],").partition(".")[2]) for number in lines[place].split()[1:]} == {3}
    assert max(map(len, lines[:-1])) <= 100
