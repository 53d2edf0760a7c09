"""Files that a policy names."""

import os
import stat
from pathlib import Path

from kvsim.errors import PolicyError

__all__ = ["regular_size"]


def regular_size(path: str | Path, hint: str) -> int:
    """Give a file's size in bytes, without opening it: a named pipe would wait for a writer for ever.

    Parameters
    ----------
    path : str or Path
        The file; links are followed.
    hint : str
        What the file should be, for errors.

    Raises
    ------
    PolicyError
        If it is missing, cannot be looked at, or is no regular file.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        raise PolicyError(f"{path}: no such file; {hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PolicyError(f"{path}: cannot be read ({reason}); {hint}") from None
    if not stat.S_ISREG(found.st_mode):
        raise PolicyError(f"{path}: is not a regular file; {hint}")
    return found.st_size
