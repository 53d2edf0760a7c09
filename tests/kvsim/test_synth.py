"""Synthetic recordings: ordinary traces whose utilities are known."""

import numpy as np
import pytest
from cases import write_trace
from kvsim_traces import open_trace, verify_trace
from typer.testing import CliRunner

import kvsim
from kvsim.cli import app
from kvsim.errors import KvsimError
from kvsim.synth import KINDS, Synthetic, synthetic_of, write_synthetic


def spec_of(kind, **given):
    return Synthetic(
        kind, **{"prompt": 50, "steps": 20, "layers": 3, "heads": 2, "drift": 0.1 * (kind == "drift")} | given
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("noise", [0, 0.3, 5])
def test_rows_are_those_of_a_trace(tmp_path, kind, noise):
    spec = spec_of(kind, noise=noise)
    trace = write_synthetic(spec, tmp_path / "t")
    assert verify_trace(trace.path).ok
    assert synthetic_of(open_trace(trace.path)) == spec
    for step in (1, 20):
        rows = spec.rows(step)
        assert rows.shape == (3, 2, 50 + step)
        assert (rows >= 0).all()
        assert np.allclose(rows.sum(axis=-1), 1, atol=1e-12)
        if not noise:
            assert np.array_equal(trace.attention_rows(step), np.repeat(spec.utilities(step)[:, None], 2, axis=1))
    assert kvsim.replay(trace, "ema:0.8").summary()["kept_mass"] > 0.3


def test_the_same_recipe_makes_the_same_recording(tmp_path):
    one, same, other = (
        write_synthetic(spec_of("shift", seed=s), tmp_path / n) for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    rows = [trace.attention_rows(7) for trace in (one, same, other)]
    assert np.array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])


def test_iid_scores_are_independent_around_the_utility():
    spec = Synthetic(prompt=30, steps=4000, layers=1, heads=1, noise=0.5)
    scores = np.stack([spec.rows(step)[0, 0, 1:30] for step in range(1, 4001)])
    u = spec.utilities(1)[0, 1:30]
    z = (scores / u - 1) / 0.5
    assert np.abs(z.mean(axis=0)).max() < 4.5 / np.sqrt(4000)
    assert np.abs(z.std(axis=0) - 1).max() < 0.1
    tokens = np.corrcoef(z.T) - np.eye(29)
    steps = (z[1:] * z[:-1]).mean(axis=0)
    assert np.abs(tokens).max() < 5 / np.sqrt(4000)
    assert np.abs(steps).max() < 5 / np.sqrt(4000)


def test_kinds_do_what_they_say():
    iid, drift, shift, heavy, sink = (spec_of(kind, noise=0, prompt=400) for kind in KINDS)
    assert np.array_equal(iid.utilities(1)[:, 1:], iid.utilities(20)[:, 1:401])
    now, soon, late = (drift.utilities(step)[0, 1:401] for step in (1, 2, 16))
    correlation = np.corrcoef([now, soon, late])
    assert correlation[0, 1] > 0.98 > 0.5 > correlation[0, 2]
    assert shift.shift_at == 11
    before, eve, after = (shift.utilities(step)[0, 1:401] for step in (1, 10, 11))
    assert np.array_equal(before, eve)
    assert np.corrcoef(before, after)[0, 1] < 0.3
    share = [np.sort(spec.utilities(1)[0, 1:])[-4:].sum() / spec.utilities(1)[0, 1:].sum() for spec in (iid, heavy)]
    assert share[1] > 2 * share[0]
    assert (sink.utilities(1)[:, 1:4] > 5 * np.median(sink.utilities(1), axis=1, keepdims=True)).all()


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"kind": "iidd"}, "did you mean 'iid'"),
        ({"noise": -1}, "noise"),
        ({"noise": float("nan")}, "noise"),
        ({"noise": 1e-9}, "noise"),
        ({"drift": 0.1}, "use kind drift"),
        ({"kind": "drift", "drift": float("inf")}, "drift"),
        ({"shift_at": 3}, "use kind shift"),
        ({"kind": "shift", "shift_at": 65}, "from 1 to 64"),
        ({"steps": 0}, "steps"),
        ({"layers": True}, "layers"),
        ({"heads": 1.0}, "heads"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_recipes_are_refused(given, word):
    with pytest.raises(KvsimError, match=word):
        Synthetic(**given)
    with pytest.raises(KvsimError, match="step"):
        Synthetic().utilities(0)


def test_only_synthetic_recordings_have_a_recipe(tmp_path):
    assert synthetic_of(write_trace(tmp_path / "t")) is None
    model = {"name": "x", "config": {"model_type": "kvsim-synthetic"}, "config_hash": None, "weights_hash": None}
    with pytest.raises(KvsimError, match="another shape"):
        synthetic_of(write_trace(tmp_path / "u", model=model))
    model["config"]["noise"] = "much"
    with pytest.raises(KvsimError, match="no recipe"):
        synthetic_of(write_trace(tmp_path / "v", model=model))


def test_the_command(tmp_path):
    def run(*words, code=0):
        result = CliRunner().invoke(app, ["trace", "synth", *map(str, words)])
        assert result.exit_code == code, (result.output, result.stderr)
        return result

    words = ["--kind", "shift", "--shift-at", 5, "--noise", 0.2, "--seed", 4]
    shape = ["--heads", 3, "--layers", 2, "--steps", 9, "--prompt", 30]
    assert "wrote" in run("--out", tmp_path / "t", *words, *shape).stdout
    want = Synthetic("shift", prompt=30, steps=9, layers=2, heads=3, noise=0.2, shift_at=5, seed=4)
    assert synthetic_of(open_trace(tmp_path / "t")) == want
    run("--out", tmp_path / "d", "--kind", "drift", "--steps", 3)
    assert synthetic_of(open_trace(tmp_path / "d")).drift == 0.05
    assert "noise" in run("--out", tmp_path / "n", "--noise", -1, code=2).stderr
    assert not (tmp_path / "n").exists()
    run("--out", tmp_path / "t", code=2)
