"""Kernels run on a GPU where there is one, and in Triton's interpreter elsewhere."""

import os

import numpy as np
import pytest
import torch

# Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Triton 3.9 warns where this is not said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """Fill what PyTorch leaves undefined with NaN, or with a large integer."""

    def poisoned(make):
        def made(*args, **options):
            tensor = make(*args, **options)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def _quiet_infinities():
    """Let the interpreter compute with infinities as a GPU does: NumPy warns where a GPU does not."""
    with np.errstate(all="ignore"):
        yield
