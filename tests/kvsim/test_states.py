"""The state m after a step: the recurrence written out, and the sets that follow from it."""

import numpy as np
import pytest
from cases import write_trace

import kvsim
from kvsim import KvsimError
from kvsim.plan import GROUP_KINDS
from kvsim.states import states_after


def test_the_recurrence_written_out(tmp_path):
    trace = write_trace(tmp_path / "t", seed=3, steps=14)
    prompt, layers = trace.prompt_length, list(trace.eligible_layers)
    result = kvsim.replay(trace, "ema:0.6,over=step", budget=9, shadow=True)
    m = np.zeros(trace.num_positions)
    for t in range(1, 15):
        row = trace.attention_rows(t, layers).mean(axis=(0, 1), dtype=np.float64)
        m[: row.size] = 0.6 * m[: row.size] + 0.4 * row
        found = states_after(result, trace, t)[0]
        assert found[: row.size] == pytest.approx(m[: row.size], abs=1e-12)
        assert np.isnan(found[row.size :]).all()
    assert not states_after(result, trace, 0)[0, :prompt].any()


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_the_sets_are_the_highest_states(tmp_path, kind, shadow):
    trace = write_trace(tmp_path / "t", seed=4, steps=14)
    result = kvsim.replay(trace, f"ema:0.6/refresh=3/group={kind}", budget=9, shadow=shadow)
    for step in (1, 5, 14):
        states = states_after(result, trace, step)
        for group, own in enumerate(states):
            seen = np.flatnonzero(~np.isnan(own))
            order = seen[np.argsort(own[seen].astype(np.float32), kind="stable")]
            assert sorted(order[-9:].tolist()) == result.retained(step, group).tolist()
            if not shadow and step > 1:
                before = [*result.retained(step - 1, group).tolist(), trace.prompt_length + step - 1]
                assert seen.tolist() == before


def test_evicted_before_the_first_step(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1, steps=14)
    result = kvsim.replay(trace, "knorm/when=prefill", budget=9)
    states = states_after(result, trace, 0)[0]
    assert np.flatnonzero(~np.isnan(states)).tolist() == result.retained(0, 0).tolist()


def test_other_recordings_and_steps(tmp_path):
    trace = write_trace(tmp_path / "t", seed=1, steps=14)
    result = kvsim.replay(trace, "ema:0.6", budget=9)
    with pytest.raises(KvsimError, match=r"step must be in 0\.\.14"):
        states_after(result, trace, 15)
    other = write_trace(tmp_path / "u", seed=2, steps=14)
    with pytest.raises(KvsimError, match="is a replay of t"):
        states_after(result, other, 1)
