"""Where things go: what lies at a path, hidden temporary directories, and directories renamed into place."""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvsim_traces.errors import TraceError
from kvsim_traces.files import ASIDE_SUFFIX, made_directory, os_reason, remove_empty, sync_directory

_TRIES: Final = 100
# A name may have 255 bytes; a temporary one must not fail where the final one fits.
_NAME_PART: Final = 40
_OCCUPIED: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def local_path(path: str | Path) -> Path:
    """Return a path made absolute, without following links.

    Raises
    ------
    TraceError
        If no file system can hold such a path, or the working directory is gone.
    """
    try:
        os.fsencode(path)
        if "\0" in os.fspath(path):
            raise TraceError(f"{os.fspath(path)!r:.200}: a path has no null characters")
        return Path(os.path.abspath(path))
    except UnicodeError:
        raise TraceError(f"{os.fspath(path)!r:.200}: is not a path") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be found: the working directory: {os_reason(error)}") from error


def path_kind(path: Path, *, follow: bool = True) -> str:
    """Say what lies at a path.

    Parameters
    ----------
    path : Path
        The path.
    follow : bool
        Whether to look through a symbolic link.

    Returns
    -------
    str
        ``missing``, ``directory``, ``file``, ``link`` or ``other``.

    Raises
    ------
    TraceError
        If that cannot be found out: a name too long, a directory above that must not be searched.
    """
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {os_reason(error)}") from error
    kinds = {stat.S_IFDIR: "directory", stat.S_IFREG: "file", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(mode), "other")


def check_new_directory(path: Path, hint: str = "") -> bool:
    """Check that a directory can be made at a path: that nothing is there, or an empty directory.

    Returns
    -------
    bool
        Whether the empty directory is there.

    Raises
    ------
    TraceError
        Otherwise; `hint` is added to the message.
    """
    kind = path_kind(path)
    if kind == "missing":
        return False
    try:
        if kind == "directory" and not os.listdir(path):
            return True
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {os_reason(error)}") from error
    raise TraceError(f"{path}: exists and is not an empty directory{hint}")


@contextlib.contextmanager
def hidden_directory(target: Path, *, parents: bool = False) -> Iterator[Path]:
    """Make a directory beside a path, of a unique hidden name, and remove it in the end with all that is in it.

    Build in it and rename into place: a killed process leaves nothing that a pattern like ``*`` finds.

    Parameters
    ----------
    target : Path
        The path.
    parents : bool
        Whether to make the directories above it; those are removed again while they are empty.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    top = made_directory(target)
    aside = None
    try:
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name[:_NAME_PART]}.", suffix=ASIDE_SUFFIX, dir=target.parent))
        yield aside
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        if parents and top != target:
            remove_empty(target.parent, top)


def replace_directory(new: Path, target: Path, aside: Path, replaceable: Callable[[Path], bool]) -> None:
    """Rename a directory into place; what was there before is moved into `aside`.

    Parameters
    ----------
    new : Path
        The directory.
    target : Path
        Its place.
    aside : Path
        A directory of this process on the same disk, to be removed afterwards.
    replaceable : callable
        Given the target when something is there: whether to put `new` in its place, else `new` stays where it is.

    Raises
    ------
    OSError
        If it cannot be renamed.
    """
    for attempt in range(_TRIES):
        try:
            os.rename(new, target)
            break
        except OSError as error:
            if error.errno not in _OCCUPIED or attempt == _TRIES - 1:
                raise
        # Gone, if another process is about to put its own there.
        if path_kind(target, follow=False) != "missing":
            if not replaceable(target):
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(target, aside / f"old{attempt}")
    sync_directory(target.parent)
