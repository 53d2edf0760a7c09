"""The sidebar's choice of a recording: a bundled sample, a directory, a glob, or an uploaded .npz file."""

import os
import tempfile
from pathlib import Path

import streamlit as st
from kvsim_traces import import_npz

import kvsim
from kvsim import KvsimError, Trace
from kvsim.cli.app import TRACES
from kvsim.cli.options import find_traces

__all__ = ["MOST_MEGABYTES", "UPLOADED", "pick", "samples"]

UPLOADED = "upload"
"""What the URL calls an uploaded recording, which it cannot bring along."""

OTHER = "a directory or glob …"
MOST_MEGABYTES = 200


def samples() -> list[str]:
    """List the recordings that are offered: those that ``kvsim app --trace`` named, or else the bundled samples."""
    named = os.environ.get(TRACES)
    if named:
        return find_traces(named.split(os.pathsep))
    folder = Path(kvsim.__file__).parents[1] / "traces" / "samples"
    found = sorted(folder.glob("*/zarr.json"), reverse=True)
    return [os.path.relpath(file.parent) if _is_near(file) else str(file.parent) for file in found]


def _is_near(file: Path) -> bool:
    return file.is_relative_to(Path.cwd())


def pick() -> tuple[Trace, str] | None:
    """Show the choice; give the recording and its location, or None where there is none to show."""
    offered = samples()
    _start(offered)
    st.selectbox(
        "Recording",
        [*offered, UPLOADED, OTHER],
        key="offered",
        format_func=lambda name: "an uploaded .npz file" if name == UPLOADED else os.path.basename(name) or name,
        on_change=_take,
    )
    if st.session_state["offered"] == UPLOADED:
        return _uploaded()
    if st.session_state["offered"] == OTHER:
        st.text_input("Directory, glob or URL", key="typed", on_change=_take, placeholder="runs/*")
    location = st.query_params.get("trace", "")
    if not location:
        st.info("Name a recording: a trace directory, a glob or a URL.")
        return None
    found = find_traces([location])
    if len(found) > 1:
        chosen = st.selectbox("Of these", found, key="which", bind="query-params", format_func=os.path.basename)
        location = found[0] if chosen is None else chosen
    else:
        location = found[0]
    return opened(location), location


def _start(offered: list[str]) -> None:
    """Take over what the URL says, once a session; without a word there the first recording is shown."""
    if "offered" in st.session_state:
        return
    location = st.query_params.get("trace") or (offered[0] if offered else "")
    known = location in offered or location == UPLOADED
    st.session_state["offered"] = location if known else OTHER
    st.session_state["typed"] = "" if known else location
    if location:
        st.query_params["trace"] = location


def _take() -> None:
    chosen = st.session_state["offered"]
    location = st.session_state.get("typed", "").strip() if chosen == OTHER else chosen
    if location:
        st.query_params["trace"] = location
    else:
        st.query_params.pop("trace", None)


def opened(location: str) -> Trace:
    """Open a recording, or give the one that is open, as long as it lies there unchanged.

    Raises
    ------
    KvsimError
        If it was there before and is gone.
    TraceError
        If it is no recording, or damaged.
    """
    stamp: tuple[int, int] | None = None
    if "://" not in location:
        try:
            found = os.stat(os.path.join(location, "zarr.json"))
        except FileNotFoundError:
            raise KvsimError(f"{location}: there is no recording there (any more)") from None
        stamp = found.st_mtime_ns, found.st_ino
    return _open(location, stamp)


@st.cache_resource(max_entries=8, show_spinner="Opening the recording")
def _open(location: str, stamp: tuple[int, int] | None) -> Trace:
    return kvsim.open_trace(location)


def _uploaded() -> tuple[Trace, str] | None:
    file = st.file_uploader(
        "An .npz file",
        type="npz",
        key="npz",
        max_upload_size=MOST_MEGABYTES,
        help="prompt_length and one of attention [T, K, H, L], scores [T, K, L], or queries and keys; "
        "see the format in traces/README.md. It is imported into a temporary folder and removed when you leave.",
    )
    if file is None:
        st.info("An uploaded recording is not part of a shared URL.")
        return None
    folder = _folder(file.file_id)
    location = os.path.join(folder.name, Path(file.name).stem or "upload")
    if not os.path.exists(location):
        source = os.path.join(folder.name, "upload.npz")
        try:
            with open(source, "wb") as copy:
                copy.write(file.getbuffer())
            with st.spinner("Importing"):
                import_npz(source, location)
        finally:
            Path(source).unlink(missing_ok=True)
    return opened(location), location


def _remove(folder: "tempfile.TemporaryDirectory[str]") -> None:
    folder.cleanup()


@st.cache_resource(scope="session", max_entries=1, show_spinner=False, on_release=_remove)
def _folder(file_id: str) -> "tempfile.TemporaryDirectory[str]":
    """Make the folder of one upload; it goes with the next upload, the session, or the process."""
    return tempfile.TemporaryDirectory(prefix="kvsim-upload-")
