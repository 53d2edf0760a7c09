"""What every test of a kernel needs."""

import numpy as np
import pytest
import torch


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
