"""The learned bilinear scorer: training, its file, and scoring in both engines."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from cases import write_trace
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import kvsim
from kvsim.bilinear import BilinearScorer, load_scorer, save_scorer
from kvsim.cli import app
from kvsim.correlation import spearman, top_jaccard
from kvsim.distill import Settings, evaluate, train
from kvsim.scorers.learned import Learned
from kvsim.scoring import independent_scores

SHAPE = {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}


def random_scorer(heads=4, kv_heads=2, dim=8, rank=64, seed=0):
    rng = np.random.default_rng(seed)
    w_q, w_k = (rng.normal(size=(rank, count * dim)).astype(np.float32) for count in (heads, kv_heads))
    return BilinearScorer(w_q.astype(np.float64), w_k.astype(np.float64), heads, kv_heads, dim, {"seed": seed})


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a,b+50%.safetensors"
    save_scorer(random_scorer(), path)
    return path


def policy(file, rest="single"):
    return replace(kvsim.parse(rest), score=Learned(str(file)))


def test_parameters_at_the_shape_of_llama():
    scorer = BilinearScorer(np.zeros((64, 32 * 128)), np.zeros((64, 8 * 128)), 32, 8, 128)
    assert scorer.num_parameters == 327_680


def test_file_holds_what_was_saved(file):
    want, got = random_scorer(), load_scorer(file)
    assert np.array_equal(want.w_q, got.w_q)
    assert np.array_equal(want.w_k, got.w_k)
    assert (got.num_heads, got.num_kv_heads, got.head_dim, got.rank, got.training) == (4, 2, 8, 64, {"seed": 0})
    assert file.read_bytes()[8:9] == b"{", "safetensors, not a pickle"
    with pytest.raises(kvsim.KvsimError, match="exists already"):
        save_scorer(want, file)


def test_scores_are_the_bilinear_form(tmp_path, file):
    trace = write_trace(tmp_path / "t", capture="qk", **SHAPE)
    scorer = random_scorer()
    plan = policy(file).with_budget(kvsim.Budget(9)).plan(trace)
    for t, layer in [(1, 0), (5, 2)]:
        q = trace.queries(t)[layer].astype(np.float64).ravel()
        k = trace.keys(layer).astype(np.float64)
        want = [(scorer.w_k @ k[:, i].ravel()) @ (scorer.w_q @ q) / np.sqrt(64) for i in range(trace.num_positions)]
        found = independent_scores(plan.score, plan.groups, 0, np.arange(trace.num_positions), t)[layer]
        np.testing.assert_allclose(found, np.array(want) - min(want), rtol=1e-9, atol=1e-9)
    assert plan.score.values.strides[1] == 0, "KV heads share one copy"
    assert plan.score.values.shape == (3, 2, trace.num_positions, 64)


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize(
    "rest", ["single", "ema:0.8", "ema:0.5/group=layer/refresh=3", "cumulative/group=head", "window:3"]
)
@pytest.mark.parametrize("capture", ["heads", "qkv"])
def test_engines_agree(tmp_path, file, capture, rest, shadow):
    trace = write_trace(tmp_path / "t", capture=capture, seed=3, **SHAPE)
    want, got = (
        kvsim.replay(trace, policy(file, rest), budget=7, engine=engine, shadow=shadow, shadow_churn=False).outcome
        for engine in ("reference", "cpu")
    )
    if shadow:
        assert np.array_equal(want.retained, got.retained)
    else:
        assert np.array_equal(want.evicted_at, got.evicted_at)
    for name, column in want.metrics.items():
        np.testing.assert_allclose(got.metrics[name], column, rtol=1e-9, atol=1e-12, err_msg=name)


def test_what_does_not_fit_is_refused_by_name(tmp_path, file):
    trace = write_trace(tmp_path / "t", capture="qk", **SHAPE)

    def refused(path, message, on=trace, rest="single"):
        with pytest.raises((kvsim.PolicyError, kvsim.TraceError), match=message):
            kvsim.replay(on, policy(path, rest), budget=7)

    wide = write_trace(tmp_path / "wide", capture="qk", layers=3, heads=8, kv_heads=2, head_dim=8)
    refused(file, r"a,b\+50%.safetensors is for 4 heads \(2 KV\) of dimension 8, but .*wide has 8 heads", wide)
    refused(
        file, "has no queries; captures that have it: qk, qkv", write_trace(tmp_path / "s", capture="scores", **SHAPE)
    )
    refused(file, "when=prefill needs scores before the first step", rest="single/when=prefill")
    refused(tmp_path / "none.safetensors", "none.safetensors: no such file")
    refused(tmp_path, "cannot be read")
    with pytest.raises(kvsim.PolicyError, match="score 'learned' needs file, as in learned:FILE"):
        kvsim.parse("single/score=learned")

    data, damaged = file.read_bytes(), tmp_path / "damaged.safetensors"
    for bad in (b"", data[:100], data[:-1], b"\xff" * 64, b"PK\x03\x04" + data):
        damaged.write_bytes(bad)
        refused(damaged, r"damaged.safetensors: cannot be read .*; a scorer is a safetensors file")
    tensors = load_file(file)
    facts = {
        "kind": "kvsim bilinear scorer",
        "version": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "training": {},
    }

    def written(facts=facts, tensors=tensors):
        metadata = {} if facts is None else {"kvsim": facts if isinstance(facts, str) else json.dumps(facts)}
        save_file(tensors, damaged, metadata=metadata)
        return damaged

    for other in (None, "{", "[]", {**facts, "head_dim": "8"}, {k: v for k, v in facts.items() if k != "version"}):
        refused(written(other), "damaged.safetensors: ")
    refused(written({**facts, "version": 2}), "of version 2, not a kvsim bilinear scorer of version 1")
    refused(written({**facts, "head_dim": 16}), r"shapes \[\(64, 32\), \(64, 16\)\], its dimensions say")
    refused(written(tensors={"w_q": tensors["w_q"]}), "is not a scorer")
    refused(written(tensors={**tensors, "w_k": tensors["w_k"] * np.nan}), "not finite")


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Recordings whose attention is a sharp function of queries and keys."""
    folder = tmp_path_factory.mktemp("traces")
    return [write_trace(folder / str(seed), capture="qk", seed=seed, steps=20, prompt=30, **SHAPE) for seed in (0, 1)]


QUICK = Settings(steps=80, batch=8, learning_rate=1e-2, seed=3)


def test_training_lowers_the_loss_and_ranks_held_out_steps(recordings):
    scorer, report = train(recordings, QUICK)
    assert len(report.losses) == 80
    assert np.mean(report.losses[-20:]) < 0.8 * np.mean(report.losses[:20])
    assert [row["layer"] for row in report.layers] == [0, 1, 2]
    untrained = evaluate(random_scorer(), recordings, QUICK)
    assert report.mean("spearman") > 0.25 > abs(np.mean([row["spearman"] for row in untrained]))
    assert report.mean("top_jaccard") > np.mean([row["top_jaccard"] for row in untrained])
    assert scorer.training["traces"] == [trace.hash for trace in recordings]
    assert scorer.training["mix"] == 0.1


def test_training_follows_the_seed_and_leaves_the_random_state_of_torch_alone(recordings):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    short = Settings(steps=5, seed=1)
    one, same, other = (train(recordings, s)[0] for s in (short, short, Settings(steps=5, seed=2)))
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(one.w_q, same.w_q)
    assert np.array_equal(one.w_k, same.w_k)
    assert not np.array_equal(one.w_q, other.w_q)


def test_held_out_steps_are_not_looked_at_in_training(recordings):
    rows = []
    trained = QUICK.trained_steps(recordings[0])
    assert trained == 16
    from kvsim import distill

    class Watched(distill._Targets):
        def get(self, trace, layer, t):
            rows.append(t)
            return super().get(trace, layer, t)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "_Targets", Watched)
        train(recordings, Settings(steps=10, batch=32))
    assert set(rows) == set(range(1, trained + 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"mix": -1.0}, "mix must be at least 0"),
        ({"held_out": 1.0}, "held_out must be above 0 and below 1"),
        ({"seed": -1}, "seed must be at least 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(kvsim.KvsimError, match=message):
        Settings(**settings)


def test_recordings_that_cannot_be_trained_on(tmp_path, recordings):
    with pytest.raises(kvsim.KvsimError, match="at least one recording"):
        train([])
    with pytest.raises(kvsim.KvsimError, match="capture scores has no queries and keys; record with --capture qk"):
        train([write_trace(tmp_path / "s", capture="scores")])
    with pytest.raises(
        kvsim.KvsimError, match=r"has heads, KV heads and dimension \(2, 2, 8\), but .* has \(4, 2, 8\)"
    ):
        train([recordings[0], write_trace(tmp_path / "other", capture="qk", heads=2)])
    with pytest.raises(kvsim.KvsimError, match=r"has 1 step\(s\)"):
        train([write_trace(tmp_path / "short", capture="qk", steps=1)])


def test_what_training_needs_is_named(recordings, monkeypatch):
    with pytest.raises(kvsim.KvsimError, match="device 'nonsense' cannot be used"):
        train(recordings, QUICK, device="nonsense")
    with pytest.raises(kvsim.KvsimError, match="training diverged"):
        train(recordings, Settings(steps=30, learning_rate=1e30))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(kvsim.KvsimError, match=r"training needs torch: pip install 'kvsim\[record\]'"):
        train(recordings, QUICK)


def test_command_line(tmp_path, recordings):
    out = tmp_path / "new" / "scorer.safetensors"
    words = ["train-scorer", "--trace", str(recordings[0].path.parent / "*"), "--steps", "4", "--out", str(out)]
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["parameters"] == 64 * (4 + 2) * 8
    assert set(facts["held_out"]) == {"spearman", "top_jaccard", "layers"}
    assert facts["training"]["traces"] == [trace.hash for trace in recordings]
    assert load_scorer(out).training == facts["training"]
    assert kvsim.replay(recordings[0], f"ema:0.8/score=learned:{out}", budget=7).budget == 7
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)
    table = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "b"), "-q"])
    assert "Spearman rho" in table.stdout
    assert "3,072 parameters; loss" in table.stdout


def test_scoring_needs_no_torch(tmp_path, file):
    trace = write_trace(tmp_path / "t", capture="qk", **SHAPE)
    code = (
        "import sys, kvsim\n"
        "sys.modules['torch'] = None\n"
        f"kvsim.replay({str(trace.path)!r}, {str(policy(file))!r}, budget=5, engine='reference')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_correlations():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 31]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2, 3], [1, 2, 3, 3]) == pytest.approx(8 / 9)
    assert np.isnan(spearman([1, 1], [1, 2]))
    assert top_jaccard([1, 2, 3, 4], [4, 3, 2, 1], 2) == 0
    assert top_jaccard([0, 0, 0, 5], [0, 0, 5, 0], 2) == 1, "among equal scores the newest counts"
