"""Settings that every test shares."""

import os

import pytest
from hypothesis import settings

from kvsim.cli.output import console

# Compilation and disks are slow now and then; CI draws the same examples every time.
settings.register_profile("kvsim", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvsim")


@pytest.fixture(autouse=True)
def _hundred_columns(monkeypatch):
    """As wide as the README's tables, whatever the terminal or pytest-xdist (80) says."""
    monkeypatch.setattr(console, "width", 100)
