"""Every notebook runs from top to bottom and says what is checked in."""

import base64
import json
import math
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from pictures import packed
from rerun import HERE, cleaned, compact, run

NOTEBOOKS = sorted(HERE.glob("*.ipynb"))
VEGA = re.compile(r"application/vnd\.vegalite\.v\d+\+json")
OURS = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def charts(notebook):
    return [data for output in outputs(notebook) for kind, data in output.data.items() if VEGA.fullmatch(kind)]


def inlined(node, datasets):
    """A chart with its data in place: the names of data are hashes, which one digit changes."""
    if isinstance(node, dict):
        return {
            key: {"values": datasets[value["name"]]} if key == "data" and "name" in value else inlined(value, datasets)
            for key, value in node.items()
            if key != "datasets"
        }
    return [inlined(value, datasets) for value in node] if isinstance(node, list) else node


def same(now, before, where="chart"):
    """Compare charts; sums may differ in their last digits between machines."""
    if isinstance(before, dict):
        assert set(now) == set(before), where
        for key in before:
            same(now[key], before[key], f"{where}.{key}")
    elif isinstance(before, list):
        assert len(now) == len(before), where
        for index, (one, other) in enumerate(zip(now, before, strict=True)):
            same(one, other, f"{where}[{index}]")
    elif isinstance(before, float | int) and not isinstance(before, bool):
        assert math.isclose(now, before, rel_tol=1e-4, abs_tol=1e-9), where
    else:
        assert now == before, where


@pytest.mark.slow
@OURS
def test_a_notebook_says_what_it_says_today(path):
    before, now = nbformat.read(path, as_version=4), run(path)
    assert [cell.source for cell in now.cells] == [cell.source for cell in before.cells]
    for ours, theirs in zip(outputs(now), outputs(before), strict=True):
        assert ours.output_type == theirs.output_type
        assert set(ours.data) == set(theirs.data)
        for kind, data in theirs.data.items():
            if VEGA.fullmatch(kind):
                same(*(inlined(spec, spec["datasets"]) for spec in (ours.data[kind], data)))
            elif kind != "image/png":
                assert ours.data[kind] == data


@OURS
def test_a_notebook_is_fit_to_be_read(path):
    text = path.read_text()
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    first, *_, title, last = notebook.cells
    assert first.source.startswith("# ")
    assert "**Question.**" in first.source
    assert title.source == "## What was found"
    (found,) = last.outputs
    assert len(re.findall(r"\d\.\d", found.data["text/markdown"])) > 5
    assert found.data["text/plain"] == found.data["text/markdown"]
    assert not re.search(r"(?<![\w.])/(home|tmp|root|usr|work|Users)/|file://|20\d\d-\d\d-\d\dT", text)
    assert text == compact(nbformat.writes(cleaned(notebook))) + "\n"
    kinds = {output.output_type for output in outputs(notebook)}
    assert kinds <= {"display_data", "execute_result"}
    drawn = charts(notebook)
    assert len(drawn) >= 3
    for spec in drawn:
        assert sum(map(len, spec["datasets"].values())) <= 5000
    pictures = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.data]
    assert len(pictures) == len(drawn)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == list(
        range(1, 1 + sum(cell.cell_type == "code" for cell in notebook.cells))
    )


def test_there_are_notebooks_and_they_are_small():
    assert len(NOTEBOOKS) >= 6
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 2_000_000


def test_numbers_that_differ_are_noticed():
    before = charts(nbformat.read(NOTEBOOKS[0], as_version=4))[0]
    before = inlined(before, before["datasets"])
    now = json.loads(json.dumps(before))
    now["data"]["values"][3]["value"] *= 1 + 1e-6
    same(now, before)
    now["data"]["values"][3]["value"] *= 1.001
    with pytest.raises(AssertionError, match=r"chart\.data\.values\[3\]\.value"):
        same(now, before)


def test_packed_pictures_look_the_same():
    vl_convert = pytest.importorskip("vl_convert")
    spec = {"data": {"values": [{"x": 1, "y": 2}, {"x": 2, "y": 1}]}, "mark": "bar"}
    spec["encoding"] = {name: {"field": name, "type": "quantitative"} for name in ("x", "y")}
    picture = vl_convert.vegalite_to_png(spec, scale=1)
    small = packed(picture)
    assert len(small) < len(picture) / 2
    assert packed(small) == small
    once, again = (pixels(one) for one in (picture, small))
    assert once.shape == again.shape
    assert np.abs(once.astype(int) - again).mean() < 0.5


def pixels(picture):
    """Decode what `packed` makes and takes, independently of it."""
    import struct
    import zlib

    place, palette, data = 8, None, b""
    while place < len(picture):
        (length,) = struct.unpack(">I", picture[place : place + 4])
        name, content = picture[place + 4 : place + 8], picture[place + 8 : place + 8 + length]
        if name == b"IHDR":
            width, height = struct.unpack(">II", content[:8])
        palette = np.frombuffer(content, np.uint8).reshape(-1, 3) if name == b"PLTE" else palette
        data += content if name == b"IDAT" else b""
        place += 12 + length
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, -1)
    if palette is not None:
        return palette[rows[:, 1:]]
    found = np.zeros((height, width, 4), np.uint8)
    for y, row in enumerate(rows):
        assert row[0] in (0, 1)
        line = row[1:].reshape(width, 4)
        for x in range(width):
            found[y, x] = line[x] + (found[y, x - 1] if row[0] and x else 0)
    return found[..., :3]


def test_pages_of_pictures_are_base64():
    for path in NOTEBOOKS:
        for output in outputs(nbformat.read(path, as_version=4)):
            if "image/png" in output.data:
                assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")


def test_rows_of_charts_are_one_line_each():
    text = nbformat.writes(nbformat.v4.new_notebook(metadata={"a": {"b": 1, "c": "two  spaces"}, "d": [{"e": 1.5}]}))
    short = compact(text)
    assert json.loads(short) == json.loads(text)
    assert '{ "b": 1, "c": "two  spaces" }' in short
    assert Path(HERE / "rerun.py").exists()
