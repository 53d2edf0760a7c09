"""Settings that every test shares."""

import os

from hypothesis import settings

# Compilation and disks are slow now and then; CI draws the same examples every time.
settings.register_profile("kvsim", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("kvsim")
