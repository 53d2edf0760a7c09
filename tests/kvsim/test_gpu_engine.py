"""The GPU engine returns what the reference returns, or refuses by name; Triton interprets it where there is no GPU."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import ADMITTING, NEEDS_HEADS, NEEDS_KEYS, POLICIES, named, write_trace

import kvsim
from kvsim.engines import get_engine
from kvsim.engines.cpu.rows import token_rows
from kvsim.engines.gpu import refusal, rows
from kvsim.errors import KvsimError, PolicyError

pytest.importorskip("triton")

REFUSED = [p for p in POLICIES if p.startswith(("adaptive", "rkv")) or "score=rkv" in p]
NATIVE = [p for p in POLICIES if p not in REFUSED]
CASES = [("heads", p) for p in NATIVE] + [("scores", p) for p in NATIVE if p not in NEEDS_HEADS + NEEDS_KEYS]

# One of each kind of plan, for what need not be tried with all of them.
FEW = [
    "full",
    "ema:0.8/refresh=2/protect=sink:1+recent:2",
    "ema:0.8,over=layer/group=layer",
    "cumulative/when=overflow:30%/group=head",
    "ema:0.8/score=entropy",
    "cumulative/score=vnorm/group=head",
    "ema:0.8/score=keydiff",
    "window:3,pool=3/group=head",
    "scissorhands:6",
    "snapkv:6",
    "expected",
    "adakv:snapkv,window_size=3,kernel=3",
    "rescue:0.5,3/when=overflow:50%",
    "random:7",
    "oracle:future",
    "ema:0.8/select=topk:3",
    "single/group=layer/select=quest:16",
]
SHAPE = {"steps": 5, "prompt": 16, "layers": 2, "heads": 4, "kv_heads": 2}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return {
        "heads": write_trace(folder / "heads", seed=31, **SHAPE),
        "scores": write_trace(folder / "scores", seed=32, capture="scores", **SHAPE | {"layers": 5}),
        "qkv": write_trace(folder / "qkv", seed=33, capture="qkv", **SHAPE),
    }


def plans_of(trace, policies, budget=6):
    return [kvsim.parse(policy).with_budget(kvsim.Budget(budget)).plan(trace) for policy in policies]


def assert_equal(want, got, about, tolerance=1e-9):
    if want.retained is not None:
        assert np.array_equal(want.retained, got.retained), about
    else:
        assert np.array_equal(want.evicted_at, got.evicted_at), about
    for name, column in want.metrics.items():
        np.testing.assert_allclose(got.metrics[name], column, rtol=tolerance, atol=1e-12, err_msg=f"{about} {name}")


def assert_as_reference(trace, policies, *, budget=6, tolerance=1e-9, shadow=False, **options):
    plans = plans_of(trace, policies, budget)
    reference = get_engine("reference")(trace, plans, shadow=shadow)
    for policy, want, got in zip(
        policies, reference, get_engine("gpu")(trace, plans, shadow=shadow, **options), strict=True
    ):
        assert_equal(want, got, policy, tolerance)


@pytest.mark.parametrize(("kind", "policy"), CASES)
def test_equals_the_reference(traces, policy, kind):
    assert_as_reference(traces[kind], [policy])


@pytest.mark.parametrize("policy", FEW)
def test_shadow_mode_equals_the_reference(traces, policy):
    assert_as_reference(traces["heads"], [policy], shadow=True)


def test_rows_computed_from_queries(traces):
    assert_as_reference(traces["qkv"], ["ema:0.8", "cumulative/group=head", "ema:0.8/score=entropy/group=layer"])


def test_head_means_in_words_of_four_layers(traces):
    rules = ["ema:0.8", "ema:0.5,over=step/refresh=2", "ema:0.9,over=layer/protect=recent:1", "single", "oracle:future"]
    for budget in (1, 6, 17, 100):
        assert_as_reference(traces["scores"], rules, budget=budget)


@pytest.mark.parametrize("shadow", [False, True], ids=["irreversible", "shadow"])
def test_blocks_pieces_and_batches_change_nothing(traces, monkeypatch, shadow):
    """Small limits: positions in several blocks, a recording in pieces, plans in batches, nothing in registers."""
    from kvsim.engines.gpu import engine

    for name, value in {"RESIDENT": 0, "WHOLE": 0, "PART": 8, "BATCH_BYTES": 12000}.items():
        monkeypatch.setattr(engine, name, value)
    few = ["ema:0.8", "cumulative", "window:3,pool=3", "ema:0.5/score=entropy", "rescue:0.5,3", "snapkv:6/group=layer"]
    few = few[3:5] if shadow else few
    assert_as_reference(traces["heads"], few, shadow=shadow)


def test_a_recording_that_does_not_fit_is_uploaded_in_pieces(tmp_path, monkeypatch):
    trace = write_trace(tmp_path / "t", capture="scores", seed=34, steps=13, prompt=8, layers=33)
    data = token_rows(trace).data
    monkeypatch.setattr(rows, "PIECE_BYTES", data.nbytes // 3)
    assert len(list(rows.pieces(trace))) > 2
    for policy in ("ema:0.8", "cumulative/when=overflow:30%", "window:4/refresh=2", "ema:0.8/when=overflow/refresh=3"):
        assert_as_reference(trace, [policy])


def test_equal_scores_keep_the_newest(tmp_path):
    """Uniform attention, and zeros that leave some heads no visible mass at all."""
    uniform = np.zeros((8, 2, 1, 16), np.float32)
    for t in range(8):
        uniform[t, ..., : 9 + t] = 1 / (9 + t)
    for capture in ("heads", "scores"):
        trace = write_trace(tmp_path / capture, attention=uniform, prompt=8, kv_heads=1, capture=capture)
        policies = ["cumulative", "ema:0.5/refresh=2", "single", "ema:0.5/when=overflow:30%", "window:2"]
        assert_as_reference(trace, policies, budget=4)
    gone = np.zeros((6, 2, 2, 15), np.float32)
    gone[..., 0] = 1
    trace = write_trace(tmp_path / "gone", attention=gone, prompt=9, kv_heads=2)
    assert_as_reference(
        trace, ["recency", "ema:0.5/protect=recent:4", "ema:0.5/score=entropy/protect=recent:4"], budget=4
    )


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("shadow", [False, True], ids=["irreversible", "shadow"])
@pytest.mark.parametrize("policy", FEW)
def test_programs_of_many_warps_equal_the_numba_engine(wide, policy, shadow):
    """What only threads that run at the same time could get wrong."""
    plans = plans_of(wide, [policy, policy], budget=700)
    (want,) = get_engine("cpu")(wide, plans[:1], shadow=shadow)
    for got in get_engine("gpu")(wide, plans, shadow=shadow):
        assert_equal(want, got, policy, 1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize("rule", ["ema:0.8", "cumulative/when=overflow:30%", "window:3,pool=3"])
def test_windows_longer_than_a_warp_equal_the_numba_engine(wide, rule):
    plans = plans_of(wide, [f"{rule}/admit=random:{share},window=300" for share in ("0.5", "0.1")], budget=700)
    for want, got in zip(get_engine("cpu")(wide, plans), get_engine("gpu")(wide, plans), strict=True):
        assert_equal(want, got, rule, 1e-6)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("wide") / "t", seed=35, steps=24, prompt=9000, layers=3)


def test_fast_mode(traces):
    for kind in ("scores", "heads"):
        assert_as_reference(traces[kind], ["ema:0.8", "cumulative/group=layer"], mode="fast", tolerance=1e-5)


def test_without_raw_those_metrics_are_not_known(traces):
    (got,) = get_engine("gpu")(traces["heads"], plans_of(traces["heads"], ["ema:0.8"]), raw=False)
    unknown = {name for name, column in got.metrics.items() if np.isnan(column).all()}
    assert unknown == {"raw_churn", "raw_agreement", "raw_top_evicted", "newest_wronged", "output_error"}


def test_progress_counts_plans_or_steps(traces):
    seen = []
    for policies in (["ema:0.8"], ["ema:0.8", "window:3"]):
        plans = plans_of(traces["scores"], policies)
        get_engine("gpu")(traces["scores"], plans, progress=lambda *done: seen.append(done))
    assert seen == [(5, 5), (1, 2), (2, 2)]


@pytest.mark.parametrize("policy", REFUSED)
def test_refuses_by_name_what_it_cannot_run(traces, policy):
    plan = plans_of(traces["heads"], [policy])[0]
    reason = "control" if policy.startswith("adaptive") else "pairs of visible keys"
    assert reason in refusal(plan)
    with pytest.raises(PolicyError, match=f"engine gpu cannot run it: .*{reason}.*; engines that can: cpu, reference"):
        get_engine("gpu")(traces["heads"], [*plans_of(traces["heads"], ["ema:0.8"]), plan])


@pytest.mark.parametrize("policy", [text for text in ADMITTING if not text.startswith(("adaptive", "rkv"))])
def test_admission_equals_the_reference(traces, policy):
    trace = traces["heads"]
    assert_as_reference(trace, [named(policy, trace)], budget=9)


def test_admission_in_blocks_pieces_and_batches(traces, monkeypatch):
    """Windows longer than a block, several plans in a launch, with the state in registers and without."""
    few = [
        "ema:0.8/admit=random:0.5,window=4", "ema:0.8/admit=random:0.3,seed=1,window=1",
        "ema:0.5/admit=random:0.4,seed=2,window=9", "cumulative/when=overflow:30%/admit=random:0.5,window=6",
        "full/admit=local:window=11,sink=2", "ema:0.8/when=overflow:5%/admit=random:0.2,seed=3,window=2",
    ]  # fmt: skip
    assert_as_reference(traces["heads"], few, budget=12)
    from kvsim.engines.gpu import engine

    for name, value in {"RESIDENT": 0, "WHOLE": 0, "PART": 4, "BATCH_BYTES": 12000}.items():
        monkeypatch.setattr(engine, name, value)
    assert_as_reference(traces["heads"], few, budget=12)


def test_shadow_mode_refuses_admission(traces):
    plans = plans_of(traces["heads"], ["ema:0.8/admit=random:0.5,window=4"])
    with pytest.raises(PolicyError, match="admission has no meaning there"):
        get_engine("gpu")(traces["heads"], plans, shadow=True)


def test_without_a_gpu_it_says_what_it_needs(traces, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KvsimError, match=r"needs an NVIDIA GPU .*no CUDA device found.*engines here: cpu, reference"):
        kvsim.replay(traces["heads"], "ema:0.8", engine="gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KvsimError, match=r"\(torch and triton not installed\)"):
        kvsim.replay(traces["heads"], "ema:0.8", engine="gpu")


def test_the_command_line_exits_with_2(traces):
    code = "import torch; torch.cuda.is_available = lambda: False; from kvsim.cli import main; main()"
    command = ["replay", "--trace", str(traces["scores"].path), "--policy", "ema:0.8", "--engine", "gpu"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", code, *command], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "engine gpu needs an NVIDIA GPU" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_it_imports_neither_polars_nor_altair(traces):
    code = (
        "import sys, kvsim; from kvsim.engines import get_engine; run = get_engine('gpu'); "
        "trace = kvsim.open_trace(sys.argv[1]); "
        "plan = kvsim.parse('ema:0.8').with_budget(kvsim.Budget(6)).plan(trace); run(trace, [plan]); "
        "assert 'kvsim_kernels.replay.kernel' in sys.modules; assert not {'polars', 'altair'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(traces["scores"].path)], check=True)
