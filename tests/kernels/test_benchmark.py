"""The benchmark's cases compute what they should, at small sizes; its times need a GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE

SCRIPT = Path(__file__).parents[2] / "kernels/benchmarks/kernels.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("kernel_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_benchmark"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kernel_benchmark"]


def test_every_case_computes_what_the_reference_does(bench):
    small = bench.Model("small", 3, 6, 2, 64, 128, 96, 70)
    operations = set()
    for case in bench.all_cases((small,), (300,), DEVICE, torch.float16, (1, 3)):
        first, second = case.sets(2)
        assert case.apart(first) < 2e-3
        assert case.bytes > 0
        case.ours(second)
        case.theirs(second)
        operations.add(case.op)
    assert len(operations) == 13


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    assert bench.main() == 2
    assert "CUDA GPU" in capsys.readouterr().err
