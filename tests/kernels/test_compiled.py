"""Kernels compile for a GPU: Triton's interpreter runs more than Triton compiles."""

import json
import os
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
@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_an_h200(tmp_path):
    run = subprocess.run(
        [sys.executable, HERE / "compile_all.py"],
        capture_output=True,
        text=True,
        timeout=800,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    wrong = {name: [error for _, error in own if error] for name, own in found.items()}
    assert {name: errors for name, errors in wrong.items() if errors} == {}
    names = set(launched()) | REPLAY
    assert len(names) > 30
    assert names == set(found)
    for name in ("_logits", "_normalise", "_mean"):
        # For one layer, and for many.
        assert {"*i64" in kinds for kinds, _ in found[f"attention_rows.kernel.{name}"]} == {False, True}
