"""Training a write gate: it learns, it resumes, and its checkpoints survive."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kvsim_traces import files
from recording import VOCAB, tiny
from safetensors.numpy import load_file, save_file

from kvsim import KvsimError
from kvsim.gating import train as train_module
from kvsim.gating.checkpoint import State, load_state, save_state
from kvsim.gating.module import Gates
from kvsim.gating.run import train_to
from kvsim.gating.settings import Settings, numbers
from kvsim.gating.sweep import mark_frontier, sweep
from kvsim.gating.train import checkpoint_path, train
from kvsim.gating.validate import validate
from kvsim.write_gate import load_gate

SMALL = Settings(
    penalty=0.5,
    window=4,
    steps=6,
    batch=2,
    length=24,
    learning_rate=1e-2,
    hidden=8,
    taus=(0.1, 0.5),
    checkpoint_every=2,
)


def samples(count, length=24, seed=0):
    """Tokens that repeat, so that far keys matter."""
    rng = np.random.default_rng(seed)
    return np.tile(rng.integers(0, VOCAB, (count, length // 2)), 2)


@pytest.fixture(scope="module")
def model():
    return tiny("llama-gqa3", num_hidden_layers=2)


class StoppedError(Exception):
    pass


def stop_at(step):
    def tell(done, *_):
        if done == step:
            raise StoppedError

    return tell


def test_training_lowers_the_loss_and_the_cache_size(model):
    settings = replace(SMALL, steps=40, learning_rate=2e-2)
    before = [parameter.clone() for parameter in model.parameters()]
    gate, report = train(model, samples(8), samples(3, seed=1), settings)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    totals = [row["distill"] + settings.penalty * row["sparsity"] for row in report.history]
    assert np.mean(totals[-5:]) < 0.9 * np.mean(totals[:5])
    sizes = [row["cache_size"] for row in report.history]
    assert sizes[0] == 1.0
    assert np.mean(sizes[-5:]) < 0.9
    rows, local, full = (report.validation[name] for name in ("rows", "local", "full"))
    assert [row["tau"] for row in rows] == [0.1, 0.5]
    assert full["loss"] < 1e-9 < rows[0]["loss"] < local["loss"]
    assert local["cache_size"] == pytest.approx(4 / 24)
    assert 4 / 24 < rows[1]["cache_size"] <= rows[0]["cache_size"] < 1
    assert report.updates == 40
    assert report.tokens == 40 * 2 * 24
    assert gate.layers == (0, 1)
    assert (gate.window, gate.tau, gate.penalty, gate.hidden) == (4, 0.1, 0.5, 8)
    json.dumps(report.facts(), allow_nan=False)


def test_the_loss_is_what_the_docstring_says(model):
    tokens = samples(2)
    _, report = train(model, tokens, tokens, replace(SMALL, steps=1))
    from kvsim.gating.attention import plain_write_gated
    from kvsim.gating.watcher import GatedAttention, frozen, hidden_states

    gates = Gates((0, 1), 2, 16, 8, seed=0)
    watcher = GatedAttention(gates, plain_write_gated, window=4)
    with torch.no_grad():
        full = model(torch.from_numpy(tokens), output_hidden_states=True).hidden_states[-1]
        with frozen(model, watcher):
            own = hidden_states(model, torch.from_numpy(tokens), watcher)
    distance = sum(float(((own[b, n] - full[b, n]) ** 2).sum()) for b in range(2) for n in range(24))
    g = watcher.gates()
    assert report.history[0]["distill"] == pytest.approx(distance / (2 * 24 * model.config.hidden_size), rel=1e-4)
    assert report.history[0]["sparsity"] == pytest.approx(float((2 * g - g * g).mean()), rel=1e-5)


def test_the_rate_rises_then_falls_along_a_cosine():
    settings = replace(SMALL, steps=100, learning_rate=1.0)
    rates = [settings.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[99] == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    assert replace(SMALL, warmup=0, steps=4).rate(0) == SMALL.learning_rate


def test_a_run_is_a_function_of_its_seed(model):
    found = [train(model, samples(6), samples(1), replace(SMALL, steps=2, seed=seed))[0] for seed in (0, 0, 1)]
    assert found[0].hash == found[1].hash != found[2].hash


@pytest.mark.parametrize("stopped", [3, 4])
def test_a_resumed_run_is_equal_to_the_bit(model, tmp_path, stopped):
    data = samples(6), samples(1)
    whole, whole_report = train(model, *data, SMALL)
    out = tmp_path / "gate.safetensors"
    with pytest.raises(StoppedError):
        train_to(out, model, *data, SMALL, progress=stop_at(stopped))
    assert checkpoint_path(out).exists()
    with pytest.raises(KvsimError, match="a run has begun; go on with --resume"):
        train_to(out, model, *data, SMALL)
    seen = []
    gate, report = train_to(out, model, *data, SMALL, resume=True, progress=lambda done, *_: seen.append(done))
    assert seen[0] == stopped // 2 * 2 + (1 if stopped % 2 else -1), "from the last whole checkpoint"
    for name in ("w1", "b1", "w2", "b2"):
        assert np.array_equal(getattr(gate, name), getattr(whole, name)), name
    assert report.history == whole_report.history
    assert report.updates == len(seen)
    assert load_gate(out).hash == whole.hash
    assert [path.name for path in tmp_path.iterdir()] == ["gate.safetensors"], "no checkpoint, nothing aside"


@pytest.mark.parametrize("every", [2, 4, 5])
def test_what_stops_the_validation_costs_no_update(model, tmp_path, monkeypatch, every):
    data, out = (samples(6), samples(1)), tmp_path / "gate.safetensors"
    own = replace(SMALL, checkpoint_every=every)
    monkeypatch.setattr(train_module, "validate", lambda *_: stop_at(0)(0))
    with pytest.raises(StoppedError):
        train_to(out, model, *data, own)
    monkeypatch.undo()
    gate, report = train_to(out, model, *data, own, resume=True)
    assert (report.updates, len(report.history)) == (0, SMALL.steps)
    assert gate.hash == train(model, *data, own)[0].hash


def test_a_killed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "c"
    arrays = {f"w{part}": np.ones(3, np.float32) for part in ("", ".exp_avg", ".exp_avg_sq")}
    save_state(State(2, arrays, np.zeros((2, 4)), {"a": 1}), path)
    old = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "rename", fail)
    with pytest.raises(KvsimError, match=r"c: cannot write the checkpoint \(disk full"):
        save_state(State(3, arrays, np.zeros((3, 4)), {"a": 1}), path)
    assert path.read_bytes() == old
    assert [one.name for one in tmp_path.iterdir()] == ["c"]
    assert load_state(path, {"w": (3,)}, {"a": 1}).step == 2


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = tmp_path / "c"
    arrays = {f"w{part}": np.ones(3, np.float32) for part in ("", ".exp_avg", ".exp_avg_sq")}

    def refused(message, shapes=None, facts=None):
        with pytest.raises(KvsimError, match=message):
            load_state(path, shapes or {"w": (3,)}, facts or {"a": 1})

    refused("c: no such file; there is no checkpoint to resume from")
    path.write_bytes(b"PK\x03\x04")
    refused("c: cannot be read")
    save_file(arrays, path)
    refused("c: is not a checkpoint of format 1")
    save_state(State(2, arrays, np.zeros((2, 4)), {"a": 1}), path)
    refused("is of a run with a 1, not 2; resume with the settings", facts={"a": 2})
    refused("is of a run with b None, not 2", facts={"a": 1, "b": 2})
    refused("its arrays are not those of this run", shapes={"w": (4,)})
    refused("its arrays are not those of this run", shapes={"w": (3,), "v": (1,)})
    save_state(State(3, arrays, np.zeros((2, 4)), {"a": 1}), path)
    refused("is not a checkpoint")
    save_state(State(2, {**arrays, "w": arrays["w"] * np.nan}, np.zeros((2, 4)), {"a": 1}), path)
    refused("not finite")


def test_resuming_with_other_settings_or_data_is_refused(model, tmp_path):
    out, data = tmp_path / "g", (samples(6), samples(1))
    with pytest.raises(StoppedError):
        train_to(out, model, *data, SMALL, progress=stop_at(3))
    for settings, tokens, name in (
        (replace(SMALL, penalty=0.1), data[0], "penalty 0.5, not 0.1"),
        (SMALL, samples(6, seed=4), "data_hash"),
    ):
        with pytest.raises(KvsimError, match=f"is of a run with {name}"):
            train_to(out, model, tokens, data[1], settings, resume=True)
    with pytest.raises(KvsimError, match="there is no checkpoint to resume from"):
        train_to(tmp_path / "other", model, *data, SMALL, resume=True)


def test_what_does_not_fit_is_refused(model):
    for samples_, held_out, message in (
        (samples(2, 20), samples(1), r"samples: must be \[N, 24\] with N of at least 1, got \[2, 20\]"),
        (samples(2), samples(2)[:0], r"held_out: must be \[N, 24\]"),
        (samples(2) + VOCAB, samples(1), "samples: tokens must be in 0..60, got 6"),
    ):
        with pytest.raises(KvsimError, match=message):
            train(model, samples_, held_out, SMALL)
    with pytest.raises(KvsimError, match="length 200: the model takes at most 128 tokens"):
        train(model, samples(2, 200), samples(1, 200), replace(SMALL, length=200))
    with pytest.raises(KvsimError, match="no key leaves a window of 24 in a sample of 24 tokens"):
        train(model, samples(2), samples(1), replace(SMALL, window=24))
    with pytest.raises(KvsimError, match="attention 'flex' trains on a CUDA GPU only"):
        train(model, samples(2), samples(1), replace(SMALL, attention="flex"))


def test_a_run_that_diverges_says_so(model, monkeypatch):
    monkeypatch.setattr(train_module, "_update", lambda *_: (math.nan, 1.0, 1.0))
    with pytest.raises(KvsimError, match="training diverged at update 1"):
        train(model, samples(2), samples(1), SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"window": 0}, "window must be at least 1"),
        ({"penalty": -0.1}, "penalty must be at least 0"),
        ({"tau": math.nan}, "tau must be at least 0"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"warmup": 2}, "warmup must be between 0 and 1"),
        ({"taus": ()}, "taus must be one or more"),
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"attention": "fast"}, "attention must be one of auto, plain, flex, got 'fast'"),
        ({"steps": 10**6}, r"1000000 steps of 2 x 24 tokens are 48,000,000, more than max_tokens \(6,000,000\)"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(KvsimError, match=message):
        replace(SMALL, **changes)


def test_numbers_are_read():
    assert numbers("0.05,1", "--taus") == (0.05, 1.0)
    for text in ("", "a", "0.1;0.2", "nan", "-1"):
        with pytest.raises(KvsimError, match="--taus"):
            numbers(text, "--taus")


def test_validation_at_the_edges(model):
    gates = Gates((0, 1), 2, 16, 8)
    found = validate(model, gates, samples(2), replace(SMALL, window=24, taus=(0.0, 2.0)))
    for row in (*found["rows"], found["local"], found["full"]):
        assert row["cache_size"] == 1.0
        assert row["loss"] < 1e-9
    found = validate(model, gates, samples(2), replace(SMALL, window=1, taus=(0.0, 2.0)))
    nothing, everything = found["rows"][1], found["rows"][0]
    assert nothing == {"tau": 2.0, **found["local"]}
    assert everything == {"tau": 0.0, **found["full"]}
    assert nothing["cache_size"] == pytest.approx(1 / 24)
    assert nothing["loss"] > 1e-2


def test_a_sweep_writes_its_trade_off(model, tmp_path):
    folder = tmp_path / "sweep"
    found = sweep(folder, model, samples(6), samples(1), replace(SMALL, steps=2), [(0.1, 4), (0.1, 1)])
    names = ["gate-lambda0.1-window1.safetensors", "gate-lambda0.1-window4.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == ["frontier.csv", "frontier.json", *names]
    assert json.loads((folder / "frontier.json").read_text()) == json.loads(json.dumps(found))
    lines = (folder / "frontier.csv").read_text().splitlines()
    assert lines[0] == "penalty,window,tau,loss,cache_size,admitted,on_frontier"
    assert len(lines) == 1 + 4 == 1 + len(found["points"])
    assert load_gate(folder / names[0]).window == 1
    with pytest.raises(KvsimError, match="exists already; a sweep takes a new folder"):
        sweep(folder, model, samples(6), samples(1), SMALL, [(0.1, 4)])


def test_the_frontier_is_of_each_window():
    points = [
        {"window": window, "cache_size": size, "loss": loss}
        for window, size, loss in ((4, 0.5, 0.1), (4, 0.6, 0.2), (4, 0.4, 0.3), (4, 0.5, 0.1), (1, 0.9, 0.9))
    ]
    mark_frontier(points)
    assert [point["on_frontier"] for point in points] == [True, False, True, True, True]


def test_checkpoints_are_no_pickles(model, tmp_path):
    out = tmp_path / "g"
    with pytest.raises(StoppedError):
        train_to(out, model, samples(6), samples(1), SMALL, progress=stop_at(3))
    held = load_file(checkpoint_path(out))
    assert sorted(held) == sorted(
        ["history", *(f"{name}{part}" for name in ("w1", "b1", "w2", "b2") for part in ("", ".exp_avg", ".exp_avg_sq"))]
    )
    assert held["history"].shape == (2, 4)
