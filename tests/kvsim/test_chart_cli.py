"""kvsim chart: every kind from the command line, and files that are whole or not there."""

import importlib.util
import json

import pytest
from cases import SAMPLES
from making import Recording
from specs import rows_of_chart
from typer.testing import CliRunner

import kvsim
from kvsim import charts
from kvsim.charts import files
from kvsim.cli import app
from kvsim.cli.chart_kinds import KINDS
from kvsim.errors import KvsimError

MULTI, LONG = (str(SAMPLES / f"smollm2-{name}") for name in ("multineedle-256", "long-64"))
BOTH = ["--policy", "ema:0.8", "--policy", "cumulative"]
PART = ["--positions", "200-278", "--steps", "5-20"]
WORDS = {
    "retention": [*BOTH, "--raw", "--both", "--sort", "utility", *PART, "--group", "0"],
    "steps": [*BOTH, "--metric", "raw_agreement"],
    "alpha": ["--metric", "raw_agreement"],
    "budgets": [*BOTH, "--ratios", "0.5,0.9"],
    "cost": [*BOTH, "--ratios", "0.5,0.9"],
    "two-tokens": [],
    "spectrum": ["--scorer", "keydiff"],
    "received": ["--policy", "ema:0.8", "--positions", "3-9,258"],
    "budget-axis": [*BOTH, "--ratios", "0.5,0.9", "--policy", "full/admit=local:window=8,sink=2"],
    "utility": ["--positions", "3,258", "--head", "2.5", "--head", "9.0"],
    "heads": [*BOTH, "--step", "3", "--metric", "kept_mass"],
}


def run(*words, code=0):
    result = CliRunner().invoke(app, ["chart", *map(str, words)])
    assert result.exit_code == code, (result.output, result.exception)
    return result


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.reads_files])
def test_every_kind_draws(kind, tmp_path):
    words = WORDS.get(kind, BOTH)
    out = tmp_path / "new" / f"{kind}.json"
    assert run(kind, "--trace", MULTI, *words, "--out", out).stdout == ""
    spec = json.loads(out.read_text())
    assert sum(map(len, spec["datasets"].values())) <= 5000
    printed = json.loads(run(kind, MULTI, *words, "--json").stdout)
    assert printed == spec
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_numbers_are_those_of_a_replay():
    spec = json.loads(run("kept-mass", MULTI, "--policy", "tova", "--budget", 20, "--json").stdout)
    (rows,) = spec["datasets"].values()
    kept = kvsim.replay(MULTI, "tova", budget=20).outcome.metrics["kept_mass"]
    assert [row["value"] for row in rows] == pytest.approx(kept.tolist(), rel=1e-5)


def test_a_part_of_a_map_is_that_of_python():
    part = ["--positions", "200-278", "--steps", "5-20"]
    spec = json.loads(
        run("retention", MULTI, "--policy", "tova", "--raw", "--both", "--group", 3, *part, "--json").stdout
    )
    results = [
        kvsim.replay(MULTI, policy, shadow=shadow)
        for policy, shadow in (("ema:0,over=step/group=layer", True), ("tova", False), ("tova", True))
    ]
    assert spec == charts.retention(results, positions=(200, 279), steps=(5, 20), group=3).to_dict()


def test_shadow_and_several_recordings():
    spec = json.loads(
        run("steps", MULTI, LONG, "--policy", "ema:0.8", "--metric", "churn", "--shadow", "--json").stdout
    )
    (rows,) = spec["datasets"].values()
    assert {row["series"] for row in rows} == {"ema:0.8, smollm2-multineedle-256", "ema:0.8, smollm2-long-64"}
    drawn = [row["value"] for row in rows if row["series"].endswith("long-64")]
    shadow = kvsim.replay(LONG, "ema:0.8", shadow=True).outcome.metrics["churn"][1:]
    assert drawn == pytest.approx(shadow.tolist(), rel=1e-5)


def test_the_oracle_that_a_gap_needs_is_added():
    spec = json.loads(run("oracle-gap", MULTI, "--policy", "ema:0.8", "--policy", "tova", "--json").stdout)
    rows = next(rows for rows in spec["datasets"].values() if len(rows) > 1)
    trace = kvsim.open_trace(MULTI)
    for policy in ("ema:0.8", "tova"):
        last = [row["value"] for row in rows if row["series"] == policy][-1]
        gap = kvsim.oracle.gap(kvsim.replay(trace, policy), trace, "exact")
        assert last == pytest.approx(gap, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<svg"), ("html", b"<!DOCTYPE html>")])
def test_pictures_and_pages(tmp_path, suffix, start):
    out = tmp_path / f"chart.{suffix}"
    out.write_text("before")
    result = run("churn", "--trace", MULTI, "--policy", "ema:0.8", "--out", out)
    assert out.read_bytes().startswith(start)
    assert result.stderr == f"wrote {out}\n"
    first = out.read_bytes()
    run("churn", "--trace", MULTI, "--policy", "ema:0.8", "--out", out)
    assert out.read_bytes() == first


def test_without_the_extra_pages_load_their_libraries_and_pictures_are_refused(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else find(name))
    words = "evictions", "--trace", MULTI, "--policy", "ema:0.8", "--out"
    for suffix in ("png", "svg"):
        refused = run(*words, tmp_path / f"a.{suffix}", code=2).stderr
        assert "pip install 'kvsim[charts]'" in refused
    run(*words, tmp_path / "a.html")
    assert len((tmp_path / "a.html").read_text()) < 100_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["histogram", "--trace", MULTI, "--out", "a.png"], "unknown kind of chart 'histogram' (valid: alpha, "),
        (
            ["churn", "--trace", MULTI, *BOTH, "--out", "a.gif"],
            "unknown suffix of a chart's file '.gif' (valid: .html,",
        ),
        (["churn", "--trace", MULTI, *BOTH, "--out", "chart"], "unknown suffix of a chart's file 'chart'"),
        (["churn", "--trace", MULTI, *BOTH], "--out FILE.html"),
        (["churn", "--trace", MULTI, "--out", "a.html"], "name a policy"),
        (["churn", *BOTH, "--out", "a.html"], "name a recording"),
        (["steps", "--trace", MULTI, *BOTH, "--metric", "mass", "--out", "a.html"], "unknown metric 'mass'"),
        (["retention", "--trace", MULTI, *BOTH, "--sort", "age", "--out", "a.html"], "unknown sort 'age'"),
        (
            ["retention", MULTI, *BOTH, "--positions", "9:90", "--out", "a.html"],
            "--positions takes a range with both ends",
        ),
        (["retention", MULTI, *BOTH, "--steps", "9-3", "--out", "a.html"], "--steps 9-3: runs backwards; write 3-9"),
        (["retention", MULTI, *BOTH, "--steps", "3-99", "--out", "a.html"], "1 <= first <= last <= 24, got (3, 99)"),
        (["retention", MULTI, *BOTH, "--both", "--shadow", "--out", "a.html"], "leave --shadow out"),
        (["retention", MULTI, LONG, *BOTH, "--out", "a.html"], "retention draws one recording, got 2"),
        (["two-tokens", MULTI, *BOTH, "--out", "a.html"], "two-tokens draws one policy, got 2"),
        (["tradeoff", MULTI, "--policy", "tova", "--h", "-1", "--out", "a.html"], "h must be"),
        (["spectrum", MULTI, "--scorer", "fame", "--out", "a.html"], "unknown score 'fame'"),
        (["jaccard", MULTI, "--policy", "tova", "--out", "a.html"], "name at least two"),
        (["jaccard", MULTI, *BOTH, "--policy", "tova", "--out", "a.html"], "give both the same group="),
        (["memory", MULTI, "--policy", "snapkv:16", "--out", "a.html"], "not a linear rule"),
        (["stability", MULTI, *BOTH, "--bound", "tight", "--out", "a.html"], "unknown bound 'tight'"),
        (["stability", MULTI, *BOTH, "--bound", "group", "--out", "a.html"], "valid: asymptotic, finite"),
        (["stability", MULTI, *BOTH, "--bound", "delta", "--out", "a.html"], "valid: asymptotic, finite"),
        (["oracle-gap", MULTI, "--policy", "full", "--out", "a.html"], "full: has no budget"),
        (["utility", MULTI, "--head", "2.5", "--out", "a.html"], "--positions 12,31 --head 10.19"),
        (["utility", MULTI, "--positions", "3", "--head", "2", "--out", "a.html"], "a head is LAYER.HEAD"),
        (["utility", MULTI, "--positions", "3", "--head", "2.9", "--out", "a.html"], "head must be in 0..8, got 9"),
        (["utility", MULTI, *BOTH, "--positions", "3", "--out", "a.html"], "leave --policy out"),
        (["growth", MULTI, *BOTH, "--shadow", "--out", "a.html"], "leave --shadow out"),
        (["triggers", MULTI, "--out", "a.html"], "name a policy"),
        (["budget-axis", MULTI, "--out", "a.html"], "name a policy"),
        (["head-sizes", MULTI, *BOTH, "--step", "99", "--out", "a.html"], "step must be from 1 to 24, got 99"),
        (["kept-mass", MULTI, *BOTH, "--out", ".html"], ".html: is a suffix alone"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = run(*words, code=2).stderr
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_kinds_are_explained():
    assert {one["name"] for one in json.loads(run("--json").stdout)["kinds"]} == set(KINDS)
    table = run().stdout
    assert all(name in table for name in KINDS)
    assert max(map(len, table.splitlines())) <= 100


def test_a_chart_that_cannot_be_written_leaves_nothing(tmp_path):
    chart = charts.memory_weights(["ema:0.8"], 4)
    (tmp_path / "file").write_text("")
    with pytest.raises(KvsimError, match="cannot be written"):
        charts.save(chart, tmp_path / "file" / "a.html")
    (tmp_path / "a.html").mkdir()
    with pytest.raises(KvsimError, match="is a directory"):
        charts.save(chart, tmp_path / "a.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "file"]
    assert files.SUFFIXES.keys() == {".html", ".json", ".png", ".svg"}
    assert rows_of_chart(chart)


def shown(spec):
    """Every recording's name that a chart shows, in a title or a legend, and how many numbers it holds in all."""
    text = json.dumps(spec, ensure_ascii=False)
    return text, sum(map(len, spec["datasets"].values()))


@pytest.mark.parametrize(
    "kind", ["attended-pairs", "oracle-gap", "alpha", "budgets", "cost", "tradeoff", "stability", "spectrum"]
)
def test_recordings_of_the_same_name_are_told_apart(kind, tmp_path):
    words = ["--policy", "ema:0.8", "--policy", "ema:0.5", "--budget", 4]
    words = ["--scorer", "recency", "--budget", 4] if kind == "spectrum" else words
    traces = [Recording(seed=seed).write(tmp_path / str(seed) / "run", "heads") for seed in (0, 1)]
    other = Recording(seed=1).write(tmp_path / "other", "heads")
    spec = json.loads(run(kind, *traces, *words, "--json").stdout)
    text, rows = shown(spec)
    for trace in traces:
        assert f"run {kvsim.open_trace(trace).hash[:6]}" in text
    assert rows == shown(json.loads(run(kind, traces[0], other, *words, "--json").stdout))[1]
    lines = [[row["series"], row["step"]] for rows in spec["datasets"].values() for row in rows if "step" in row]
    assert all(lines.count(line) == 1 for line in lines)
