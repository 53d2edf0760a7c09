"""The errors a user of kvsim meets, and the wording they share."""

import difflib
from collections.abc import Iterable

__all__ = ["KvsimError", "PolicyError", "unknown_name"]


class KvsimError(ValueError):
    """A request that kvsim cannot carry out; the command line prints it and exits with 2."""


class PolicyError(KvsimError):
    """A policy that is malformed, unknown, or cannot run on the given trace."""


def unknown_name(what: str, name: str, valid: Iterable[str]) -> PolicyError:
    """Build the error for an unknown name: it lists the valid ones and suggests the nearest.

    Parameters
    ----------
    what : str
        The kind of thing named, such as ``"policy"`` or ``"axis"``.
    name : str
        The name that was not found.
    valid : iterable of str
        Every name that would have been accepted.
    """
    names = sorted(valid)
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return PolicyError(f"unknown {what} {name!r}{hint} (valid: {', '.join(names)})")
