"""Admission in replay: what leaves the local window is promoted or gone, and exactly W positions are recent."""

import itertools
import json
import os

import numpy as np
import pytest
from cases import ADMITTING, CPU_ENGINES, named, random_attention, random_gate, write_trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvsim_traces import CaptureError, store_gates
from kvsim_traces.importer import import_npz
from naive_admission import replay as naive_replay

import kvsim
from kvsim.admissions import ADMISSIONS
from kvsim.admissions.duo import Duo
from kvsim.admissions.local import Local
from kvsim.admissions.wgkv import Wgkv
from kvsim.engines import get_engine
from kvsim.engines.stepper import Stepper
from kvsim.live.sequence import live_policy
from kvsim.retrieval_heads import load_heads
from kvsim.rope import rope_of
from kvsim.write_gate import save_gate


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("admissions") / "t", seed=41, steps=14, prompt=36)


def history(result):
    return {g: {int(i): int(t) for i, t in enumerate(row) if t >= 0} for g, row in enumerate(result.evicted_at)}


def visible(result, t, group):
    return [*result.retained(t - 1, group).tolist(), result.prompt_length + t - 1]


def rows_of(trace):
    rows = np.zeros((trace.num_steps, trace.num_layers, trace.num_heads, trace.num_positions))
    for t in range(trace.num_steps):
        rows[t, ..., : trace.prompt_length + t + 1] = trace.attention_rows(t + 1)
    return rows


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("overflow", [None, 1, 30])
@pytest.mark.parametrize(("share", "window"), [(0.6, 1), (0.5, 4), (0.9, 7), (0.0, 3), (1.0, 5), (0.4, 80)])
def test_agrees_with_an_independent_implementation(trace, engine, share, window, overflow):
    budget = 90 if window == 80 else 9
    when = "" if overflow is None else f"/when=overflow:{overflow}%"
    policy = f"ema:0.8{when}/admit=random:{share},window={window}"
    result = kvsim.replay(trace, policy, budget=budget, engine=engine)
    admitted = [set(np.flatnonzero(row).tolist()) for row in result.plan.admission.admitted]
    chance = None if overflow is None else overflow / 100
    gone, seen = naive_replay(rows_of(trace), 36, budget, admitted, window, kv_heads=2, overflow=chance)
    assert history(result) == gone
    for g, sets in seen.items():
        assert [visible(result, t, g) for t in range(1, 15)] == sets


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("window", [1, 2, 5, 36, 37, 49])
def test_a_query_sees_exactly_the_window(trace, engine, window):
    """Position p - W + 1 is seen and p - W is not: one more or one less would change the kept mass."""
    result = kvsim.replay(trace, f"full/admit=local:window={window},sink=0", engine=engine)
    rows = rows_of(trace)
    for t in range(1, 15):
        p = 36 + t - 1
        recent = list(range(max(0, p - window + 1), p + 1))
        assert all(visible(result, t, g) == recent for g in range(6))
        assert result.outcome.metrics["kept_mass"][t - 1] == pytest.approx(rows[t - 1][..., recent].sum(-1).mean())
    leaves = [max(0, i + window - 36) for i in range(trace.num_positions)]
    assert result.evicted_at[0].tolist() == [t if t <= 14 else -1 for t in leaves]


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_thresholds_at_the_ends(trace, engine):
    def gone(policy):
        return kvsim.replay(trace, named(policy, trace), budget=9, engine=engine).evicted_at

    assert (gone("full/admit=wgkv:{gate},tau=0") == -1).all()
    assert (gone("full/admit=random:1,window=1") == -1).all()
    assert (gone("full/admit=random:0,window=60") == -1).all()
    assert np.array_equal(gone("full/admit=wgkv:{gate},tau=1.01,window=6"), gone("full/admit=local:window=6,sink=0"))
    for policy in ("cumulative/protect=recent:4", "snapkv:3,heads=max/when=every/protect=recent:4"):
        assert np.array_equal(gone(f"{policy}/admit=random:1,window=4"), gone(f"{policy}/group=head"))


@pytest.mark.parametrize("engine", CPU_ENGINES)
def test_an_empty_set_has_numbers(trace, engine):
    result = kvsim.replay(trace, "tova/admit=local:window=1,sink=0", budget=1, engine=engine)
    assert all(result.retained(t, g).size == 0 for t in range(15) for g in range(6))
    summary = result.summary()
    assert summary["churn"] == 0
    assert summary["retained"] == summary["admitted"] == summary["triggers"] == summary["newest_kept"] == 0
    assert summary["attended_pairs"] == 14 * 6
    json.dumps(summary, allow_nan=False)


@pytest.mark.parametrize("policy", ADMITTING)
def test_admitting_policies_round_trip_and_stay_within_their_budgets(trace, policy):
    parsed = kvsim.parse(policy)
    assert kvsim.parse(str(parsed)) == parsed
    result = kvsim.replay(trace, named(policy, trace), budget=9)
    plan = result.plan
    window = plan.admission.window
    sizes = np.array([[result.retained(t, g).size for g in range(6)] for t in range(15)])
    for t in range(1 if plan.evicts[1] else 0, 15):
        if plan.batch:
            assert sizes[t].sum() <= plan.budgets.sum()
        elif plan.evicts[t]:
            assert (sizes[t] <= plan.budgets).all()
        for g in range(6):
            held = set(result.retained(t, g).tolist())
            assert held >= set(range(max(0, 36 + t - window + 1), 36 + t)), "the window is never evicted"
            assert all(plan.admission.admitted[g, i] for i in held if i <= 36 + t - window)


def test_every_admission_is_in_the_case_list():
    assert {kvsim.parse(policy).admit.name for policy in ADMITTING} == set(ADMISSIONS)


def test_a_pooled_trigger_bounds_the_sum(trace):
    """K.1: a head may hold more than its budget, and every head drops its share at a trigger, the window apart."""
    result = kvsim.replay(
        trace, named("cumulative/when=overflow:20%/admit=duo:{heads},window=4,sink=2", trace), budget=12
    )
    targets, budgets = result.plan.targets, result.plan.budgets
    sizes = np.array([[result.retained(t, g).size for g in range(6)] for t in range(15)])
    assert (sizes[1:].sum(axis=1) <= budgets.sum()).all()
    assert (sizes.max(axis=1) > 12).any()
    dropped = np.diff(targets, axis=1)[:, 1:] < 0
    assert dropped.any(axis=0).sum() > 0
    assert (targets[:, 1:] >= 4).all()
    alone = kvsim.replay(trace, "cumulative/when=overflow:20%/group=head/protect=recent:4", budget=12)
    assert result.triggers < alone.triggers, "what was never admitted need not be evicted"


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("head", ["ema:0.8/protect=sink:3+recent:8", "rescue:0.5,30/protect=recent:6"])
def test_a_pooled_trigger_spares_only_what_is_still_there_to_protect(trace, engine, head):
    """Sinks and recent positions that were never admitted do not stand in for others."""
    result = kvsim.replay(trace, f"{head}/when=overflow:40%/admit=random:0.4,seed=2,window=2", budget=11, engine=engine)
    plan, fell = result.plan, 0
    for g in range(6):
        guard = None
        for t in range(1, 15):
            seen, left = visible(result, t, g), plan.targets[g, t]
            if left == len(seen):
                continue
            fell, p = fell + 1, 35 + t
            free = [i for i in seen if i >= plan.n_sink[g] and i <= p - plan.n_recent[g]]
            if guard is None:
                guard = 0 if plan.rescue is None else min(len(free), int(plan.rescue[g]))
            assert left == len(seen) - min(max(1, int(0.4 * len(seen))), len(free) - guard)
    assert fell > 6


def test_summary_numbers(trace):
    result = kvsim.replay(trace, "single/admit=random:0.4,window=3", budget=9)
    sizes = [[len(visible(result, t, g)) for t in range(1, 15)] for g in range(6)]
    summary = result.summary()
    assert summary["attended_pairs"] == sum(map(sum, sizes))
    shares = [[n / (36 + t) for t, n in enumerate(row, 1)] for row in sizes]
    assert summary["cache_size"] == pytest.approx(np.mean(shares))
    assert summary["admitted"] == pytest.approx(result.plan.admission.admitted[:, :48].mean())
    assert summary["shadow_churn"] is None
    full, shared = kvsim.replay(trace, "full"), kvsim.replay(trace, "ema:0.8", budget=9)
    assert full.cache_size == 1
    assert full.attended_pairs == 6 * sum(36 + t for t in range(1, 15))
    assert full.admitted is None
    assert shared.attended_pairs == 6 * (37 + 13 * 10)
    shadow = kvsim.replay(trace, "ema:0.8", budget=9, shadow=True)
    assert shadow.attended_pairs == shared.attended_pairs
    assert kvsim.replay(trace, "full/admit=random:0.4,window=51").admitted is None


def test_the_oracle_makes_the_best_choice(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3, steps=5, prompt=6, layers=1, heads=2, kv_heads=1)
    best = kvsim.replay(trace, "full/admit=oracle:0.25,window=2", engine="reference")
    leaving = 11 - 2
    assert best.plan.admission.admitted.sum() == int(0.25 * leaving)
    rows, highest = rows_of(trace), 0.0
    for chosen in itertools.combinations(range(leaving), 2):
        mass = 0.0
        for t in range(5):
            p = 6 + t
            seen = [i for i in range(p + 1) if p - i < 2 or i in chosen]
            mass += rows[t][..., seen].sum(-1).mean()
        highest = max(highest, mass / 5)
    assert best.summary()["kept_mass"] == pytest.approx(highest)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**20), st.integers(1, 9), st.floats(0, 1))
def test_the_oracle_beats_every_gate_of_its_size(tmp_path_factory, seed, window, share):
    folder = tmp_path_factory.mktemp("t")
    trace = write_trace(folder / "t", seed=seed, steps=4, prompt=12, layers=1, heads=2, kv_heads=1)
    oracle = kvsim.replay(trace, f"full/admit=oracle:{share},window={window}", engine="reference")
    count = int(oracle.plan.admission.admitted.sum())
    sink = kvsim.replay(trace, f"full/admit=local:window={window},sink={count}", engine="reference")
    assert sink.summary()["kept_mass"] <= oracle.summary()["kept_mass"] + 1e-9


def test_gates_are_scored_from_keys_before_and_after_the_rotation(trace, tmp_path):
    gate = random_gate(3, 2, 8, window=7)
    save_gate(gate, tmp_path / "g,a+t=e.safetensors")
    admit = Wgkv(str(tmp_path / "g,a+t=e.safetensors"), tau=0.3)
    policy = kvsim.Policy(kvsim.parse("full").head, admit=admit)
    assert kvsim.parse(str(policy)) == policy
    assert "g%2Ca%2Bt%3De.safetensors,tau=0.3" in str(policy)
    plan = policy.plan(trace)
    keys = np.stack([trace.keys(layer).astype(np.float64) for layer in range(3)])
    before = np.stack([rope_of(trace, layer).undo(keys[layer], np.arange(50)) for layer in range(3)])
    scores = gate.score(before, keys).reshape(6, 50)
    assert np.array_equal(plan.admission.scores, scores)
    assert np.array_equal(plan.admission.admitted, scores >= np.float32(0.3))
    assert plan.admission.window == 7
    assert np.array_equal(kvsim.parse(str(policy)).plan(trace).admission.admitted, plan.admission.admitted)
    default = Wgkv(admit.file)
    assert np.array_equal(kvsim.Policy(policy.head, admit=default).plan(trace).admission.admitted, scores >= 0.5)
    assert kvsim.Policy(policy.head, admit=Wgkv(admit.file, window=3)).plan(trace).admission.window == 3


def test_stored_gates_of_the_same_file_are_used(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qk")
    policy = kvsim.parse(named("full/admit=wgkv:{gate}", trace))
    gate = random_gate(3, 2, 8)
    stored = np.random.default_rng(1).random((3, 2, 52)).astype(np.float32)
    computed = policy.plan(trace).admission.scores
    for digest, scores in (("f" * 64, computed), (gate.hash, stored.reshape(6, 52))):
        again = store_gates(trace.path, lambda _: stored, name="g", digest=digest)
        assert np.array_equal(policy.plan(again).admission.scores, scores)


def test_a_gate_that_does_not_fit_is_an_error_that_names_the_file(trace, tmp_path):
    for name, shape, message in (
        ("heads", (3, 1, 8), "is for 1 KV heads of dimension 8, but .* has 2 of dimension 8"),
        ("dim", (3, 2, 4), "is for 2 KV heads of dimension 4"),
        ("layers", (2, 2, 8), r"has no gate for layer 2 of .*\(layers: \[0, 1\]\)"),
    ):
        save_gate(random_gate(*shape), tmp_path / name)
        with pytest.raises(kvsim.PolicyError, match=f"{tmp_path / name}: {message}"):
            kvsim.replay(trace, f"full/admit=wgkv:{tmp_path / name}")
    with pytest.raises(kvsim.PolicyError, match=r"nothing\.safetensors: no such file"):
        kvsim.replay(trace, "full/admit=wgkv:nothing.safetensors")


def test_a_recording_without_keys_says_what_it_lacks(tmp_path):
    attention = random_attention(np.random.default_rng(0), 3, 1, 2, 9)
    np.savez(tmp_path / "a.npz", attention=attention, prompt_length=9)
    bare = import_npz(tmp_path / "a.npz", tmp_path / "t")
    save_gate(random_gate(1, 2, 8), tmp_path / "g")
    assert kvsim.replay(bare, "full/admit=random:0.5,window=2").cache_size < 1
    with pytest.raises(CaptureError, match="capture heads has no keys"):
        kvsim.replay(bare, f"full/admit=wgkv:{tmp_path / 'g'}")


def test_duo_admits_everything_in_retrieval_heads(trace, tmp_path):
    scores = np.array([[0.9, 0.1], [0.5, 0.4], [0.2, 0.8]])
    facts = {"model": "m", "num_layers": 3, "num_kv_heads": 2}
    for name, found in (
        ("scores", {"scores": scores.tolist(), "threshold": 0.5, "steps": 7}),
        ("list", {"retrieval": [[0, 0], [1, 0], [2, 1]], "window": 7, "sink": 0}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(facts | found))
    held = load_heads(tmp_path / "scores.json")
    assert (held.model, held.threshold, held.scores.tolist()) == ("m", 0.5, scores.tolist())
    for name in ("scores", "list"):
        result = kvsim.replay(trace, f"full/admit=duo:{tmp_path / name}.json,window=5,sink=3")
        for g, retrieves in enumerate([1, 0, 1, 0, 0, 1]):
            assert (result.evicted_at[g] == -1).all() == retrieves
            if not retrieves:
                assert visible(result, 14, g) == [0, 1, 2, *range(45, 50)]
    marks = kvsim.parse(f"full/admit=duo:{tmp_path}/scores.json,window=5,sink=0,share=0.34").plan(trace).admission
    assert np.flatnonzero(marks.admitted.all(axis=1)).tolist() == [0, 5]
    with pytest.raises(kvsim.PolicyError, match="share of 'duo' needs scores"):
        kvsim.replay(trace, f"full/admit=duo:{tmp_path}/list.json,share=0.5")
    kept = kvsim.replay(trace, f"full/admit=duo:{tmp_path}/list.json")
    assert visible(kept, 14, 1) == list(range(43, 50)), "the file's window and sink"
    assert kvsim.parse(f"full/admit=duo:{tmp_path}/scores.json").plan(trace).admission.window == 256


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"num_layers": 0}, "'num_layers' must be a whole number of at least 1, got 0"),
        ({"num_kv_heads": True}, "'num_kv_heads' must be a whole number of at least 1, got True"),
        ({"num_layers": 10**6, "num_kv_heads": 10**6, "retrieval": []}, "1000000 KV heads are more than 1000000 heads"),
        ({"window": 10**9}, "'window' must be a whole number of at most 1000000, got 1000000000"),
        ('{"model": "m", "retrieval": [[0, 0]], "retrieval": []}', r"is not JSON \('retrieval' is given twice\)"),
        (" " * (2**24 + 1), "heads.json: has 16777217 bytes, retrieval heads at most 16777216"),
        ({"window": 0}, "'window' must be a whole number of at least 1, got 0"),
        ({"model": 7}, "'model' must be the model's name"),
        ({"retrieval": None}, r"'retrieval' must list \[layer, KV head\] below \[3, 2\], got None"),
        ({"retrieval": [[3, 0]]}, r"got \[3, 0\]"),
        ({"retrieval": [[0, 0, 0]]}, r"got \[0, 0, 0\]"),
        ({"scores": [[1, 1]] * 3}, "'threshold' must be a finite number, got None"),
        ({"scores": [[1, 1]] * 2, "threshold": 0.5}, "'scores' must be 3 lists of 2 finite numbers"),
        ({"scores": [[1, float("nan")]] * 3, "threshold": 0.5}, "'scores' must be 3 lists of 2 finite numbers"),
        ({}, "must have either 'retrieval' or 'scores'"),
        ({"num_layers": 4, "retrieval": []}, "is for 4 layers of 2 KV heads, but .* has 3 of 2"),
    ],
)
def test_a_bad_file_of_heads_is_an_error_that_names_it(trace, tmp_path, data, message):
    path = tmp_path / "heads.json"
    known = {"model": "m", "num_layers": 3, "num_kv_heads": 2}
    path.write_text(data if isinstance(data, str) else json.dumps(known | data))
    with pytest.raises(kvsim.PolicyError, match=f"{path}: .*{message}"):
        kvsim.replay(trace, f"full/admit=duo:{path}")


@pytest.mark.parametrize("kind", ["duo", "wgkv"])
def test_a_file_that_is_none_is_an_error_and_no_wait(trace, tmp_path, kind):
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (tmp_path / "pipe", "is not a regular file"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "none", "no such file"),
        ("\0", "cannot be read .*null"),
    ):
        with pytest.raises(kvsim.PolicyError, match=message):
            kvsim.replay(trace, f"full/admit={kind}:{path}")


@pytest.mark.filterwarnings("error")
def test_a_threshold_beyond_float32_admits_nothing(trace):
    nothing = kvsim.replay(trace, named("full/admit=wgkv:{gate},tau=1e300", trace))
    assert nothing.admitted == 0


def test_random_extends_and_follows_its_seed(trace, tmp_path):
    longer = write_trace(tmp_path / "t", seed=41, steps=20, prompt=40)
    one, more, other = (
        kvsim.parse(f"full/admit=random:0.3,seed={seed}").plan(on).admission.admitted
        for seed, on in ((1, trace), (1, longer), (2, trace))
    )
    assert np.array_equal(more[:, :50], one)
    assert not np.array_equal(one, other)
    assert one.mean() == pytest.approx(0.3, abs=0.1)
    assert len({row.tobytes() for row in one}) == 6, "heads draw apart"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ema:0.8/group=layer/admit=local", "admit= decides for each KV head and implies group=head, got group=layer"),
        ("ema:0.8/group=shared/admit=local", "got group=shared"),
        ("full/admit=locl", "unknown admit 'locl'; did you mean 'local'"),
        ("full/admit=local:window=0", "window of 'local' must be at least 1 token"),
        ("full/admit=local:sink=-1", "sink of 'local' must be 0 or more"),
        ("full/admit=random:1.5", r"share of 'random' must be in \[0, 1\], got 1.5"),
        ("full/admit=random", "needs share"),
        ("full/admit=random:0.5,seed=-1", "seed of 'random' must be 0 or more"),
        ("full/admit=oracle:-0.1", r"share of 'oracle' must be in \[0, 1\]"),
        ("full/admit=wgkv:g,tau=-1", "tau of 'wgkv' must be 0 or more"),
        ("full/admit=wgkv:g,window=0", "window of 'wgkv' must be at least 1"),
        ("full/admit=duo:g,share=2", r"share of 'duo' must be in \[0, 1\]"),
        ("full/admit=duo:g,sink=-2", "sink of 'duo' must be 0 or more"),
    ],
)
def test_malformed_admissions(text, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.parse(text)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("full/admit=local:window=256,sink=128", "full/admit=local"),
        ("ema:0.8/group=head/admit=local", "ema:0.8/admit=local"),
        ("snapkv:16/group=head/admit=local:sink=4", "snapkv:16/admit=local:sink=4"),
        ("full/admit=random:0.250,seed=0", "full/admit=random:0.25"),
        ("full/admit=wgkv:a/b%3Dc/g.safetensors,tau=0.10", "full/admit=wgkv:a/b%3Dc/g.safetensors,tau=0.1"),
        ("full/select=quest:64/admit=duo:x.json", "full/admit=duo:x.json/select=quest:64"),
    ],
)
def test_canonical_form(text, canonical):
    parsed = kvsim.parse(text)
    assert str(parsed) == canonical
    assert kvsim.parse(canonical) == parsed


def test_presets_of_layers_admit_by_head(trace):
    policy = kvsim.parse("tova/admit=local:window=2,sink=30")
    assert str(policy.expand()) == "single/admit=local:window=2,sink=30"
    assert policy.with_budget(kvsim.Budget(9)).plan(trace).groups.kind == "head"


def test_what_cannot_be(trace, tmp_path):
    with pytest.raises(kvsim.PolicyError, match=r"9 tokens \(layer 0 head 0\) does not hold 10 recent ones"):
        kvsim.replay(trace, "ema:0.8/admit=local:window=10", budget=9)
    with pytest.raises(kvsim.PolicyError, match="does not hold 8 recent ones and 2 protected at the start"):
        kvsim.replay(trace, "ema:0.8/protect=sink:2/admit=local:window=8", budget=9)
    assert kvsim.replay(trace, "ema:0.8/admit=local:window=9", budget=9).cache_size < 1
    with pytest.raises(kvsim.PolicyError, match=r"shadow mode ranks all positions .* leave admit= out"):
        kvsim.replay(trace, "full/admit=local:window=4", shadow=True)
    plan = kvsim.parse("full/admit=local:window=4").plan(trace)
    with pytest.raises(kvsim.PolicyError, match="shadow"):
        get_engine("reference")(trace, [plan], shadow=True)
    with pytest.raises(kvsim.PolicyError, match="shadow"):
        Stepper(plan, 36, 50, shadow=True)
    with pytest.raises(kvsim.PolicyError, match="it does not take admit=local"):
        kvsim.replay(trace, "oracle:future/admit=local:window=4")
    pooled = kvsim.replay(trace, "cumulative/when=overflow/admit=random:0.5,window=4", budget=9)
    with pytest.raises(kvsim.KvsimError, match="a trigger pooled over all heads lets one of them exceed its budget"):
        kvsim.oracle.gap(pooled, trace)
    assert kvsim.oracle.gap(kvsim.replay(trace, "cumulative/admit=random:0.5,window=4", budget=9), trace) > 0
    scores = write_trace(tmp_path / "s", capture="scores")
    with pytest.raises(kvsim.PolicyError, match=r"admit= needs attention of single heads.*; leave admit= out, or"):
        kvsim.replay(scores, "full/admit=local")
    with pytest.raises(kvsim.PolicyError, match="admit must be an admission"):
        kvsim.Policy(kvsim.parse("full").head, admit="local")
    for admit in (Local(), Duo("x")):
        assert not kvsim.Policy(kvsim.parse("tova").head, admit=admit).needs_future
    with pytest.raises(kvsim.PolicyError, match="reads what later queries attend to"):
        live_policy(kvsim.parse("full/admit=oracle:0.5"))
