"""The README's numbers are what the commands print today."""

import re
import sys
import types
from pathlib import Path

import pytest
from cases import SAMPLES
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.head import HEADS
from kvsim.spectrum import MEASURES, spectrum

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_first_screen_is_what_make_demo_prints(monkeypatch):
    words = re.search(r"kvsim (replay (?:.|\n)*?)\n\n", (ROOT / "Makefile").read_text())[1].replace("\\\n", " ").split()
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0
    for line in printed.stdout.splitlines():
        assert line.rstrip() in README.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "analyze alpha",
        "analyze stability",
        "analyze momentum",
        "analyze scorers",
        "analyze prediction",
        "analyze diff ema:0.8 ema:0.8,over=step",
        "analyze oracle",
        "analyze footprint",
    ],
)
def test_a_table_is_what_the_command_above_it_prints(monkeypatch, command):
    words = re.search(rf"kvsim ({command}(?:.|\n)*?)\n```", README)[1].replace("\\\n", " ").split()
    monkeypatch.chdir(ROOT)
    printed = CliRunner().invoke(app, words)
    assert printed.exit_code == 0
    for line in printed.stdout.splitlines():
        assert line.rstrip() in README.splitlines()


@pytest.mark.parametrize(
    ("sample", "row"),
    [
        ("smollm2-needle-512", "needle, 512"),
        ("smollm2-multineedle-256", "multi-needle"),
        ("smollm2-long-64", "long answer"),
    ],
)
def test_the_table_beside_appendix_i(sample, row):
    start = README.index(f"| SmolLM2, {row}")
    rows = [line.split(" | ")[1:] for line in README[start:].splitlines()[:3]]
    for (alpha, *printed), expected in zip(rows, ("0.3", "0.8", "0.9"), strict=True):
        assert alpha == expected
        summary = kvsim.replay(SAMPLES / sample, f"ema:{alpha}").summary()
        names = ("raw_churn", "churn", "raw_agreement", "raw_top_evicted", "shadow_churn")
        assert [cell.strip(" |") for cell in printed] == [f"{summary[name]:.3f}"[1:] for name in names]


@pytest.mark.parametrize(
    ("column", "sample"), [(2, "smollm2-needle-512"), (3, "smollm2-multineedle-256"), (4, "smollm2-long-64")]
)
def test_the_table_of_scorers(column, sample):
    start = README.index("| vnorm | about")
    printed = {}
    for line in README[start:].splitlines()[:7]:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        printed[cells[0]] = cells[column]
    found = {row["scorer"]: row for row in spectrum(SAMPLES / sample).overview(15)}
    for scorer, cell in printed.items():
        numbers = [found[scorer][f"{name}_layer"] for name in MEASURES] if scorer in found else []
        assert cell == (" / ".join(re.sub(r"\b0\.", ".", f"{round(x, 3) + 0.0:.3f}") for x in numbers) or "–")


def test_every_policy_string_in_the_readme_parses():
    block = re.search(r"### Policies\n\n```\n(.*?)```", README, re.DOTALL)[1]
    words = [word for word in block.split() if re.match(r"^[a-z0-9]+[:/]", word) or word in ("tova", "h2o", "knorm")]
    assert len(words) > 8
    block = re.search(r"### Admission and selection\n\n```\n(.*?)```", README, re.DOTALL)[1]
    words += [word for word in block.split() if re.match(r"^[a-z0-9:.=,]+/(admit|select|when|budget)=", word)]
    assert sum("/admit=" in word for word in words) > 6
    for word in words:
        kvsim.parse(word)


def test_the_policy_of_your_own_works_as_shown():
    block = re.search(r"```python\n(from dataclasses.*?)```", README, re.DOTALL)[1]
    name = "kvsim.policies.leaky"
    try:
        module = sys.modules[name] = types.ModuleType(name)
        exec(block, vars(module))
        trace = SAMPLES / "smollm2-needle-512"
        own, ema = (
            kvsim.replay(trace, p, shadow_churn=False) for p in ("leaky:0.9/group=layer", "ema:0.9/group=layer")
        )
        assert own.evicted_at.tolist() == ema.evicted_at.tolist()
    finally:
        HEADS.pop("leaky", None)
        sys.modules.pop(name, None)
