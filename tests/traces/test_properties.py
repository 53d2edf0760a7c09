"""What is written is read back, whatever the shapes."""

import tempfile
from pathlib import Path

import numpy as np
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsim_traces import TraceWriter, export_npz, import_npz, open_trace, repair_trace, verify_trace
from making import Recording

recordings = st.builds(
    lambda kv_heads, group, **sizes: Recording(kv_heads=kv_heads, heads=kv_heads * group, **sizes),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    prompt=st.integers(1, 40),
    steps=st.integers(1, 36),
    layers=st.integers(1, 4),
    dim=st.integers(1, 5),
    window=st.integers(1, 8),
    seed=st.integers(0, 2**16),
)


@settings(max_examples=40, deadline=None)
@given(
    recording=recordings,
    capture=st.sampled_from(["heads", "scores", "qk", "qkv"]),
    spare=st.integers(0, 30),
    commits=st.sets(st.integers(1, 36), max_size=4),
    closed=st.booleans(),
    data=st.data(),
)
def test_round_trip(
    recording: Recording, capture: str, spare: int, commits: set[int], closed: bool, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t"
        manifest = recording.manifest(capture, planned_steps=recording.steps + spare)
        writer = TraceWriter(path, manifest)
        writer.write_prompt(**recording.prompt_arguments(manifest.arrays))
        for step in range(1, recording.steps + 1):
            writer.append(**recording.step_arguments(step, manifest.arrays))
            if step in commits:
                writer.commit()
        if closed:
            writer.close()
        else:
            writer.commit()
            writer._release()
            open_trace(path).attention_rows(1) if capture != "scores" else open_trace(path).score_rows(1)
            assert repair_trace(path).ok
        assert verify_trace(path).ok
        trace = open_trace(path)
        group = zarr.open_group(path, mode="r")
        assert trace.num_steps == recording.steps
        for step in range(1, recording.steps + 1):
            want = recording.attention[step - 1]
            if capture == "scores":
                np.testing.assert_allclose(trace.score_rows(step), want.mean(axis=1), rtol=2**-11, atol=2**-40)
            if capture == "heads":
                np.testing.assert_allclose(trace.attention_rows(step), want, rtol=2**-11, atol=2**-40)
                np.testing.assert_array_equal(
                    group["attention"][step - 1, ..., : want.shape[-1]], trace.stored_rows(step)
                )
            if trace.has("queries"):
                np.testing.assert_array_equal(trace.queries(step), recording.queries[step - 1])
        for name in ("keys", "values"):
            if trace.has(name):
                for layer in range(trace.num_layers):
                    np.testing.assert_array_equal(getattr(trace, name)(layer), getattr(recording, name)[layer])
        np.testing.assert_array_equal(trace.prompt_queries(), recording.prompt_queries)
        np.testing.assert_array_equal(trace.prompt_mass(), recording.prompt_mass)
        np.testing.assert_array_equal(trace.tokens, recording.tokens)
        assert [trace.token_bytes(index) for index in range(trace.num_positions)] == recording.texts
        if data.draw(st.booleans()):
            export_npz(trace, path.with_suffix(".npz"))
            again = import_npz(path.with_suffix(".npz"), path.with_name("again"))
            step = data.draw(st.integers(1, recording.steps))
            np.testing.assert_array_equal(again.score_rows(step), trace.score_rows(step))
            assert again.texts() == trace.texts()
