"""The Numba engine's own parts: float16 in registers, selection, many policies at once, the file of rows."""

import json
import os
import shutil

import google_crc32c
import numba
import numpy as np
import pytest
from cases import ADMITTING, NEEDS_HEADS, NEEDS_KEYS, POLICIES, write_trace
from hypothesis import given
from hypothesis import strategies as st

import kvsim
from kvsim.engines import cpu
from kvsim.engines.cpu import rows as rows_module
from kvsim.engines.cpu.half import LANES, accumulate, dot, load
from kvsim.engines.cpu.select import drop_lowest, kth_smallest


@numba.njit
def widen(bits, out):
    for i in range(bits.size):
        out[i] = load(bits, i)


def test_every_float16_is_read_exactly():
    bits = np.arange(2**16, dtype=np.uint16)
    out = np.empty(bits.size, np.float32)
    widen(bits, out)
    assert np.array_equal(out, bits.view(np.float16).astype(np.float32), equal_nan=True)


@numba.njit
def dot_and_sum(data, weights, sums):
    accumulate(data, 3, sums, 1)
    return dot(data, 3, weights, 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_vector_products(dtype):
    rng = np.random.default_rng(0)
    x = rng.random(3 + LANES).astype(dtype)
    weights, sums = rng.random(2 + LANES).astype(np.float32), np.ones(1 + LANES, np.float32)
    data = x.view(np.uint16) if dtype == np.float16 else x
    wide = x[3:].astype(np.float64)
    assert dot_and_sum(data, weights, sums) == pytest.approx(wide @ weights[2:].astype(np.float64), rel=1e-6)
    np.testing.assert_allclose(sums[1:], 1 + wide, rtol=1e-6)
    assert sums[0] == 1


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=60), st.data())
def test_quickselect(values, data):
    k = data.draw(st.integers(0, len(values) - 1))
    assert kth_smallest(np.array(values, np.float32), k) == np.float32(sorted(values)[k])


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_drop_lowest_follows_the_order_of_eviction(values, budget, n_sink, n_recent):
    n = len(values)
    pos = np.arange(n) * 2
    work = np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.bool_)
    gone, _ = drop_lowest(np.array(values), pos, n, max(budget, n_sink + n_recent), n_sink, n_recent, *work)
    guarded = (pos < n_sink) | (pos > pos[-1] - n_recent)
    order = sorted((j for j in range(n) if not guarded[j]), key=lambda j: (values[j], pos[j]))
    expected = order[: max(0, n - max(budget, n_sink + n_recent))]
    assert np.flatnonzero(work[2]).tolist() == sorted(expected)
    assert gone == len(expected)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return {
        "heads": write_trace(folder / "heads", seed=21, steps=40, prompt=60, layers=7, heads=6),
        "scores": write_trace(folder / "scores", seed=22, capture="scores", steps=40, prompt=60, layers=7),
        "qkv": write_trace(folder / "qkv", seed=23, capture="qkv", steps=20, prompt=60),
    }


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("kind", ["heads", "scores", "qkv"])
def test_many_policies_in_one_pass_equal_each_alone(traces, kind, mode):
    trace = traces[kind]
    texts = [p for p in POLICIES if kind != "scores" or p not in NEEDS_HEADS + NEEDS_KEYS]
    if kind != "scores":
        # What each selects is worked out after the engine.
        texts += [p for p in ADMITTING if "{" not in p]
    texts += [f"ema:{alpha}/budget={budget}" for alpha in (0.1, 0.7, 0.97) for budget in (8, 20, 200)]
    plans = [kvsim.parse(p).with_budget(kvsim.Budget(9)).plan(trace) for p in texts]
    together = cpu.run_many(trace, plans, mode=mode)
    for text, plan, got in zip(texts, plans, together, strict=True):
        want = kvsim.replay(trace, text, budget=9, engine="reference", shadow_churn=False).outcome
        assert np.array_equal(want.evicted_at, got.evicted_at), text
        alone = cpu.run(trace, plan, mode=mode)
        assert np.array_equal(alone.evicted_at, got.evicted_at), text
        for name, column in want.metrics.items():
            np.testing.assert_allclose(got.metrics[name], column, rtol=1e-5, atol=1e-7, err_msg=f"{text} {name}")


def test_rows_with_valid_checksums_but_other_numbers_are_built_again(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "IN_MEMORY", 0)
    monkeypatch.setattr(rows_module, "_STORE", rows_module._Store(0))
    trace = write_trace(tmp_path / "t", capture="scores")
    want = kvsim.replay(trace, "ema:0.8", engine="reference").evicted_at
    assert np.array_equal(kvsim.replay(trace, "ema:0.8").evicted_at, want)
    beside = tmp_path / "t.tokens"
    data = np.fromfile(beside / "rows", np.uint16)
    facts = json.loads((beside / "rows.json").read_text())
    block = (40 + facts["steps"]) * facts["steps"] * facts["width"]
    data[:block] = 0
    payload = data.tobytes()
    facts["crc32c"][0] = google_crc32c.value(payload[: block * 2])
    (beside / "rows").write_bytes(payload)
    (beside / "rows.json").write_text(json.dumps(facts))
    monkeypatch.setattr(rows_module, "_STORE", rows_module._Store(0))
    assert np.array_equal(kvsim.replay(kvsim.open_trace(trace.path), "ema:0.8").evicted_at, want)


@pytest.mark.parametrize("kind", ["directory", "link", "file"])
def test_what_kvsim_did_not_make_is_not_replaced(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(rows_module, "IN_MEMORY", 0)
    monkeypatch.setattr(rows_module, "_STORE", rows_module._Store(0))
    trace = write_trace(tmp_path / "t", capture="scores")
    (tmp_path / "elsewhere").mkdir()
    beside = tmp_path / "t.tokens"
    if kind == "directory":
        beside.mkdir()
        (beside / "notes.txt").write_text("mine")
    elif kind == "link":
        beside.symlink_to(tmp_path / "elsewhere")
    else:
        beside.write_text("mine")
    want = kvsim.replay(trace, "ema:0.8", engine="reference").evicted_at
    assert np.array_equal(kvsim.replay(trace, "ema:0.8").evicted_at, want)
    assert not list((tmp_path / "elsewhere").iterdir())
    if kind != "link":
        assert (beside / "notes.txt" if kind == "directory" else beside).read_text() == "mine"


def test_rows_too_large_for_memory_go_to_a_checked_file_beside_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(rows_module, "IN_MEMORY", 0)
    trace = write_trace(tmp_path / "t", capture="scores")
    want = kvsim.replay(trace, "ema:0.8", engine="reference").evicted_at

    def replay():
        monkeypatch.setattr(rows_module, "_STORE", rows_module._Store(0))
        return kvsim.replay(kvsim.open_trace(trace.path), "ema:0.8", engine="cpu").evicted_at

    assert np.array_equal(replay(), want)
    beside = tmp_path / "t.tokens"
    written = (beside / "rows").stat().st_mtime_ns
    assert np.array_equal(replay(), want)
    assert (beside / "rows").stat().st_mtime_ns == written, "an intact file is used again"

    data = bytearray((beside / "rows").read_bytes())
    data[1000] ^= 1
    (beside / "rows").write_bytes(data)
    assert np.array_equal(replay(), want), "a damaged file is built again"
    facts = json.loads((beside / "rows.json").read_text())
    for bad in ({**facts, "hash": "of another trace"}, {**facts, "crc32c": 5}, {**facts, "crc32c": None}, []):
        (beside / "rows.json").write_text(json.dumps(bad))
        assert np.array_equal(replay(), want)
    for text in ("{", "[" * 10**5):
        (beside / "rows.json").write_text(text)
        assert np.array_equal(replay(), want)
    (beside / "rows.json").unlink()
    os.mkfifo(beside / "rows.json")
    assert np.array_equal(replay(), want), "a pipe is not waited for"
    shutil.rmtree(beside)
    assert np.array_equal(replay(), want), "the file may be deleted at any time"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t", "t.tokens"]
