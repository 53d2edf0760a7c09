"""Any Zarr v3 reader opens a trace; here zarr-python."""

from pathlib import Path

import numpy as np
import pytest
import zarr
from making import Recording

RECORDING = Recording()


@pytest.mark.parametrize("planned", [21, 50])
@pytest.mark.parametrize("capture", ["heads", "scores", "qkv"])
def test_every_array_reads_exactly(tmp_path: Path, capture: str, planned: int) -> None:
    RECORDING.write(tmp_path / "t", capture, planned_steps=planned)
    group = zarr.open_group(tmp_path / "t", mode="r")
    arrays = dict(group.arrays())
    assert set(arrays) == set(group.attrs["kvsim"]["arrays"])
    want = {name: getattr(RECORDING, name) for name in ("tokens", "queries", "keys", "values")}
    want |= {name: getattr(RECORDING, name) for name in ("prompt_queries", "prompt_mass", "kvzip_scores")}
    want["text"] = np.frombuffer(b"".join(RECORDING.texts), np.uint8)
    want["text_ends"] = np.cumsum([len(text) for text in RECORDING.texts])
    rows = np.zeros((21, 3, 4, 34), np.float32)
    for step, row in enumerate(RECORDING.attention):
        rows[step, ..., : row.shape[-1]] = row
    want["attention"] = (rows * 32768).astype(np.float16)
    for step, row in enumerate(RECORDING.attention):
        rows[step, :, 0, : row.shape[-1]] = row.mean(axis=1)
    want["scores"] = (rows[:, :, 0] * 32768).astype(np.float16)
    want["row_sums"] = np.stack([row.sum(axis=-1) for row in RECORDING.attention])
    for name, array in arrays.items():
        found = array[...]
        assert found.shape == want[name].shape
        np.testing.assert_array_equal(found, want[name], err_msg=name)
    assert arrays["tokens"].metadata.dimension_names == ("position",)
    if capture == "heads":
        assert arrays["attention"].attrs["scale"] == 32768.0
        assert arrays["attention"].metadata.dimension_names == ("step", "layer", "head", "position")


def test_many_pieces(tmp_path: Path) -> None:
    recording = Recording(prompt=300, steps=40, layers=2, heads=2, kv_heads=1, dim=4)
    recording.keys = np.repeat(recording.keys, 1, axis=0)
    recording.write(tmp_path / "t", "qk", ["tokens"])
    assert len(list((tmp_path / "t" / "queries").glob("c.*"))) == 3
    group = zarr.open_group(tmp_path / "t", mode="r")
    np.testing.assert_array_equal(group["queries"][...], recording.queries)
    np.testing.assert_array_equal(group["keys"][...], recording.keys)


def test_zarr_python_sees_a_flipped_byte(tmp_path: Path) -> None:
    RECORDING.write(tmp_path / "t", "heads", [])
    piece = tmp_path / "t" / "attention" / "c.0.0.0.0"
    data = bytearray(piece.read_bytes())
    data[100] ^= 1
    piece.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_group(tmp_path / "t", mode="r")["attention"][0]
