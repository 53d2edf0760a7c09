"""Choosing a recording: samples, directories, globs, uploads, and what can be wrong with them."""

import io
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from exploring import LONG, MULTI, NEEDLE, SAMPLES, errors, open_page
from streamlit.testing.v1 import AppTest

from kvsim.cli.app import TRACES


def heading(app: AppTest) -> list[str]:
    return [one.value for one in app.header]


def test_a_sample_a_directory_and_a_glob_can_be_chosen():
    app = open_page("trace", trace=MULTI)
    assert heading(app) == [Path(MULTI).name]
    long = next(one for one in app.selectbox(key="offered").options if Path(one).name == Path(LONG).name)
    app.selectbox(key="offered").set_value(long).run()
    assert heading(app) == [Path(LONG).name]
    assert Path(app.query_params["trace"]).name == Path(LONG).name
    app.selectbox(key="offered").set_value("a directory or glob …").run()
    app.text_input(key="typed").set_value(f"{SAMPLES}/smollm2-[mn]*").run()
    assert app.selectbox(key="which").options == [Path(MULTI).name, Path(NEEDLE).name]
    assert heading(app) == [Path(MULTI).name]
    app.selectbox(key="which").set_value(NEEDLE).run()
    assert heading(app) == [Path(NEEDLE).name]
    assert not errors(app)


def test_the_command_line_says_what_is_offered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TRACES, f"{LONG}:{MULTI}")
    app = AppTest.from_string("from kvsim_explorer.main import main\nmain()", default_timeout=60).run()
    assert heading(app) == [Path(LONG).name]
    assert app.selectbox(key="offered").options[:2] == [Path(LONG).name, Path(MULTI).name]


def test_what_is_no_recording_is_named_and_the_sidebar_stays(tmp_path: Path):
    app = open_page("trace", trace=str(tmp_path / "nowhere"))
    assert errors(app) == [f"{tmp_path / 'nowhere'}: no such trace directory"]
    assert app.text_input(key="policy").value == "ema:0.8"
    app.text_input(key="typed").set_value(str(tmp_path)).run()
    assert len(errors(app)) == 1
    assert str(tmp_path) in errors(app)[0]
    app.text_input(key="typed").set_value(LONG).run()
    assert not errors(app)
    assert heading(app) == [Path(LONG).name]


def test_a_recording_that_goes_while_open(tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(LONG, copy)
    app = open_page("trace", trace=str(copy))
    assert heading(app) == ["copy"]
    shutil.rmtree(copy)
    app.text_input(key="policy").set_value("cumulative").run()
    assert errors(app) == [f"{copy}: no such trace directory"]
    shutil.copytree(MULTI, copy)
    app.run()
    assert not errors(app)
    assert app.metric[0].value == "255"


def uploaded(content: bytes) -> AppTest:
    app = open_page("trace", trace="upload", policy="cumulative", others="")
    app.file_uploader(key="npz").upload("mine.npz", content).run()
    return app


def npz(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def test_an_upload_is_imported_shown_and_removed():
    before = set(Path(tempfile.gettempdir()).glob("kvsim-upload-*"))
    scores = np.tril(np.ones((4, 12)), 8)[:, None]
    app = uploaded(npz(scores=scores / scores.sum(axis=-1, keepdims=True), prompt_length=8))
    assert not errors(app)
    assert heading(app) == ["mine"]
    (folder,) = set(Path(tempfile.gettempdir()).glob("kvsim-upload-*")) - before
    assert sorted(one.name for one in folder.iterdir()) == ["mine"]
    other = scores[:3, :, :11]
    app.file_uploader(key="npz").upload("next.npz", npz(scores=other, prompt_length=8)).run()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"nothing of the kind", "zip"),
        (npz(scores=np.array([{"a": 1}], dtype=object), prompt_length=3), "object"),
        (npz(scores=np.ones((2, 1, 9))), "prompt_length"),
    ],
)
def test_a_bad_upload_is_refused(content: bytes, why: str):
    app = uploaded(content)
    assert len(errors(app)) == 1
    assert why in errors(app)[0]
    assert app.text_input(key="policy").value == "cumulative"
