"""Opening pages of the explorer without a browser."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
NEEDLE = str(SAMPLES / "smollm2-needle-512")
MULTI = str(SAMPLES / "smollm2-multineedle-256")
LONG = str(SAMPLES / "smollm2-long-64")


def open_page(page: str, *, trace: str = NEEDLE, **parameters: str | list[str]) -> AppTest:
    """Run a page as a shared URL with these parameters would show it."""
    app = AppTest.from_string("from kvsim_explorer.main import main\nmain()", default_timeout=120)
    app.query_params["trace"] = trace
    app.query_params["page"] = page
    for name, value in parameters.items():
        app.query_params[name] = value
    return app.run()


def said(app: AppTest) -> list[str]:
    """Give what stands on the page as plain text: captions, texts and markdown, in that order."""
    found = [one.value for kind in (app.caption, app.text, app.markdown) for one in kind]
    return [re.sub(r"\\(.)", r"\1", one) for one in found]


def errors(app: AppTest) -> list[str]:
    """Give the errors on the page, of kvsim and of Python."""
    return [re.sub(r"\\(.)", r"\1", one.value) for one in [*app.error, *app.exception]]


def drawn(app: AppTest) -> list[dict[str, Any]]:
    """Give the charts on the page as specifications with their data, from the top."""
    import polars as pl

    found = []
    for one in app.get("vega_lite_chart"):
        tables = {data.name: pl.read_ipc_stream(data.data.data).to_dicts() for data in one.proto.datasets}
        rows = {name: [{k: v for k, v in row.items() if v is not None} for row in t] for name, t in tables.items()}
        found.append({**json.loads(one.proto.spec), "datasets": rows})
    return found


def replayed(trace: str, *policies: str, budget: str = "10%") -> list[dict[str, Any]]:
    """Give what ``kvsim replay --json`` prints."""
    words = [word for policy in policies for word in ("--policy", policy)]
    command = [sys.executable, "-m", "kvsim", "replay", "--trace", trace, *words, "--budget", budget, "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    return found
