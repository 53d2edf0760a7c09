"""Charts as files."""

import importlib.util
import io
from pathlib import Path
from typing import Any

import altair as alt
from kvsim_traces.files import os_reason, sync_directory, write_whole

from kvsim.errors import KvsimError, unknown_name

__all__ = ["SUFFIXES", "can_draw", "check_path", "save"]

SUFFIXES = {".html": "html", ".json": "json", ".png": "png", ".svg": "svg"}
"""Kinds of files; pictures need the extra ``charts``, and with it a page carries the libraries that draw it."""

SCALE = 2.0


def check_path(path: str | Path) -> Path:
    """Say whether a chart can be written there, before it is drawn.

    Raises
    ------
    KvsimError
        If the suffix is unknown, the path is a directory, or a picture is asked for without the extra ``charts``.
    """
    path = Path(path)
    if path.name in SUFFIXES:
        raise KvsimError(f"{path}: is a suffix alone; name a file, such as chart{path.name}")
    if path.suffix not in SUFFIXES:
        raise unknown_name("suffix of a chart's file", path.suffix or path.name, SUFFIXES)
    if path.is_dir():
        raise KvsimError(f"{path}: is a directory; a chart is written to one file")
    if path.suffix in (".png", ".svg") and not can_draw():
        raise KvsimError(
            f"{path}: a {path.suffix} needs vl-convert-python: pip install 'kvsim[charts]'; .html and .json do without"
        )
    return path


def save(chart: alt.TopLevelMixin, path: str | Path) -> Path:
    """Write a chart whole or not at all, as the suffix says: ``.html``, ``.json`` (Vega-Lite), ``.png`` or ``.svg``.

    Parameters
    ----------
    chart : altair chart
        What to write.
    path : path
        The file to create or replace; its directory is created.

    Raises
    ------
    KvsimError
        See `check_path`; also if the file cannot be written.
    """
    path = check_path(path)
    drawn: Any = chart
    kind = SUFFIXES[path.suffix]
    if kind == "html":
        data = drawn.to_html(inline=can_draw()).encode()
    elif kind == "json":
        data = drawn.to_json(indent=None).encode() + b"\n"
    else:
        buffer = io.BytesIO() if kind == "png" else io.StringIO()
        drawn.save(buffer, format=kind, **({"scale_factor": SCALE} if kind == "png" else {}))
        content = buffer.getvalue()
        data = content if isinstance(content, bytes) else content.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [data])
        sync_directory(path.parent)
    except OSError as error:
        raise KvsimError(f"{path}: cannot be written ({os_reason(error)})") from error
    return path


def can_draw() -> bool:
    """Whether the extra ``charts`` is installed."""
    return importlib.util.find_spec("vl_convert") is not None
