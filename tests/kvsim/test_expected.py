"""Expected Attention against its definition; `test_kvpress_golden.py` compares it with kvpress."""

import numpy as np
import pytest
from cases import write_trace
from kvsim_traces import TraceWriter
from kvsim_traces.manifest import Manifest

import kvsim
from kvsim.rope import rope_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("t") / "t", capture="qkv", seed=3, prompt=30, steps=6)


def scores(trace, text):
    return kvsim.parse(f"single/score={text}/group=head").plan(trace).score.values


def test_it_is_the_mean_of_attention_to_gaussian_queries(trace):
    """Sampling queries from the Gaussian and averaging exp(q . k) gives the closed form."""
    rng = np.random.default_rng(0)
    got = scores(trace, "expected:n_future=5,n_sink=0,vnorm=false")
    prompt, layer = trace.prompt_length, 1
    kept = trace.prompt_queries()[layer].astype(np.float64)
    rope = rope_of(trace, layer)
    rotation = rope.mean_rotation(np.arange(prompt, prompt + 5), 8)
    share = np.zeros(trace.num_positions)
    for head in (0, 1):
        queries = rope.undo(kept[head], np.arange(prompt - kept.shape[1], prompt))
        mean, covariance = queries.mean(axis=0), np.cov(queries.T, bias=True)
        drawn = rng.multivariate_normal(mean, covariance, size=200_000) @ rotation.T
        weights = np.exp(drawn @ trace.keys(layer)[0].T.astype(np.float64) / np.sqrt(8)).mean(axis=0)
        share += weights / weights[:prompt].sum() / 2
    np.testing.assert_allclose(got[layer, 0], share, rtol=0.05)
    assert got[layer, 0, :prompt].sum() == pytest.approx(1)


def test_sinks_value_norms_and_epsilon(trace):
    plain = scores(trace, "expected:n_sink=2,vnorm=false")
    norms = np.stack([np.linalg.norm(trace.values(layer), axis=-1) for layer in range(3)])
    weighted = scores(trace, "expected:n_sink=2,epsilon=0.5")
    np.testing.assert_allclose(weighted[..., 2:], ((plain + 0.5) * norms)[..., 2:])
    assert (weighted[..., :2].min(axis=(1, 2)) > weighted[..., 2:].max(axis=(1, 2))).all()
    assert np.isfinite(plain).all()


def test_sinks_survive_at_every_budget_that_holds_them(trace):
    for budget in (4, 9):
        result = kvsim.replay(trace, "single/score=expected/group=head", budget=budget, shadow_churn=False)
        assert (result.evicted_at[:, :4] == -1).all()


def test_a_decode_key_far_above_the_prompt_stays_finite(tmp_path):
    trace = write_trace(tmp_path / "t", capture="qkv", steps=1)
    keys = np.stack([trace.keys(layer) for layer in range(3)])
    keys[:, :, -1] *= 1000
    manifest = Manifest.from_json(
        {**trace.manifest.to_json(), "arrays": ["queries", "keys", "values", "prompt_queries"]}
    )
    with TraceWriter(tmp_path / "far", manifest) as writer:
        values = np.stack([trace.values(layer) for layer in range(3)])
        writer.write_prompt(keys=keys[:, :, :-1], values=values[:, :, :-1], prompt_queries=trace.prompt_queries())
        writer.append(queries=trace.queries(1), keys=keys[:, :, -1], values=values[:, :, -1])
    result = kvsim.replay(kvsim.open_trace(tmp_path / "far"), "single/score=expected/group=head", budget=5)
    assert np.isfinite(result.plan.score.values.astype(np.float32)).all()
    assert (result.evicted_at[:, -1] == -1).all()


def test_refusals(tmp_path, trace):
    for text, message in [
        ("n_future=0", "1 to 1048576 positions"),
        ("n_sink=-1", "0 or more"),
        ("epsilon=-0.1", r"in \[0, 1\]"),
    ]:
        with pytest.raises(kvsim.PolicyError, match=message):
            kvsim.parse(f"single/score=expected:{text}")
    with pytest.raises(kvsim.PolicyError, match="more than n_sink=30 tokens"):
        kvsim.replay(trace, "single/score=expected:n_sink=30/group=head")
    with pytest.raises(kvsim.TraceError, match="values"):
        kvsim.replay(write_trace(tmp_path / "qk", capture="qk"), "expected")
