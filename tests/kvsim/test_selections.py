"""Selection in replay: S_t within V_t takes its place in every metric, and leaves the retained sets alone."""

import numpy as np
import pytest
from cases import CPU_ENGINES, SELECTING, write_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_admission import quest as naive_quest
from naive_admission import topk as naive_topk

import kvsim
from kvsim.engines.output import output_error_of_step
from kvsim.plan import Groups, Selection
from kvsim.selecting import page_bounds, quest_marks, topk_marks
from kvsim.selections import SELECTIONS


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("selections") / "t", capture="qkv", seed=51, steps=8, prompt=70)


def unselected(policy):
    return policy.partition("/select=")[0]


@pytest.mark.parametrize("engine", CPU_ENGINES)
@pytest.mark.parametrize("policy", SELECTING)
def test_metrics_are_those_of_an_independent_selection(trace, policy, engine):
    result = kvsim.replay(trace, policy, budget=40, engine=engine)
    plain = kvsim.replay(trace, unselected(policy), budget=40, engine=engine)
    assert np.array_equal(result.evicted_at, plain.evicted_at), "what is retained stays as it is"
    selection, groups = result.plan.selection, result.plan.groups
    window = result.plan.admission.window if result.plan.admission else 0
    keys = [trace.keys(layer) for layer in range(3)]
    values = np.stack([trace.values(layer) for layer in range(3)]).astype(np.float64)
    read = 0
    for t in range(1, 9):
        n = 70 + t
        rows, queries = trace.attention_rows(t).astype(np.float64), trace.queries(t)
        marks = np.zeros((3, 2, n), dtype=bool)
        for layer in range(3):
            for kv in range(2):
                group = groups.of_layer(layer)[kv]
                seen = [*result.retained(t - 1, group).tolist(), n - 1]
                own = slice(2 * kv, 2 * kv + 2)
                if selection.kind == "quest":
                    found = naive_quest(keys[layer][kv], queries[layer, own], seen, selection.tokens, window)
                else:
                    found = naive_topk(rows[layer, own].mean(axis=0), seen, selection.tokens)
                assert len(found) <= selection.tokens
                marks[layer, kv, found] = True
                read += len(found)
        mass = (rows * np.repeat(marks, 2, axis=1)).sum(-1).mean()
        assert result.outcome.metrics["kept_mass"][t - 1] == pytest.approx(mass, rel=1e-9)
        error = output_error_of_step(rows, values[:, :, :n], marks.reshape(6, n), by_head(result.plan))
        assert result.outcome.metrics["output_error"][t - 1] == pytest.approx(error, rel=1e-9)
    assert result.attended_pairs == read <= plain.attended_pairs
    assert result.cache_size == plain.cache_size
    assert result.shadow_churn == plain.shadow_churn
    for name in set(result.outcome.metrics) - {"kept_mass", "output_error"}:
        assert np.array_equal(result.outcome.metrics[name], plain.outcome.metrics[name], equal_nan=True), name


def by_head(plan):
    groups = plan.groups
    return type(plan)(**{**vars(plan), "groups": Groups("head", groups.layers, groups.num_heads, groups.num_kv_heads)})


def test_every_selection_is_in_the_case_list():
    assert {kvsim.parse(policy).select.name for policy in SELECTING} == set(SELECTIONS)
    for policy in SELECTING:
        assert kvsim.parse(str(kvsim.parse(policy))) == kvsim.parse(policy)


drawn = st.integers(0, 2**20).map(np.random.default_rng)


@settings(max_examples=60, deadline=None)
@given(drawn, st.integers(1, 90), st.integers(1, 3), st.integers(1, 3))
def test_a_bound_is_at_least_every_logit_of_its_page(rng, n, heads, share):
    keys = rng.normal(size=(heads, n, 4)).astype(np.float32)
    queries = rng.normal(size=(heads, share, 4)).astype(np.float32)
    paged = rng.random((heads, n)) < 0.7
    bounds, head, page = page_bounds(keys, queries, paged, 16)
    logits = np.einsum("hnd,hsd->hsn", keys.astype(float), queries.astype(float)).max(axis=1)
    assert (bounds[page] >= logits[paged] - 1e-9).all()
    assert np.bincount(page, minlength=head.size).max(initial=0) <= 16
    assert [(page[np.nonzero(paged)[0] == h].size + 15) // 16 for h in range(heads)] == np.bincount(
        head, minlength=heads
    ).tolist()


@settings(max_examples=60, deadline=None)
@given(drawn, st.integers(20, 90), st.integers(1, 4), st.sampled_from([0, 1, 5, 16, 200]))
def test_topk_reads_no_less_mass_than_quest(rng, n, pages, window):
    keys, queries = (rng.normal(size=shape).astype(np.float32) for shape in ((2, n, 4), (2, 3, 4)))
    visible = rng.random((2, n)) < 0.6
    visible[:, n - max(1, min(window, n)) :] = True
    means = rng.random((2, n))
    tokens = 16 * pages + (window if window < 200 else 208)
    marks = quest_marks(keys, queries, visible, Selection("quest", tokens), window)
    best = topk_marks(means, visible, tokens)
    assert (marks <= visible).all()
    assert (best <= visible).all()
    assert (marks.sum(axis=1) <= tokens).all()
    assert marks[:, n - max(1, min(window, n)) :].all(), "the newest page or the window is always read"
    assert np.array_equal(best.sum(axis=1), np.minimum(tokens, visible.sum(axis=1)))
    assert ((means * best).sum(axis=1) >= (means * marks).sum(axis=1) - 1e-9).all()


def test_enough_tokens_are_no_selection(trace):
    for select in ("topk:78", "quest:80", "topk:999", "quest:1600"):
        result, plain = (kvsim.replay(trace, policy, budget=30) for policy in (f"ema:0.8/select={select}", "ema:0.8"))
        assert result.attended_pairs == plain.attended_pairs
        np.testing.assert_allclose(result.outcome.metrics["kept_mass"], plain.outcome.metrics["kept_mass"], rtol=1e-9)
        np.testing.assert_allclose(
            result.outcome.metrics["output_error"], plain.outcome.metrics["output_error"], rtol=1e-7, atol=1e-12
        )


def test_shadow_sets_are_selected_from_as_well(trace):
    plain, few = (kvsim.replay(trace, p, budget=20, shadow=True) for p in ("ema:0.8", "ema:0.8/select=topk:5"))
    assert np.array_equal(plain.outcome.retained, few.outcome.retained)
    assert few.attended_pairs == 8 * 6 * 5
    rows = trace.attention_rows(3).astype(np.float64)
    seen = [*plain.retained(2).tolist(), 72]
    heads = rows.reshape(6, 2, -1).mean(axis=1)[:, seen]
    top = np.sort(heads, axis=1)[:, -5:].sum(axis=1)
    assert few.outcome.metrics["kept_mass"][2] == pytest.approx(np.mean(top))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("full/select=quest:8", "tokens of 'quest' must be whole pages of 16, at least one, got 8"),
        ("full/select=quest:40", "whole pages of 16"),
        ("full/select=topk:0", "tokens of 'topk' must be at least 1"),
        ("full/select=topk", "needs tokens, as in topk:TOKENS"),
        ("full/select=quets:16", "unknown select 'quets'; did you mean 'quest'"),
    ],
)
def test_malformed_selections(text, message):
    with pytest.raises(kvsim.PolicyError, match=message):
        kvsim.parse(text)


def test_what_cannot_be(trace, tmp_path):
    with pytest.raises(kvsim.PolicyError, match="quest reads 16 tokens, fewer than the local window of 20"):
        kvsim.replay(trace, "full/admit=local:window=20/select=quest:16")
    with pytest.raises(kvsim.KvsimError, match="its kept mass is that of what select= reads"):
        kvsim.oracle.gap(kvsim.replay(trace, "ema:0.8/select=topk:5"), trace)
    scores = write_trace(tmp_path / "s", capture="scores")
    with pytest.raises(kvsim.PolicyError, match="select= needs attention of single heads"):
        kvsim.replay(scores, "ema:0.8/select=topk:5")
    with pytest.raises(kvsim.PolicyError, match="select must be a selection"):
        kvsim.Policy(kvsim.parse("full").head, select=4)
