"""The sidebar's choice of a recording: a bundled sample, a directory, a glob, or an uploaded .npz file."""

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path

import streamlit as st
from kvsim_traces import import_npz
from kvsim_traces.npz import NpzFile

import kvsim
from kvsim import KvsimError, Trace, TraceError
from kvsim.cli.app import TRACES
from kvsim.cli.options import find_traces
from kvsim_explorer.literal import literal

__all__ = ["MOST_MEGABYTES", "UPLOADED", "pick", "samples"]

UPLOADED = "upload"
"""What the URL calls an uploaded recording, which it cannot bring along."""

OTHER = "a directory or glob …"
MOST_MEGABYTES = 200
MOST_UNPACKED = 4 * 10**9
"""Bytes of the arrays of an upload."""


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
    labels = _labels(offered)
    st.selectbox(
        "Recording",
        [*offered, UPLOADED, OTHER],
        key="offered",
        format_func=lambda name: "an uploaded .npz file" if name == UPLOADED else labels.get(name, name),
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
    if "://" in location and location not in offered and not _agreed(location):
        return None
    found = find_traces([location])
    if len(found) > 1:
        names = _labels(found)
        chosen = st.selectbox("Of these", found, key="which", bind="query-params", format_func=lambda one: names[one])
        location = found[0] if chosen is None else chosen
    else:
        location = found[0]
    return opened(location), location


def _labels(locations: list[str]) -> dict[str, str]:
    """Name recordings by their directories; by their whole paths where two are called the same."""
    bases = {one: os.path.basename(one.rstrip("/")) or one for one in locations}
    twice = {base for base in bases.values() if list(bases.values()).count(base) > 1}
    return {one: one if base in twice else base for one, base in bases.items()}


def _agreed(location: str) -> bool:
    """Ask before an address from a link is fetched, which whoever made the link may want."""
    if st.session_state.get("agreed") == location:
        return True
    st.warning(literal(f"{location} lies elsewhere: opening it fetches it."))
    if st.button("Open it"):
        st.session_state["agreed"] = location
        st.rerun()
    return False


def _start(offered: list[str]) -> None:
    """Take over what the URL says, which the browser's Back changes too; without a word there the first is shown."""
    state = st.session_state
    location = st.query_params.get("trace")
    if location is None and state.get("offered") == OTHER:
        return
    location = location or (offered[0] if offered else "")
    if location == state.get("location"):
        return
    known = location in offered or location == UPLOADED
    state["offered"] = location if known else OTHER
    state["typed"] = "" if known else location
    state["location"] = location
    if location:
        st.query_params["trace"] = location


def _take() -> None:
    chosen = st.session_state["offered"]
    location = st.session_state.get("typed", "").strip() if chosen == OTHER else chosen
    st.session_state["location"] = location
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
    trace = _open(location, stamp)
    # A file that has become shorter than its memory map would end the whole process when it is read.
    for name in trace.manifest.arrays:
        trace.stored(name).check_files()
    return trace


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
    location = os.path.join(folder, re.sub(r"[^\w-]+", "-", Path(file.name).stem)[:60].strip("-") or "upload")
    if not os.path.exists(location):
        source = os.path.join(folder, "content.npz")
        try:
            with open(source, "wb") as copy:
                copy.write(file.getbuffer())
            _import(source, location)
        except TraceError as error:
            raise TraceError(str(error).replace(source, file.name)) from None
        finally:
            Path(source).unlink(missing_ok=True)
    return opened(location), location


def _import(source: str, location: str) -> None:
    """Import, unless it takes more room than there is to be; a click on anything stops it."""
    with NpzFile(Path(source)) as archive:
        size = sum(member.nbytes for member in archive.members.values())
    room = min(MOST_UNPACKED, shutil.disk_usage(os.path.dirname(source)).free // 2)
    if size > room:
        raise TraceError(f"{source}: unpacks to {size / 1e6:,.0f} MB; an upload may take {room / 1e6:,.0f} MB")
    bar = st.progress(0.0, text="Importing")

    def tell(done: int, total: int) -> None:
        bar.progress(done / max(1, total), text="Importing")

    import_npz(source, location, progress=tell)
    bar.empty()


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@st.cache_resource(scope="session", max_entries=1, show_spinner=False, on_release=_remove)
def _folder(file_id: str) -> str:
    """Make the folder of one upload; it goes with the next upload, the session, or the process."""
    folder = tempfile.mkdtemp(prefix="kvsim-upload-")
    atexit.register(_remove, folder)
    return folder
