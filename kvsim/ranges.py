"""Sets of positions as people write them: ``513-520,530``."""

import re
from collections.abc import Iterable

from kvsim.errors import KvsimError

__all__ = ["read_positions", "read_range", "write_positions"]

_PART = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def read_positions(text: str, count: int) -> list[int]:
    """Read positions, each once and ascending.

    Parameters
    ----------
    text : str
        Numbers and ranges with both ends included, joined by commas; nothing for none.
    count : int
        How many positions there are.

    Raises
    ------
    KvsimError
        If a part is neither, or lies beyond the last position.

    Examples
    --------
    >>> read_positions("513-515,530", 560)
    [513, 514, 515, 530]
    """
    found: set[int] = set()
    for part in filter(None, (one.strip() for one in text.split(","))):
        match = _PART.fullmatch(part)
        if match is None:
            raise KvsimError(f"{part!r} is no position and no range of positions; write 513-520,530")
        low, high = (int(one) for one in (match[1], match[2] or match[1]))
        if low > high:
            raise KvsimError(f"{part}: runs backwards; write {high}-{low}")
        if high >= count:
            raise KvsimError(f"{part}: positions are 0 to {count - 1}")
        found.update(range(low, high + 1))
    return sorted(found)


def read_range(text: str, option: str) -> tuple[int, int]:
    """Read one range, both ends included, such as ``5-20``, or one number.

    Raises
    ------
    KvsimError
        If it is neither, naming `option`, or runs backwards.

    Examples
    --------
    >>> read_range("5-20", "--steps")
    (5, 20)
    """
    match = _PART.fullmatch(text.strip())
    if match is None:
        raise KvsimError(f"{option} takes a range with both ends, such as 5-20, got {text!r}")
    low, high = (int(one) for one in (match[1], match[2] or match[1]))
    if low > high:
        raise KvsimError(f"{option} {text}: runs backwards; write {high}-{low}")
    return low, high


def write_positions(positions: Iterable[int]) -> str:
    """Write positions as `read_positions` reads them, the shortest way.

    Examples
    --------
    >>> write_positions([530, 513, 514, 515])
    '513-515,530'
    """
    runs: list[list[int]] = []
    for position in sorted(set(positions)):
        if runs and runs[-1][1] == position - 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)
