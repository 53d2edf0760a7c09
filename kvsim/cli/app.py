"""``kvsim app``."""

import importlib
import importlib.util
import os
import tempfile
import threading
from pathlib import Path
from typing import Annotated

import typer

from kvsim.cli.options import find_traces
from kvsim.errors import KvsimError

__all__ = ["TRACES", "app"]

TRACES = "KVSIM_APP_TRACES"
"""The variable that tells the explorer which recordings to offer, joined as a PATH is."""


def app(
    trace: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR|GLOB", help="Recordings to offer; repeatable. The bundled samples by default."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8501,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open the explorer: see what a policy keeps and throws away, token by token.

    It needs the extra app (streamlit) and no torch. It listens on this machine alone unless --host says otherwise;
    whoever reaches it can look at every recording that you can read.

    Example: kvsim app --trace traces/samples/smollm2-needle-512
    """
    found = find_traces(trace) if trace else []
    package = importlib.util.find_spec("kvsim_explorer")
    if package is None or package.origin is None or importlib.util.find_spec("streamlit") is None:
        raise KvsimError("the explorer needs streamlit: pip install 'kvsim[app]'")
    options = {
        "server.address": host,
        "server.port": port,
        "server.headless": str(not browser).lower(),
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "server.fileWatcherType": "none",
        # Sliders have a default, which a shared URL leaves out, and are set from charts and buttons too.
        "global.disableWidgetStateDuplicationWarning": "true",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    os.environ[TRACES] = os.pathsep.join(found)
    _load()
    threading.Thread(target=_compile, daemon=True).start()
    from streamlit.web.cli import main as streamlit

    streamlit(["run", str(Path(package.origin).parent / "start" / "app.py"), *words], standalone_mode=False)


def _load() -> None:
    """Import what pages use: two threads that import at once see modules by halves."""
    for name in ("pandas", "polars", "pyarrow", "kvsim.charts", "kvsim.synth", "vl_convert"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)


def _compile() -> None:
    """Load, or after an installation compile, the kernels of a replay while the browser opens."""
    from kvsim.replay import replay
    from kvsim.synth import Synthetic, write_synthetic

    with tempfile.TemporaryDirectory() as folder:
        replay(write_synthetic(Synthetic(prompt=64, steps=4, layers=2, heads=2), Path(folder) / "trace"), "ema:0.8")
