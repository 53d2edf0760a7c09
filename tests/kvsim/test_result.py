"""A result in the hands of a user: the set of a group, and one line to look at."""

import pytest
from cases import write_trace

import kvsim


def test_a_set_of_several_groups_must_be_named(tmp_path):
    trace = write_trace(tmp_path / "t")
    shared, layered, headed = (kvsim.replay(trace, f"ema:0.8/group={kind}") for kind in ("shared", "layer", "head"))
    assert shared.retained(3).tolist() == shared.retained(3, 0).tolist()
    assert layered.retained(3, group=1).size == layered.budget
    with pytest.raises(kvsim.KvsimError, match=r"3 retention groups: name one, group=0 \(layer 0\) to 2 \(layer 2\)"):
        layered.retained(3)
    with pytest.raises(kvsim.KvsimError, match=r"group=0 \(layer 0 head 0\) to 5 \(layer 2 head 1\)"):
        headed.retained(3)


def test_a_result_shows_in_one_line(tmp_path):
    trace = write_trace(tmp_path / "t")
    result = kvsim.replay(trace, "ema:0.8", budget=5)
    mass = result.summary()["kept_mass"]
    assert repr(result) == f"Result('ema:0.8/budget=5', 't', 'irreversible', loop='open', kept_mass={mass:.4f})"
    assert "'shadow'" in repr(kvsim.replay(trace, "ema:0.8", budget=5, shadow=True))
