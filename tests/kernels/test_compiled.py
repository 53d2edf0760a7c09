"""Kernels compile for a GPU: Triton's interpreter runs more than Triton compiles."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels" / "kvsim_kernels"
REPLAY = {"replay.general.replay_general", "replay.resident.replay_resident"}
"""The GPU engine's."""


def launched():
    """Name every kernel that a module launches."""
    for file in sorted(KERNELS.glob("*/kernel.py")):
        for name in re.findall(r"^ +(_\w+)\[", file.read_text(), re.MULTILINE):
            yield f"{file.parent.name}.kernel.{name}"


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h200():
    run = subprocess.run([sys.executable, HERE / "compile_all.py"], capture_output=True, text=True, timeout=600)
    found = json.loads(run.stdout)
    assert {name: [error for error in own if error] for name, own in found.items() if any(own)} == {}
    names = set(launched()) | REPLAY
    assert len(names) > 30
    assert names == set(found)
