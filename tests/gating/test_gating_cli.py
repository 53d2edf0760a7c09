"""``kvsim train-gate``, ``python -m kvsim.train_gate`` and ``kvsim duo-heads``."""

import json
import subprocess
import sys
from dataclasses import fields

import pytest
from recording import tiny
from token_texts import byte_level
from typer.testing import CliRunner

from kvsim import train_gate
from kvsim.cli import app
from kvsim.gating.settings import Settings
from kvsim.gating.train import checkpoint_path
from kvsim.write_gate import load_gate


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and a text."""
    folder = tmp_path_factory.mktemp("gating")
    tiny("llama-gqa3", num_hidden_layers=2, vocab_size=300, max_position_embeddings=1024).save_pretrained(folder / "m")
    byte_level().save_pretrained(folder / "m")
    (folder / "text.txt").write_text("the other day this and that happened to them. " * 12)
    return folder


def options(place, **changes):
    given = {"model": place / "m", "data": place / "text.txt", "steps": 2, "length": 80, "window": 8, "hidden": 4}
    given |= {"held-out": 1, "device": "cpu", "lambda": 0.5} | changes
    return [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]


def kvsim(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_a_gate_is_trained_and_told_of(place, tmp_path):
    out = tmp_path / "g.safetensors"
    result = kvsim("train-gate", *options(place, out=out))
    assert result.exit_code == 0, result.output
    assert "update 2/2  loss " in result.stderr
    assert result.stdout.splitlines()[0].split() == ["tau", "loss", "cache", "size", "admitted"]
    assert f"wrote {out}: " in result.stdout
    gate = load_gate(out)
    assert (gate.window, gate.penalty, gate.hidden, gate.model) == (8, 0.5, 4, "m")
    assert gate.training["steps"] == 2
    again = kvsim("train-gate", *options(place, out=out))
    assert again.exit_code == 2
    assert f"--out {out}: exists already" in again.stderr


def test_both_entries_train_the_same_gate_and_print_the_same_json(place, tmp_path, capsys):
    result = kvsim("train-gate", *options(place, out=tmp_path / "a"), "--json")
    assert result.exit_code == 0, result.output
    capsys.readouterr()
    assert train_gate.main([*options(place, out=tmp_path / "b"), "--json"]) == 0
    ours, theirs = json.loads(result.stdout), json.loads(capsys.readouterr().out)
    assert ours["hash"] == theirs["hash"] == load_gate(tmp_path / "a").hash
    assert ours["validation"] == theirs["validation"]
    assert ours.keys() == theirs.keys()
    assert len(ours["history"]["distill"]) == 2


def test_both_entries_have_the_same_options_and_defaults():
    import typer

    command = typer.main.get_command(app).commands["train-gate"]
    ours = {one for parameter in command.params for one in parameter.opts if one.startswith("--")}
    parser = train_gate.argparse.ArgumentParser()
    train_gate.add_settings(parser)
    theirs = {one for action in parser._actions for one in action.option_strings if one.startswith("--")} - {"--help"}
    assert theirs <= ours
    assert {f"--{field.name.replace('_', '-')}" for field in fields(Settings)} - {"--penalty"} | {"--lambda"} == theirs
    assert train_gate.settings_of(parser.parse_args([])) == Settings()


def test_a_sweep_trains_several(place, tmp_path):
    out = tmp_path / "sweep"
    result = kvsim("train-gate", *options(place, out=out, sweep="0.1,0.9", taus="0.1,0.5"))
    assert result.exit_code == 0, result.output
    assert sorted(path.suffix for path in out.iterdir()) == [".csv", ".json", ".safetensors", ".safetensors"]
    points = json.loads((out / "frontier.json").read_text())["points"]
    assert [(point["penalty"], point["tau"]) for point in points] == [(0.1, 0.1), (0.1, 0.5), (0.9, 0.1), (0.9, 0.5)]
    assert "wrote" in result.stdout
    assert kvsim("train-gate", *options(place, out=out, sweep="0.1")).exit_code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "none.txt"}, "none.txt: cannot be read"),
        ({"held-out-data": "none.txt"}, "none.txt: cannot be read"),
        ({"held-out": 50}, "50 are held out, so none is left to train on"),
        ({"length": 20}, "length 20: the instruction alone has 49 tokens"),
        ({"length": 2000}, "length 2000"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"taus": "a"}, "--taus a: must be numbers with commas between them"),
        ({"sweep": ""}, "--sweep"),
        ({"model": "none"}, "none: no such model"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"attention": "flex"}, "attention 'flex' trains on a CUDA GPU only"),
        ({"steps": 10**9}, "more than max_tokens"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(place, tmp_path, changes, message, capsys):
    arguments = options(place, out=tmp_path / "g", **changes)
    result = kvsim("train-gate", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert train_gate.main([*arguments, "-q"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvsim: error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "g").exists()


def test_resume_without_a_run_is_refused(place, tmp_path):
    result = kvsim("train-gate", *options(place, out=tmp_path / "g"), "--resume")
    assert result.exit_code == 2
    assert "there is no checkpoint to resume from" in result.stderr
    result = kvsim("train-gate", *options(place, out=tmp_path / "g", sweep="0.1"), "--resume")
    assert "--resume goes with one gate, not with --sweep" in result.stderr


def test_heads_are_found_and_written(place, tmp_path):
    out = tmp_path / "heads.json"
    given = {"model": place / "m", "task": "niah_single_1", "length": 900, "steps": 2, "samples": 2, "window": 16}
    arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
    result = kvsim("duo-heads", *arguments, "--out", out, "--device", "cpu", "--sink", 4)
    assert result.exit_code == 0, result.output
    assert f"wrote {out}: 4 of 4 KV heads retrieve (alpha >= 0.5)" in result.stdout
    held = json.loads(out.read_text())
    assert (held["sink"], held["window"], held["model"]) == (4, 16, "m")
    again = kvsim("duo-heads", *arguments, "--out", out)
    assert again.exit_code == 2
    assert "exists already" in again.stderr
    wrong = kvsim("duo-heads", *arguments[2:], "--model", place / "m", "--out", tmp_path / "x", "--task", "nothing")
    assert wrong.exit_code == 2
    assert "unknown task 'nothing'" in wrong.stderr


def test_the_command_line_imports_no_torch_for_its_help():
    code = "import sys, kvsim.cli, kvsim.write_gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("every", [1, 0])
def test_a_run_that_is_stopped_says_how_to_go_on(place, tmp_path, monkeypatch, capsys, every):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvsim.gating.train.validate", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_gate.main(options(place, out=tmp_path / "g", **{"checkpoint-every": every}))
    said = "stopped; --resume goes on from the last checkpoint" in capsys.readouterr().err
    assert said == bool(every) == checkpoint_path(tmp_path / "g").exists()
