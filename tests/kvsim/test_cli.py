"""The command line as a user meets it: output, JSON, exit codes, and nothing half-written."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from cases import write_trace
from rich.console import Console
from typer.models import OptionInfo
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.cli.folding import fold
from kvsim.engines.outcome import METRICS


def run(*words, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "runs" / "first")


def test_replay_prints_a_table(trace):
    output = run("replay", "--trace", trace.path, "--policy", "ema:0.9", "--policy", "tova", "-q").stdout
    for word in (
        "ema:0.9 ",
        "tova ",
        "open loop",
        "kept",
        "shadow",
        "agreem.",
        "compression_ratio 0.9",
        "first: prompt 40",
    ):
        assert word in " ".join(output.split()), output


def test_replay_json_holds_every_documented_field(trace):
    output = run("replay", "--trace", trace.path, "--policy", "ema:0.9", "--compression-ratio", "0.5", "--json").stdout
    (row,) = json.loads(output)["results"]
    assert row["policy"] == "ema:0.9/budget=50%"
    assert row["trace"] == "first"
    assert row["budget"] == 20
    assert row["loop"] == "open"
    assert row["mode"] == "irreversible"
    assert set(METRICS) <= set(row)
    same = kvsim.replay(trace, "ema:0.9", compression_ratio=0.5).summary()
    assert row == same


def test_replay_takes_globs_quoted_or_expanded_by_the_shell(trace, tmp_path):
    other = write_trace(tmp_path / "runs" / "second", seed=1)
    (tmp_path / "runs" / "notes.txt").write_text("not a trace")
    quoted = run("replay", "--trace", tmp_path / "runs" / "*", "--policy", "ema", "--json").stdout
    expanded = run("replay", "--policy", "ema", "--json", "--trace", trace.path, other.path).stdout
    assert quoted == expanded
    assert [row["trace"] for row in json.loads(quoted)["results"]] == ["first", "second"]


def test_own_budget_beats_the_command_line(trace):
    output = run("replay", "--trace", trace.path, "--policy", "ema/budget=7", "--budget", "9", "--json").stdout
    assert json.loads(output)["results"][0]["budget"] == 7


def test_out_writes_parquet(trace, tmp_path):
    run("replay", "--trace", trace.path, "--policy", "ema:0.9", "--policy", "tova", "--out", tmp_path / "o", "--json")
    results, steps, evicted = (
        pl.read_parquet(tmp_path / "o" / f"{name}.parquet") for name in ("results", "steps", "evicted_at")
    )
    assert results["policy"].to_list() == ["ema:0.9/budget=10%", "tova/budget=10%"]
    assert steps.height == 2 * trace.num_steps
    ema = evicted.filter(pl.col("policy") == "ema:0.9/budget=10%").sort("group", "position")["evicted_at"]
    assert np.array_equal(ema.to_numpy(), kvsim.replay(trace, "ema:0.9").evicted_at.ravel())
    assert not list(tmp_path.glob(".o*"))
    run("replay", "--trace", trace.path, "--policy", "ema", "--out", tmp_path / "o", code=2)


def test_out_writes_bitmaps_in_shadow_mode(trace, tmp_path):
    run("replay", "--trace", trace.path, "--policy", "ema:0.9", "--shadow", "--out", tmp_path / "o", "--json")
    rows = pl.read_parquet(tmp_path / "o" / "retained.parquet")
    shadow = kvsim.replay(trace, "ema:0.9", shadow=True)
    last = np.unpackbits(np.frombuffer(rows["bitmap"][-1], np.uint8), bitorder="little")
    assert np.array_equal(np.flatnonzero(last), shadow.retained(trace.num_steps))
    assert not (tmp_path / "o" / "evicted_at.parquet").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "emma:0.9"], "did you mean 'ema'"),
        (["--policy", "ema:0.9", "--budget", "0"], "at least 1 token"),
        (["--policy", "ema:0.9", "--compression-ratio", "1"], "[0, 1)"),
        (["--policy", "ema:0.9", "--compression-ratio", "half"], "[0, 1)"),
        (["--policy", "ema:0.9", "--budget", "5", "--compression-ratio", "0.5"], "not both"),
        (["--policy", "ema:0.9", "--engine", "warp"], "unknown engine 'warp'"),
        (["--policy", "ema:0.9/protect=recent:99"], "more than the budget"),
    ],
)
def test_bad_requests_exit_with_2_and_write_nothing(trace, tmp_path, words, message):
    result = run("replay", "--trace", trace.path, *words, "--out", tmp_path / "o", code=2)
    assert message in result.stderr
    assert result.stderr.startswith("kvsim: error: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


def test_bad_traces_exit_with_2(tmp_path):
    for location, message in [
        (tmp_path / "none", "no such trace directory"),
        (tmp_path / "*", "no such trace directory"),
    ]:
        assert message in run("replay", "--trace", location, "--policy", "ema", code=2).stderr
    (tmp_path / "empty").mkdir()
    assert "empty" in run("replay", "--trace", tmp_path / "empty", "--policy", "ema", code=2).stderr


def test_a_later_bad_policy_stops_everything_before_it_starts(trace, tmp_path):
    run(
        "replay", "--trace", trace.path, "--policy", "ema", "--policy", "full/budget=3", "--out", tmp_path / "o", code=2
    )
    assert not (tmp_path / "o").exists()


def test_trace_commands(trace, tmp_path):
    facts = json.loads(run("trace", "info", trace.path, "--json").stdout)
    assert facts["hash"] == trace.hash
    assert "prompt" in run("trace", "info", trace.path).stdout
    assert "ok" in run("trace", "verify", trace.path).stdout
    run("trace", "repair", trace.path)
    run("trace", "export", trace.path, "--out", tmp_path / "x.npz")
    run("trace", "import", tmp_path / "x.npz", "--out", tmp_path / "again")
    again = kvsim.open_trace(tmp_path / "again")
    for policy in ("ema:0.8", "h2o"):
        if policy == "ema:0.8" or again.has("prompt_mass"):
            assert np.array_equal(kvsim.replay(again, policy).evicted_at, kvsim.replay(trace, policy).evicted_at)


def test_verify_names_the_damaged_file_and_exits_with_2(trace):
    piece = next((trace.path / "attention").glob("c.*"))
    data = bytearray(piece.read_bytes())
    data[100] ^= 1
    piece.write_bytes(data)
    output = run("trace", "verify", trace.path, code=2)
    assert piece.name in output.output
    report = json.loads(run("trace", "verify", trace.path, "--json", code=2).stdout)
    assert report["ok"] is False
    assert "attention" in run("replay", "--trace", trace.path, "--policy", "ema", "-q", code=2).stderr


def test_text_from_recordings_is_not_markup(tmp_path):
    trace = write_trace(tmp_path / "a[b]")
    manifest = json.loads((trace.path / "zarr.json").read_text())
    manifest["attributes"]["kvsim"]["notes"] = ["see [/tmp/x] [red]now"]
    (trace.path / "zarr.json").write_text(json.dumps(manifest))
    assert "see [/tmp/x] [red]now" in run("trace", "info", trace.path).stdout
    assert "a[b]" in run("replay", "--trace", trace.path, "--policy", "ema", "-q").stdout


def test_globs_pass_over_rows_kept_beside_a_trace(tmp_path):
    write_trace(tmp_path / "runs" / "a", capture="qk")
    first = run("replay", "--trace", tmp_path / "runs" / "*", "--policy", "tova", "--store-rows", "--json").stdout
    assert (tmp_path / "runs" / "a.rows").is_dir()
    assert run("replay", "--trace", tmp_path / "runs" / "*", "--policy", "tova", "--json").stdout == first


def test_a_full_disk_is_an_error_and_leaves_nothing(trace, tmp_path, monkeypatch):
    def full(self, file, *args, **kwargs):
        raise pl.exceptions.ComputeError("No space left on device (os error 28)")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", full)
    result = run("replay", "--trace", trace.path, "--policy", "ema", "--out", tmp_path / "x" / "y" / "o", "-q", code=2)
    assert "No space left on device" in result.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("words", [["trace", "info"], ["trace", "verify"], ["trace", "repair"]])
def test_impossible_paths_are_one_line_errors(words):
    result = run(*words, "n" * 300, code=2)
    assert result.stderr.startswith("kvsim: error: ")
    assert result.stderr.count("\n") == 1


def test_policies_lists_and_explains():
    listing = run("policies").stdout
    for word in ("ema", "tova", "vnorm", "single/group=layer", "axes"):
        assert word in listing
    assert "Eq. 4" in run("policies", "ema").stdout
    assert "cumulative:start=prompt/group=head" in run("policies", "h2o/budget=10%").stdout
    assert "overflow:P%" in run("policies", "when").stdout
    assert "local window" in run("policies", "admit").stdout
    assert "wgkv (admission)" in run("policies", "wgkv").stdout
    assert "quest (selection)" in run("policies", "quest").stdout
    assert "sink (argument of the admission local)" in run("policies", "sink").stdout
    both = run("policies", "keydiff").stdout
    assert "(preset)" in both
    assert "(scorer)" in both
    entries = json.loads(run("policies", "--json").stdout)
    assert {"ema", "tova", "keydiff"} <= {entry["name"] for entry in entries["policies"]}
    assert "did you mean 'tova'" in run("policies", "tovaa", code=2).stderr


def test_record_refuses_bad_requests_before_loading_anything(tmp_path):
    prompt = tmp_path / "p.txt"
    prompt.write_text("hello")
    common = ["record", "--model", tmp_path / "none", "--out", tmp_path / "o"]
    assert "--steps" in run(*common, "--prompt", prompt, "--steps", "0", code=2).stderr
    assert "none" in run(*common, "--prompt", prompt, code=2).stderr
    assert "No such file" in run(*common, "--prompt", tmp_path / "q.txt", code=2).stderr
    empty = tmp_path / "e.txt"
    empty.write_text(" \n")
    assert "is empty" in run(*common, "--prompt", empty, code=2).stderr
    assert not (tmp_path / "o").exists()


def test_help_reads_well():
    top = run("--help").stdout
    for command in ("replay", "record", "trace", "policies", "bench"):
        assert command in top
    assert "Fraction of the prompt REMOVED" in " ".join(run("replay", "--help").stdout.replace("│", " ").split())
    assert run("--version").stdout.strip() == f"kvsim {kvsim.__version__}"


def test_the_core_imports_without_torch_or_polars():
    code = (
        "import sys; import kvsim, kvsim_traces, kvsim.cli; "
        "bad = {'torch', 'transformers', 'triton', 'polars', 'altair', 'zarr'} & set(sys.modules); assert not bad, bad"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize("command", [["replay"], ["analyze", "floor", "--seeds", 2], ["analyze", "oracle"]])
def test_a_policy_that_one_recording_cannot_run_is_left_out_there(trace, tmp_path, command):
    means = write_trace(tmp_path / "runs" / "second", capture="scores")
    words = [*command, "--trace", tmp_path / "runs" / "*", "-q", "--policy", "h2o", "--budget", 8]
    both = run(*words, "--policy", "ema:0.8")
    assert both.stderr.startswith("left out: second: h2o/budget=8: group=head needs attention of single heads")
    assert both.stderr.count("\n") == 1
    found = json.loads(run(*words, "--policy", "ema:0.8", "--json").stdout)
    assert [(row["trace"], row["policy"].split("/")[0]) for row in found["results"]] == [
        ("first", "h2o"),
        ("first", "ema:0.8"),
        ("second", "ema:0.8"),
    ]
    assert [(one["trace"], one["policy"]) for one in found["left_out"]] == [("second", "h2o/budget=8")]
    assert "h2o" in run(*words).stdout
    alone = [*command, "--trace", means.path, "-q", "--policy", "h2o", "--budget", 8, "--policy", "ema:0.8"]
    assert "group=head needs" in run(*alone, code=2).stderr
    write_trace(tmp_path / "means" / "a", capture="scores")
    write_trace(tmp_path / "means" / "b", capture="scores")
    nowhere = [*command, "--trace", tmp_path / "means" / "*", "--policy", "h2o", "--policy", "ema:0.8"]
    assert run(*nowhere, code=2).stdout == "", "a policy that runs on none of them is an error"


def test_policies_explains_an_argument():
    output = run("policies", "over").stdout
    assert "over (argument of the rule ema)" in output
    assert "default: both" in output
    found = json.loads(run("policies", "alpha", "--json").stdout)
    owners = {one["of"] for one in found["entries"]}
    assert "ema" in owners
    assert "cumulative" not in owners
    assert all(one["name"] == "alpha" and "alpha" in one["doc"] for one in found["entries"])
    assert "did you mean 'alpha'" in run("policies", "alhpa", code=2).stderr


def test_an_argument_of_the_scorer_is_not_one_of_the_preset(trace):
    for word, hint in (("knorm:sign=plus", True), ("knorm:sine=plus", False)):
        message = run("replay", "--trace", trace.path, "--policy", f"{word}/budget=8", code=2).stderr
        assert f"policy 'knorm' takes no arguments, got '{word[6:]}'" in message
        assert ("; its scorer does: single/score=knorm:sign=plus/group=head" in message) == hint


def options(group):
    """Give each option of a group's commands: name of the parameter, and what was said of it."""
    for command in group.registered_commands:
        for name, parameter in inspect.signature(command.callback).parameters.items():
            for said in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(said, OptionInfo):
                    yield name, said
    for inner in group.registered_groups:
        yield from options(inner.typer_instance)


def test_options_are_lower_case_in_every_typer():
    """Some versions of typer (0.27) write a flag as its metavar, --POLICY, where that is the same word."""
    found = list(options(app))
    assert len(found) > 100
    for name, said in found:
        same_word = said.metavar is not None and said.metavar.lower() == name
        # In Annotated the first flag is where a default would be.
        assert not same_word or f"--{name}" in (said.default, *said.param_decls), name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("analyze momentum", ["one layer 1 - A, one step 1 - A^K", "carried:", "one layer (1 - A) / K"]),
        ("analyze stability", ["alpha^K for ema:alpha", "misranked:", "shuffled:", "viol. (violated):"]),
        ("trace synth", ["by default halfway"]),
        ("bench oracle", ["about a minute", "670 MiB"]),
    ],
)
def test_help_defines_what_the_tables_say(words, told):
    text = " ".join(run(*words.split(), "--help").stdout.replace("│", " ").split())
    assert [word for word in told if word not in text] == []


def test_a_policy_folds_between_its_axes():
    policy = "ema:0.8,over=step/refresh=4/group=layer/protect=sink:1+recent:50%"
    assert fold(policy, 100) == [policy]
    assert fold(policy, 40) == ["ema:0.8,over=step/refresh=4/group=layer", "/protect=sink:1+recent:50%"]
    assert fold(policy, 20)[:3] == ["ema:0.8,over=step", "/refresh=4", "/group=layer"]
    assert fold(policy, 20)[3:] == ["/protect=sink:1+", "recent:50%"]
    assert "".join(fold(policy, 1)) == policy


def test_a_table_folds_a_policy_between_its_axes(trace, monkeypatch):
    monkeypatch.setattr("kvsim.cli.output.console", Console(width=80))
    policy = "ema:0.8,over=step/refresh=4/group=layer/protect=sink:1+recent:2"
    lines = run("replay", "--trace", trace.path, "--policy", policy, "--budget", 9).stdout.splitlines()
    own = [line.split()[0] for line in lines if line.startswith(("ema", "/"))]
    assert len(own) > 1
    assert "".join(own) == policy
    assert all(piece.startswith(("ema", "/")) for piece in own)


def test_replay_says_what_it_cannot_see_of_admission(trace):
    words = ["replay", "--trace", trace.path, "-q", "--budget", 8, "--policy", "ema:0.8"]
    plain = run(*words).stdout
    assert "admission" not in plain
    assert "cache" not in plain
    admitting = run(*words, "--policy", "tova/admit=local:window=4,sink=2", "--policy", "full/select=topk:4").stdout
    assert "admission acts on the prompt too, whose hidden states a replay leaves as they were recorded" in admitting
    assert "select: kept mass and output error are those of what is read" in admitting
    for word in ("cache", "admit-"):
        assert word in admitting
    (row,) = json.loads(run(*words[:-2], "--policy", "full/admit=random:0.5,window=4", "--json").stdout)["results"]
    assert row["triggers"] == 0
    assert row["group"] == "head"
    assert 0 < row["cache_size"] < 1
    assert 0 < row["admitted"] < 1
    assert "no meaning there" in run(*words, "--policy", "full/admit=local:window=4", "--shadow", code=2).stderr
    error = run(*words, "--policy", "full/admit=wgkv:none.safetensors", code=2).stderr
    assert error.startswith("kvsim: error: full/admit=wgkv:none.safetensors: none.safetensors: no such file")
    assert error.count("\n") == 1
