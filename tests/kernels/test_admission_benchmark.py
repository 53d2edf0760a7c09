"""The benchmark of the admission kernels runs, and what it times is right; its times need a GPU."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import DEVICE

SCRIPT = Path(__file__).parents[2] / "kernels/benchmarks/admission_kernels.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("admission_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["admission_benchmark"] = module
    spec.loader.exec_module(module)
    yield module
    for name in ("admission_benchmark", "kernel_benchmark_tools"):
        sys.modules.pop(name, None)


@pytest.fixture
def shape(bench):
    return bench.Shape(4, 2, 32, 20, (40,), 150, 12, 0.4, 64, DEVICE, torch.float16)


def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, causal, return_lse):
    """Attend as flash-attn-4 does to sequences of several lengths."""
    assert return_lse
    assert not causal
    output, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan, device=q.device)
    for i, count in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        assert rows.stop - rows.start <= max_seqlen_q
        keys = slice(int(cu_seqlens_k[i]), int(cu_seqlens_k[i]) + count)
        logits = torch.einsum("nhd,md->hnm", q[rows].float(), k[keys, 0].float()) * q.shape[-1] ** -0.5
        lse[:, rows] = torch.logsumexp(logits, -1)
        weights = torch.exp(logits - lse[:, rows].masked_fill(lse[:, rows] == -torch.inf, 0).unsqueeze(-1))
        output[rows] = torch.einsum("hnm,md->nhd", weights, v[keys, 0].float()).to(q.dtype)
    return output, lse


def test_another_library_can_take_the_whole_chunks(bench, shape, monkeypatch):
    monkeypatch.setattr(bench, "flash_4", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
    assert bench.check_candidate(bench.FLASH_4, shape) < 2e-3


def test_a_candidate_that_is_wrong_is_seen(bench, shape, monkeypatch):
    name = "packed 128x64"
    right = bench.check_candidate(name, shape)
    wrong = bench.vertical_slash
    monkeypatch.setattr(bench, "vertical_slash", lambda *given, window, **more: wrong(*given, window=window + 1))
    assert right < 2e-3
    assert bench.check_candidate(name, shape) > bench.LIMIT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_smoke(bench, tmp_path):
    assert os.environ["TRITON_INTERPRET"] == "1"
    out = tmp_path / "found.json"
    chosen = ["--only", "pointers,over a copy,flash", "--keep", "1", "--lengths", "20,40"]
    assert bench.main(["--smoke", "--out", str(out), *chosen]) == 0
    rows = json.loads(out.read_text())["rows"]
    by_op = {row["op"]: row for row in rows}
    assert set(by_op) == {
        "vertical_slash check", "vertical_slash", "gather_admitted", "paged_decode", "promote", "write_gate",
        "write_gate_step"
    }  # fmt: skip
    errors = by_op["vertical_slash check"]["errors"]
    assert "flash_attn" in errors.pop(bench.FLASH_4)
    assert all(error < 2e-3 for error in errors.values())
    times = [row["ms"] for row in rows if row["op"] == "vertical_slash"]
    assert [len(ms) for ms in times] == [2, 1]
    # How quick the interpreter is says nothing, and beside it the ratio may round to 0.
    last = by_op["vertical_slash"]
    dense = last["dense_ms"]["SDPA math"]
    assert dense > 0
    assert last["ratio"]["SDPA math"] == pytest.approx(dense / last["ms"][last["best"]], abs=2e-3)
    assert all(row["error"] < 2e-3 for row in rows if "error" in row)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_it_refuses(bench, monkeypatch, capsys):
    assert bench.main([]) == 2
    assert "CUDA GPU" in capsys.readouterr().err
    assert bench.main(["--smoke", "--parts", "vertical,horizontal"]) == 2
    assert "'horizontal'" in capsys.readouterr().err
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert bench.main(["--smoke"]) == 2
    assert "TRITON_INTERPRET=1" in capsys.readouterr().err
