"""Comparing files of results: what only one holds, how far the others lie apart, and the exit code."""

import json
import math

import polars as pl
import pytest
from cases import write_trace
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.compare import compare
from kvsim.engines.outcome import METRICS


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("traces") / "first")


ROW = {"trace_hash": "f" * 64, "trace": "t", "mode": "irreversible", "loop": "open", "version": "1", "engine": "cpu"}


def write(path, rows, **columns):
    """Write rows of {policy: {metric: value}} as a file of results."""
    table = [{**ROW, "policy": policy, "prompt_length": 40, **metrics} for policy, metrics in rows.items()]
    pl.DataFrame(table, infer_schema_length=None).with_columns(**columns).write_parquet(path)
    return path


@pytest.fixture
def two(tmp_path):
    """Two files that differ in known ways."""
    a = {
        "same": {"kept_mass": 0.5, "ties": 3.0, "set_alpha": 0.5},
        "near": {"kept_mass": 0.25, "ties": 0.0, "set_alpha": 0.6},
        "far": {"kept_mass": 0.75, "ties": 2.0, "set_alpha": 0.7},
        "gone": {"kept_mass": 0.1, "ties": 0.0, "set_alpha": 0.8},
    }
    b = {
        "new": {"kept_mass": 0.1, "ties": 0.0},
        "far": {"kept_mass": 0.5, "ties": 6.0},
        "near": {"kept_mass": 0.25 + 2**-20, "ties": 0.0},
        "same": {"kept_mass": 0.5, "ties": 3.0},
    }
    return write(tmp_path / "a.parquet", a), write(tmp_path / "b.parquet", b)


def test_differences_are_measured_and_listed_worst_first(two):
    found = compare(*two)
    assert found.common == 3
    assert not found.agree
    assert [key["policy"] for key in found.only[0]] == ["gone"]
    assert [key["policy"] for key in found.only[1]] == ["new"]
    assert list(found.metrics) == ["kept_mass", "ties"], "settings and lengths are no metrics"
    mass, ties = found.metrics["kept_mass"], found.metrics["ties"]
    assert (mass.rows, mass.largest, mass.beyond) == (3, 0.25, 2)
    assert mass.mean == pytest.approx((0.25 + 2**-20) / 3)
    assert (ties.rows, ties.largest, ties.mean, ties.beyond) == (3, 4.0, 4 / 3, 1)
    assert [(d["policy"], d["metric"], d["a"], d["b"]) for d in found.differences] == [
        ("far", "ties", 2.0, 6.0),
        ("far", "kept_mass", 0.75, 0.5),
        ("near", "kept_mass", 0.25, 0.25 + 2**-20),
    ]


def test_tolerance_is_an_absolute_difference_and_sets_the_exit_code(two):
    run("compare", *two, code=1)
    run("compare", *two, "--tolerance", "0.25", code=1)
    run("compare", *two, "--tolerance", "4")
    assert compare(*two, tolerance=2**-20).metrics["kept_mass"].beyond == 1
    assert compare(*two, tolerance=2**-21).metrics["kept_mass"].beyond == 2


def test_the_text_says_it_all(two):
    text = run("compare", *two, code=1).stdout
    words = " ".join(text.split())
    for part in (
        "only in A: 1 row gone on t (irreversible, open loop)",
        "only in B: 1 row new on t (irreversible, open loop)",
        "in both: 3 rows",
        "kept_mass 3 0.25 ",
        "far t ties 2 6 4",
        "kvsim 1, cpu engine",
    ):
        assert part in words, text
    assert words.index("far t ties") < words.index("far t kept_mass") < words.index("near t kept_mass")
    assert "different" not in text
    assert "all of them agree within 4" in run("compare", *two, "--tolerance", "4").stdout


def test_long_lists_are_cut_in_text_and_whole_in_json(tmp_path):
    a = write(tmp_path / "a.parquet", {f"p{k}": {"kept_mass": k / 100} for k in range(40)})
    b = write(tmp_path / "b.parquet", {f"p{k}": {"kept_mass": 0.0} for k in range(15)})
    text = run("compare", a, b, code=1).stdout
    assert "and 15 more" in text
    assert "and 4 more" in text
    assert "p14 " in text
    assert "p4 " not in text
    found = json.loads(run("compare", a, b, "--json", code=1).stdout)
    assert len(found["a"]["only"]) == 25
    assert [d["policy"] for d in found["differences"]] == [f"p{k}" for k in range(14, 0, -1)]


def test_json(two):
    found = json.loads(run("compare", *two, "--json", code=1).stdout)
    assert found["agree"] is False
    assert found["common"] == 3
    assert found["tolerance"] == 1e-9
    assert found["a"]["path"] == str(two[0])
    assert found["a"]["rows"] == 4
    assert found["a"]["version"] == ["1"]
    assert found["b"]["only"][0]["policy"] == "new"
    assert found["metrics"]["ties"] == {"rows": 3, "largest": 4.0, "mean": 4 / 3, "beyond": 1}
    assert found["differences"][0]["difference"] == 4.0
    assert json.loads(run("compare", two[0], two[0], "--json").stdout)["agree"] is True


def test_a_value_in_one_file_only_is_the_worst_difference_but_for_shadow_churn(tmp_path):
    full = {"kept_mass": 0.5, "output_error": 0.1, "shadow_churn": 0.2}
    holes = {"kept_mass": 0.9, "output_error": None, "shadow_churn": None}
    a = write(tmp_path / "a.parquet", {"p": full, "q": full})
    b = write(tmp_path / "b.parquet", {"p": holes, "q": full})
    for one, other in ((a, b), (b, a)):
        found = compare(one, other)
        assert [d["metric"] for d in found.differences] == ["output_error", "kept_mass"]
        assert found.differences[0]["difference"] is None
        assert (found.metrics["output_error"].rows, found.metrics["shadow_churn"].rows) == (1, 1)
        assert json.loads(run("compare", one, other, "--json", code=1).stdout)["differences"][0]["difference"] is None
        assert " - " in run("compare", one, other, code=1).stdout
    nothing = dict.fromkeys(full) | {"kept_mass": math.nan}
    c = write(tmp_path / "c.parquet", {"p": nothing, "q": nothing}, output_error=pl.lit(None, pl.Float64))
    assert compare(c, c).agree, "undefined in both files is equal"
    assert compare(c, c).metrics["kept_mass"].largest == 0
    assert {d["metric"] for d in compare(a, c).differences} == {"kept_mass", "output_error"}


def test_what_made_the_files_and_metrics_of_one_alone_are_said(tmp_path):
    a = write(tmp_path / "a.parquet", {"p": {"kept_mass": 0.5, "churn": 0.1}}, engine_mode=pl.lit("exact"))
    b = write(
        tmp_path / "b.parquet",
        {"p": {"kept_mass": 0.5, "ties": 1.0}},
        engine_mode=pl.lit("fast"),
        engine=pl.lit("reference"),
        version=pl.lit("2"),
    )
    text = run("compare", a, b).stdout
    for line in (
        "different versions: 1 in A, 2 in B",
        "different engines: cpu in A, reference in B",
        "different engine modes: exact in A, fast in B",
        "metrics only in A: churn",
        "metrics only in B: ties",
    ):
        assert line in text


def test_sweeps_and_replays_of_the_same_things_agree(trace, tmp_path):
    run("replay", "--trace", trace.path, "--policy", "ema:0.8", "--policy", "tova", "--out", tmp_path / "r", "--json")
    run("sweep", "--trace", trace.path, "--policy", "ema:0.8", "--policy", "tova", "--out", tmp_path / "s.parquet")
    for replayed in (tmp_path / "r", tmp_path / "r" / "results.parquet"):
        found = compare(replayed, tmp_path / "s.parquet")
        assert found.agree
        assert found.common == 2
        assert set(METRICS) | {"budget", "shadow_churn"} <= set(found.metrics)
    run("compare", tmp_path / "r", tmp_path / "s.parquet")
    frame = pl.read_parquet(tmp_path / "s.parquet")
    frame.with_columns(pl.col("raw_agreement") + 1e-6).write_parquet(tmp_path / "s.parquet")
    run("compare", tmp_path / "r", tmp_path / "s.parquet", code=1)
    run("compare", tmp_path / "r", tmp_path / "s.parquet", "--tolerance", "1e-5")


def test_modes_are_compared_apart(trace, tmp_path):
    out = tmp_path / "s.parquet"
    run("sweep", "--trace", trace.path, "--policy", "ema:0.8", "--out", out)
    run("sweep", "--trace", trace.path, "--policy", "ema:0.8", "--out", out, "--shadow")
    assert compare(out, out).common == 2


def test_bad_input_exits_with_2(two, trace, tmp_path):
    a, b = two
    text, other, empty = tmp_path / "notes.txt", tmp_path / "other.parquet", tmp_path / "empty"
    text.write_text("notes")
    pl.DataFrame({"policy": ["p"]}).write_parquet(other)
    empty.mkdir()
    apart = write(tmp_path / "apart.parquet", {"elsewhere": {"kept_mass": 0.5}})
    null = write(tmp_path / "null.parquet", {"p": {}}, policy=pl.lit(None, pl.String))
    twice = tmp_path / "twice.parquet"
    frame = pl.read_parquet(a)
    pl.concat([frame, frame.with_columns(engine=pl.lit("gpu"))]).write_parquet(twice)
    for words, message in [
        ((a, tmp_path / "none.parquet"), "none.parquet: cannot be read (No such file"),
        ((text, b), "notes.txt: is not a whole Parquet file"),
        ((a, other), "other.parquet: is not a file of kvsim results: it has no text column 'trace_hash'"),
        ((a, null), "no text column 'policy'"),
        ((a, empty), "results.parquet: cannot be read"),
        ((a, apart), "no row in common"),
        ((twice, b), "several rows for same on t (version 1 engine cpu and version 1 engine gpu)"),
        ((a, b, "--tolerance", "-1"), "at least 0"),
        ((a, b, "--tolerance", "nan"), "at least 0"),
    ]:
        result = run("compare", *words, code=2)
        assert message in result.stderr
        assert result.stderr.startswith("kvsim: error: ")
        assert not result.stdout
    with pytest.raises(kvsim.KvsimError, match="tolerance"):
        compare(a, b, tolerance=math.inf)
