"""Faults that users reported of other toolkits, each held against kvsim."""

import numpy as np
import pytest
from cases import CPU_ENGINES, random_attention, write_trace

import kvsim

each_engine = pytest.mark.parametrize("engine", CPU_ENGINES)


def replay(trace, policy, engine, **options):
    return kvsim.replay(trace, policy, engine=engine, shadow_churn=False, **options)


@each_engine
def test_survivors_out_of_order_do_not_mislead_positional_scores(tmp_path, engine):
    """After holes appear in the cache, recency still means the position, not the row of the cache."""
    trace = write_trace(tmp_path / "t", steps=20, prompt=40)
    result = replay(trace, "streaming:4", engine, budget=10)
    for t in range(1, 21):
        newest = 40 + t
        assert result.retained(t).tolist() == [0, 1, 2, 3, *range(newest - 6, newest)]


@each_engine
def test_equal_scores_never_evict_the_protected_window(tmp_path, engine):
    rows = np.zeros((10, 1, 1, 30), np.float32)
    for t in range(10):
        rows[t, ..., : 21 + t] = 1 / (21 + t)
    trace = write_trace(tmp_path / "t", attention=rows, prompt=20, kv_heads=1)
    result = replay(trace, "cumulative/protect=sink:3+recent:4", engine, budget=7)
    for t in range(1, 11):
        assert result.retained(t).tolist() == [0, 1, 2, *range(16 + t, 20 + t)]


def test_key_norms_do_not_tie(tmp_path):
    """Norms taken in bfloat16 tie most scores; here they are taken in float64 of the recorded keys."""
    trace = write_trace(tmp_path / "t", capture="qk", prompt=300, head_dim=64, layers=1)
    keys = trace.keys(0)[0]
    bits = np.linalg.norm(keys, axis=-1).astype(np.float32).view(np.uint32)
    in_bfloat16 = ((bits + 0x8000) >> 16).astype(np.uint16)
    assert np.unique(in_bfloat16).size < 0.5 * in_bfloat16.size
    assert kvsim.replay(trace, "knorm").summary()["ties"] == 0


@each_engine
@pytest.mark.parametrize("prompt", [1, 3, 9])
def test_a_floored_budget_is_never_zero(tmp_path, prompt, engine):
    trace = write_trace(tmp_path / "t", prompt=prompt, steps=3)
    result = replay(trace, "ema:0.8", engine, compression_ratio=0.95)
    assert result.budget == 1
    assert [result.retained(t).size for t in range(1, 4)] == [1, 1, 1]


@each_engine
@pytest.mark.parametrize("group", ["shared", "layer", "head"])
def test_the_cache_does_not_grow_past_its_budget_while_decoding(tmp_path, group, engine):
    trace = write_trace(tmp_path / "t", steps=30, prompt=20)
    result = replay(trace, f"ema:0.8/refresh=first/group={group}", engine, budget=8)
    assert result.steps["retained"].to_list() == [8.0] * 30


def test_every_recording_is_compressed_not_only_the_first(tmp_path):
    for seed in range(3):
        result = kvsim.replay(write_trace(tmp_path / str(seed), seed=seed), "ema:0.8", budget=5)
        assert result.steps["retained"].to_list() == [5.0] * 12


@each_engine
def test_cumulative_scores_freeze_the_cache_and_the_result_says_so(tmp_path, engine):
    """`newest_kept` is the share of generated tokens ever kept; `newest_wronged` the age bias behind it."""
    trace = write_trace(tmp_path / "t", steps=40, prompt=40, seed=5)
    frozen, fresh = (replay(trace, p, engine, budget=6).summary() for p in ("cumulative", "single"))
    assert frozen["newest_kept"] < 0.15 < fresh["newest_kept"]
    kept = replay(trace, "cumulative", engine, budget=6).evicted_at[0, 40:] != np.arange(1, 41)
    assert frozen["newest_kept"] == pytest.approx(kept.mean())


@each_engine
def test_age_bias_counts_newcomers_that_deserved_their_place(tmp_path, engine):
    """A newcomer with the step's second highest score loses to survivors whose sums it cannot have."""
    rows = np.zeros((3, 1, 1, 9), np.float32)
    for t in range(3):
        rows[t, 0, 0, : 7 + t] = 0.1 / (5 + t)
        rows[t, 0, 0, 0] = 0.5
        rows[t, 0, 0, 6 + t] = 0.4
    trace = write_trace(tmp_path / "t", attention=rows, prompt=6, kv_heads=1)
    biased = replay(trace, "cumulative:start=prompt", engine, budget=2).steps
    assert biased["newest_wronged"].to_list() == [1.0, 1.0, 1.0]
    assert replay(trace, "single", engine, budget=2).steps["newest_wronged"].to_list() == [0.0, 0.0, 0.0]


def test_ratios_are_printed_with_their_denominators(tmp_path):
    trace = write_trace(tmp_path / "t", steps=12, prompt=40)
    summary = kvsim.replay(trace, "ema:0.8", compression_ratio=0.75).summary()
    assert summary["budget"] == 10
    assert summary["removed_of_seen"] == pytest.approx((52 - 10) / 52)
    assert summary["budget_of_mean_length"] == pytest.approx(10 / 46.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("group", ["shared", "layer", "head"])
def test_bytes_are_per_kv_head_whatever_the_number_of_query_heads(tmp_path, heads, kv_heads, group):
    trace = write_trace(tmp_path / "t", heads=heads, kv_heads=kv_heads, layers=3, head_dim=8)
    summary = kvsim.replay(trace, f"ema:0.8/group={group}", budget=5).summary()
    assert summary["kv_bytes"] == 5 * 3 * kv_heads * 8 * 2 * 2


@each_engine
def test_positions_stay_those_of_the_uncompressed_sequence(tmp_path, engine):
    """Evict in step 1, then again: what is named is the position, not an index into what was left."""
    rows = random_attention(np.random.default_rng(3), 15, 2, 2, 25)
    trace = write_trace(tmp_path / "t", attention=rows, prompt=25, kv_heads=1)
    result = replay(trace, "single", engine, budget=4)
    for t in range(1, 16):
        visible = np.append(result.retained(t - 1), 24 + t)
        a = rows[t - 1][:, :, visible].astype(np.float64)
        score = (a / a.sum(-1, keepdims=True)).mean(axis=1)[-1]
        best = visible[np.argsort(score.astype(np.float32), kind="stable")[-4:]]
        assert result.retained(t).tolist() == sorted(best.tolist())


@pytest.mark.parametrize("engine", sorted(kvsim.engines.ENGINES))
def test_shares_of_an_overflow_are_exact(tmp_path, engine):
    # 0.29 * 100 is 28.999999999999996 in binary.
    trace = write_trace(tmp_path / "t", prompt=99, steps=1)
    result = kvsim.replay(trace, "ema:0.8/when=overflow:29%", budget=99, engine=engine, shadow_churn=False)
    assert result.retained(1).size == 71


def test_overflow_eviction_counts_its_triggers(tmp_path):
    """WG-KV K.1: down by a tenth whenever the budget is exceeded."""
    trace = write_trace(tmp_path / "t", steps=30, prompt=40)
    result = kvsim.replay(trace, "ema:0.8/when=overflow/group=head", budget=40)
    sizes = result.steps["retained"].to_list()
    assert max(sizes) <= 40
    # 41 -> 37 at step 1, then four free places: a trigger every fourth step.
    assert sizes[:6] == [37.0, 38.0, 39.0, 40.0, 37.0, 38.0]
    assert result.triggers == 8
