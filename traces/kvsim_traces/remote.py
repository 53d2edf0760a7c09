"""Traces at an address: copied to a local cache with fsspec, then opened like any other."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final

from kvsim_traces.errors import TraceError
from kvsim_traces.files import MAX_METADATA_BYTES, os_reason
from kvsim_traces.layout import METADATA_NAME
from kvsim_traces.manifest import ARRAY_NAMES
from kvsim_traces.paths import hidden_directory, local_path, replace_directory
from kvsim_traces.reader import open_array, read_manifest

_COPY_BYTES: Final = 2**22
_NAME_LENGTH: Final = 100


def cache_directory() -> Path:
    """Return where copies lie: ``$KVSIM_CACHE``, or ``kvsim/traces`` under the user's cache directory."""
    chosen = os.environ.get("KVSIM_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsim" / "traces"


def fetch_trace(address: str) -> Path:
    """Copy a remote trace into the local cache, unless that very version is there.

    Parameters
    ----------
    address : str
        ``scheme://...`` of the trace's directory; any scheme whose fsspec backend is installed.

    Returns
    -------
    Path
        The local directory; opening it checks it like any other.

    Raises
    ------
    TraceError
        Naming the address or the file: if it cannot be read, has no backend, is larger than metadata may be, or arrives
        with another size than was listed. No partial copy is left.
    """
    import fsspec

    local_path(address)
    system, root = _call(address, fsspec.core.url_to_fs, address, what="opened")
    root = root.rstrip("/")
    metadata = _metadata(system, f"{root}/{METADATA_NAME}", address)
    version = hashlib.sha256(f"{address}\n".encode() + metadata).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", root.rsplit("/", 1)[-1])[:_NAME_LENGTH] or "trace"
    target = cache_directory() / version / name
    if _whole(target):
        return target
    arrays = _array_names(metadata, address)
    try:
        with hidden_directory(target, parents=True) as aside:
            new = aside / "new"
            new.mkdir()
            (new / METADATA_NAME).write_bytes(metadata)
            for array in arrays:
                (new / array).mkdir()
                for base, size in _call(address, _files, system, f"{root}/{array}"):
                    _copy(system, f"{root}/{array}/{base}", size, new / array / base, address)
            # Another process may have put the same copy there meanwhile.
            replace_directory(new, target, aside, lambda there: not _whole(there))
    except OSError as error:
        raise TraceError(f"{error.filename or target}: {os_reason(error)}; the copy of {address} stopped") from error
    return target


def _whole(copy: Path) -> bool:
    """Whether a copy has all its files, of their right sizes."""
    try:
        manifest = read_manifest(copy)
        for name in manifest.arrays:
            open_array(copy, name, manifest).check_files()
    except TraceError:
        return False
    return True


def _files(system: Any, directory: str) -> list[tuple[str, int]]:
    """List the files of an array that a trace has, whatever else is there, and their sizes."""
    found = []
    for entry in system.ls(directory, detail=True):
        base = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
        if entry["type"] == "file" and re.fullmatch(r"zarr\.json|c(\.\d{1,10}){1,4}", base, re.ASCII):
            found.append((base, int(entry["size"])))
    return found


def _call(address: str, function: Any, *args: Any, what: str = "read", **options: Any) -> Any:
    try:
        return function(*args, **options)
    except Exception as error:
        # Every backend has errors of its own, some of many lines.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise TraceError(f"{address}: cannot be {what}: {reason:.300}") from error


def _metadata(system: Any, path: str, address: str) -> bytes:
    size = _call(address, system.size, path)
    if size is None or size > MAX_METADATA_BYTES:
        raise TraceError(f"{address}/{METADATA_NAME}: {size} bytes of metadata exceed {MAX_METADATA_BYTES}")
    return bytes(_call(address, system.cat_file, path, start=0, end=MAX_METADATA_BYTES))


def _array_names(metadata: bytes, address: str) -> list[str]:
    try:
        names = json.loads(metadata)["attributes"]["kvsim"]["arrays"]
        if isinstance(names, list) and all(isinstance(name, str) and name in ARRAY_NAMES for name in names):
            return sorted(set(names))
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise TraceError(f"{address}/{METADATA_NAME}: attributes.kvsim.arrays: must be a list of {', '.join(ARRAY_NAMES)}")


def _copy(system: Any, path: str, size: int, target: Path, address: str) -> None:
    done = 0
    with _call(address, system.open, path, "rb") as source, open(target, "wb") as copy:
        while part := _call(address, source.read, _COPY_BYTES):
            done += len(part)
            if done > size:
                break
            copy.write(part)
    if done != size:
        raise TraceError(f"{address}: {path}: listed with {size} bytes, but {done} or more arrived")
