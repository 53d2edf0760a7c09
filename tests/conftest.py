"""Settings that every test shares."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from kvsim.cli.output import console

# Kernels run on a GPU where there is one, and in Triton's interpreter elsewhere. Triton reads this when it is first
# imported, which Transformers does.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Triton 3.9 warns where this is not said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

# Compilation and disks are slow now and then; CI draws the same examples every time.
settings.register_profile("kvsim", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvsim")


@pytest.fixture(autouse=True)
def _hundred_columns(monkeypatch):
    """As wide as the README's tables, whatever the terminal or pytest-xdist (80) says."""
    monkeypatch.setattr(console, "width", 100)
